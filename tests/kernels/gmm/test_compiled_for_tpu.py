import pytest

from tests.kernels.tpu_topology import compile_apart, needs_libtpu


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_forward_and_gradients_compile_with_tiles_chosen_and_the_largest_that_fit(topology):
    (found,) = compile_apart("tests.kernels.gmm.compile_for_tpu", topology)
    assert "vmem" in found.pop("huge").lower()
    assert len(found) >= 6
    assert [case for case, error in found.items() if error] == [], found
