import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.flash_attention import MaskSpec, flash_attention
from tests.kernels.comparing import assert_close, compiled_for
from tests.kernels.flash_attention.cases import Case, operands, pulled
from tests.kernels.gpu_topology import H100


def test_a_missing_cudnn_is_named_with_its_package(monkeypatch):
    def missing(*args, **kw):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    run = lambda x: flash_attention(x, x, x, MaskSpec(1.0), backend="cudnn")
    with compiled_for(H100), pytest.raises(ValueError, match="nvidia-cudnn-cu13"):
        jax.eval_shape(run, x)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_values_and_gradients_are_those_of_the_xla_form(window, packed):
    case = Case(128, 4, 2, 64, window=window, packed=packed, dtype="bfloat16")
    got = pulled(*operands(case), spec=case.spec(), backend="cudnn")
    want = pulled(*operands(case), spec=case.spec(), backend="xla")
    assert_close(got, want, 2**-5)
