"""Quantized operands against NumPy in float64, bit for bit; matmuls against products of these."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moelib.kernels.quantized_matmul import (
    Quantization,
    Quantized,
    quantize,
    quantized_gmm,
    quantized_matmul,
)
from moelib.kernels.quantized_matmul.quantize import _rounded
from tests.layers.calling import QUICK

FP8, INT8 = Quantization.FP8_BLOCK, Quantization.INT8_BLOCK
SCHEMES = [scheme for scheme in Quantization if scheme is not Quantization.NONE]
LIMITS = {FP8: 448.0, Quantization.FP8_BLOCK_E8M0: 448.0, Quantization.FP8_TENSOR: 448.0}


def emulated(x: np.ndarray, block: tuple[int, int], scheme: Quantization) -> np.ndarray:
    """Returns the numbers that the quantized blocks of a matrix stand for, in float64."""
    out, limit = np.zeros(x.shape), LIMITS.get(scheme, 127.0)
    height, width = x.shape if scheme is Quantization.FP8_TENSOR else block
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = np.float64(x[i : i + height, j : j + width])
            amax = np.abs(part).max()
            exponent = max(-100, int(np.log2(max(amax, 1e-45) / limit)) - 2)
            while amax > limit * 2.0**exponent:
                exponent += 1
            out[i : i + height, j : j + width] = rounded(part / 2.0**exponent, scheme)
            out[i : i + height, j : j + width] *= 2.0**exponent
    return out


def rounded(x: np.ndarray, scheme: Quantization) -> np.ndarray:
    """Returns multiples of the last place: of E4M3, whose smallest exponent is -6, or of int8."""
    if scheme is INT8:
        return np.round(x)
    exponents = np.maximum(np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x)))), -6)
    return np.round(x / 2.0 ** (exponents - 3)) * 2.0 ** (exponents - 3)


def matrix(m: int, n: int, seed: int = 0) -> np.ndarray:
    """Returns numbers of many magnitudes, with zero, tiny and huge blocks, in float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, n)) * 2.0 ** rng.integers(-20, 4, (m, n))
    x[: m // 2, : n // 3] *= 1e-25
    x[m // 2 :, : n // 3] *= 1e30
    x[:, n // 3 : n // 3 + 9] = 0
    x[0] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("shape", [(130, 259), (1, 5)])
def test_quantized_operands_equal_the_emulation_bit_for_bit(scheme, block, shape):
    x = matrix(*shape)
    found = quantize(jnp.asarray(x), block, scheme)
    assert found.values.dtype == scheme.format.dtype
    assert found.scales.dtype == scheme.format.scale_dtype
    np.testing.assert_array_equal(
        np.float64(found.dequantized(jnp.float32)), emulated(x, block, scheme)
    )


def test_numbers_are_those_of_8_bits_before_the_cast_which_xla_may_drop():
    x = np.random.default_rng(0).standard_normal((5, 1000))
    x = np.float32(x * [[100], [1], [1e-2], [1e-3], [1e-5]]).clip(-448, 448)
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(_rounded(jnp.asarray(x), jnp.float8_e4m3fn), want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_in_bfloat16(scheme):
    found = quantize(jnp.asarray(matrix(130, 259)), (1, 128), scheme)
    wide, narrow = (found.dequantized(dtype) for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_array_equal(np.float32(wide), np.float32(narrow))


def test_a_gradient_of_a_mean_over_a_million_tokens_does_not_vanish():
    gradient = 1e-9 * matrix(64, 128, seed=1)[32:, 64:]
    found = np.float32(quantize(jnp.asarray(gradient), (1, 128), FP8).dequantized(jnp.float32))
    assert np.linalg.norm(found - gradient) < 0.04 * np.linalg.norm(gradient)


@pytest.mark.parametrize("limit", [448.0, 447.99997, 448.00003, 3.0e38, 1e-45, 127.0, 127.00001])
def test_a_scale_is_the_smallest_power_of_two_that_fits(limit):
    x = jnp.full((1, 4), limit, jnp.float32)
    for scheme in (FP8, INT8):
        scale = float(quantize(x, (1, 128), scheme).scales[0, 0])
        wanted = 2.0**-100
        while np.float64(x[0, 0]) > LIMITS.get(scheme, 127.0) * wanted:
            wanted *= 2
        assert scale == wanted


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_a_bad_number_makes_its_block_nan(scheme, bad, block):
    x = np.ones((130, 300), np.float32)
    x[1, 130] = bad
    found = np.float32(quantize(jnp.asarray(x), block, scheme).dequantized(jnp.float32))
    is_bad = np.full(x.shape, scheme is Quantization.FP8_TENSOR)
    at = [slice(i // n * n, i // n * n + n) for i, n in zip((1, 130), block, strict=True)]
    is_bad[tuple(at)] = True
    np.testing.assert_array_equal(np.isnan(found), is_bad)


# -- Matmuls ---------------------------------------------------------------------------------------

quantized = jax.jit(quantize, static_argnums=(1, 2), compiler_options=QUICK)


@functools.partial(jax.jit, static_argnums=(3,), compiler_options=QUICK)
def dense(x, weight, grad, backend):
    run = lambda x, at: quantized_matmul(x, weight, at, backend=backend)
    y, pull = jax.vjp(run, x, jnp.zeros(weight.values.shape))
    return y, *pull(grad)


def assert_close(found, want, tolerance=1e-6):
    """Float32 sums of exact products differ by rounding only."""
    np.testing.assert_allclose(
        np.float64(found), want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30)
    )


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [
        *itertools.product(["reference", "xla"], [FP8, Quantization.FP8_TENSOR, INT8]),
        ("float8", Quantization.FP8_TENSOR),
    ],
)
@pytest.mark.parametrize("groups", [False, True])
def test_matmuls_are_the_products_of_the_operands_of_the_table(backend, scheme, groups):
    b, t, k, n = 2, 130, 200, 70
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((b, t, size)).astype(np.float32) for size in (k, n))
    w = rng.standard_normal((b, k, n)[0 if groups else 1 :]).astype(np.float32)
    whole = lambda x: emulated(x.reshape(-1, x.shape[-1]), (1, 1), scheme).reshape(x.shape)

    def each(x, block):
        if scheme is Quantization.FP8_TENSOR:
            return whole(x)
        return np.stack([emulated(part, block, scheme) for part in x])

    weight = quantize(jnp.asarray(w), (128, 128), scheme)
    own = each(w if groups else w[None], (128, 128))
    y, x_grad, w_grad = dense(jnp.asarray(x), weight, jnp.asarray(grad), backend)
    assert_close(y, each(x, (1, 128)) @ own)
    assert_close(x_grad, each(grad, (1, 128)) @ own.swapaxes(1, 2))
    block = (128, 1) if groups else (128, 128)
    products = each(x, block).swapaxes(1, 2) @ each(grad, (128, 1))
    assert_close(w_grad, products if groups else products.sum(0))


def test_dots_of_8_bits_refuse_scales_of_blocks():
    weight = quantized(np.ones((8, 8), np.float32), (128, 128), FP8)
    with pytest.raises(ValueError, match=r"'float8' has no dots .* FP8_BLOCK; set FP8_TENSOR"):
        quantized_matmul(jnp.ones((1, 2, 8)), weight, jnp.ones((8, 8)), backend="float8")


@pytest.mark.parametrize("backend", ["xla", "tpu", "reference"])
def test_grouped_matmuls_are_the_products_of_the_operands_of_the_table(backend):
    sizes, rng = np.array([100, 0, 130, 20]), np.random.default_rng(0)
    m, k, n = 260, 200, 70  # Ten rows are of no group.
    rows, grad = (rng.standard_normal((m, size)).astype(np.float32) for size in (k, n))
    w = rng.standard_normal((4, k, n)).astype(np.float32)
    rows[250:], grad[250:] = np.nan, np.nan
    weight = quantize(jnp.asarray(w), (128, 128), FP8)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(rows, grad):
        fn = lambda rows, at: quantized_gmm(rows, weight, at, jnp.asarray(sizes), backend=backend)
        y, pull = jax.vjp(fn, rows, jnp.zeros(w.shape))
        return y, *pull(grad)

    y, rows_grad, w_grad = run(jnp.asarray(rows), jnp.asarray(grad))
    rows[250:], grad[250:] = 0, 0
    own = [emulated(part, (128, 128), FP8) for part in w]
    of = np.repeat(range(4), sizes)
    forward, backward = (emulated(part, (1, 128), FP8) for part in (rows, grad))
    want = np.stack([forward[i] @ own[g] for i, g in enumerate(of)])
    assert_close(y[:250], want)
    assert_close(rows_grad[:250], np.stack([backward[i] @ own[g].T for i, g in enumerate(of)]))
    assert not np.asarray(y[250:]).any()
    along = [emulated(part, (128, 1), FP8)[:250] for part in (rows, grad)]
    assert_close(w_grad, np.stack([along[0][of == g].T @ along[1][of == g] for g in range(4)]))


def test_rows_of_no_group_change_nothing_with_one_scale_per_array():
    rng, sizes = np.random.default_rng(0), jnp.array([3, 4])
    weight = quantized(np.ones((2, 8, 8), np.float32), (128, 128), Quantization.FP8_TENSOR)
    rows, grad = (rng.standard_normal((9, 8)).astype(np.float32) for _ in range(2))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def pulled(rows, grad):
        fn = lambda rows, at: quantized_gmm(rows, weight, at, sizes)
        y, pull = jax.vjp(fn, rows, jnp.zeros((2, 8, 8)))
        rows_grad, w_grad = pull(grad)
        return y[:7], rows_grad[:7], w_grad

    def run(last):
        rows[7:], grad[7:] = last, last
        return jax.device_get(pulled(rows, grad))

    for last in (np.nan, 1e6):
        for got, want in zip(run(last), run(0.0), strict=True):
            np.testing.assert_array_equal(got, want)


def test_values_are_8_bits_wide_in_ml_dtypes_too():
    values = quantize(jnp.asarray(matrix(130, 259)), (128, 128), FP8).values
    assert np.asarray(values).dtype == ml_dtypes.float8_e4m3fn
    assert isinstance(quantize(jnp.ones((0, 5)), (1, 128), FP8), Quantized)
