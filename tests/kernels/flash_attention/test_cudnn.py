import jax.numpy as jnp
import pytest

from moelib.kernels.flash_attention import flash_attention
from tests.kernels.flash_attention.cases import Case, assert_close, operands, pulled


@pytest.mark.parametrize(
    ("dim", "dtype", "options", "message"),
    [
        (64, "float32", {}, "dtype is float32; cuDNN takes bfloat16 and float16"),
        (92, "bfloat16", {}, "head_dim is 92; .* up to 128, 96 is the nearest"),
        (256, "bfloat16", {}, "head_dim is 256; .* up to 128, 128 is the nearest"),
        (64, "bfloat16", {"segment_ids": jnp.ones((1, 8), jnp.int32)}, "there are segment_ids"),
        (64, "bfloat16", {"sinks": jnp.ones(1)}, "there are sinks"),
        (64, "bfloat16", {"logit_cap": 2.0}, r"logit_cap is 2\.0"),
    ],
)
def test_what_cudnn_cannot_take_is_refused(dim, dtype, options, message):
    x = jnp.ones((1, 8, 1, dim), dtype)
    with pytest.raises(ValueError, match=message + '.*; or set backend="xla"'):
        flash_attention(x, x, x, **options, backend="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 20])
def test_values_and_gradients_are_those_of_the_xla_form(window):
    case = Case(128, 4, 2, 64, window=window, dtype="bfloat16")
    got = pulled(*operands(case), **case.options(), backend="cudnn")
    want = pulled(*operands(case), **case.options(), backend="xla")
    assert_close(got, want, 2**-5)
