import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moelib.kernels.flash_attention import MaskSpec, flash_attention
from tests.kernels.flash_attention.cases import Case, assert_close, operands, pulled
from tests.kernels.gpu_topology import H100


@pytest.mark.parametrize(
    ("dim", "dtype", "spec", "options", "match"),
    [
        (64, "float32", {}, {}, "takes bfloat16 and float16, not float32"),
        (92, "bfloat16", {}, {}, "not 92; set 96"),
        (256, "bfloat16", {}, {}, "not 256; set 128"),
        (64, "bfloat16", {}, {"sinks": jnp.ones(1, jnp.bfloat16)}, "takes no sinks"),
        (64, "bfloat16", {"logit_cap": 2.0}, {}, r"logit_cap=2\.0"),
        (64, "bfloat16", {}, {"segment_ids": jnp.ones((1, 9), jnp.int32)}, "not 9; set 10"),
    ],
)
def test_operands_that_cudnn_cannot_take_are_refused(dim, dtype, spec, options, match):
    x = jnp.ones((1, 9, 1, dim), dtype)
    with pytest.raises(ValueError, match=f"'cudnn' .*{match}.*=flash_attention=xla"):
        flash_attention(x, x, x, MaskSpec(1.0, **spec), **options, backend="cudnn")


def test_a_missing_cudnn_is_named_with_its_package(monkeypatch):
    def missing(*args, **kw):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    device = AbstractDevice(device_kind=H100, num_cores=132, platform="gpu")
    run = lambda x: flash_attention(x, x, x, MaskSpec(1.0), backend="cudnn")
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        pytest.raises(ValueError, match="Install nvidia-cudnn-cu13"),
    ):
        jax.eval_shape(run, x)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_values_and_gradients_are_those_of_the_xla_form(window, packed):
    case = Case(128, 4, 2, 64, window=window, packed=packed, dtype="bfloat16")
    got = pulled(*operands(case), spec=case.spec(), backend="cudnn")
    want = pulled(*operands(case), spec=case.spec(), backend="xla")
    assert_close(got, want, 2**-5)
