"""Quantized operands against NumPy in float64, bit for bit; matmuls against products of these."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moelib.core.jaxpr import walk
from moelib.kernels.backend import kernel_backends
from moelib.kernels.quantized_matmul import Quantization, quantize, quantized_gmm, quantized_matmul
from moelib.kernels.quantized_matmul.quantize import TILES, _rounded
from tests.kernels.comparing import assert_close, pulled

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


quantized = jax.jit(quantize, static_argnums=(1, 2))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_quantized_operands_equal_the_emulation_bit_for_bit(scheme, block):
    x = matrix(130, 259)
    found = quantized(x, block, scheme)
    assert found.values.dtype == scheme.format.dtype
    assert found.scales.dtype == scheme.format.scale_dtype
    want = emulated(x, block, scheme)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(np.float64(found.dequantized(dtype)), want)


def test_arrays_smaller_than_a_block_are_quantized():
    x, block = matrix(1, 5), (128, 128)
    found = quantized(x, block, FP8).dequantized(jnp.float32)
    np.testing.assert_array_equal(np.float64(found), emulated(x, block, FP8))
    assert quantized(x[:0], block, FP8).values.shape == (0, 5)


def test_numbers_are_those_of_8_bits_before_the_cast_which_xla_may_drop():
    x = np.random.default_rng(0).standard_normal((5, 1000))
    x = np.float32(x * [[100], [1], [1e-2], [1e-3], [1e-5]]).clip(-448, 448)
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(_rounded(jnp.asarray(x), jnp.float8_e4m3fn), want)


def test_a_gradient_of_a_mean_over_a_million_tokens_does_not_vanish():
    gradient = 1e-9 * matrix(64, 128, seed=1)[32:, 64:]
    found = np.float32(quantized(gradient, (1, 128), FP8).dequantized(jnp.float32))
    assert np.linalg.norm(found - gradient) < 0.04 * np.linalg.norm(gradient)


@pytest.mark.parametrize("scheme", [FP8, INT8])
def test_a_scale_is_the_smallest_power_of_two_that_fits(scheme):
    limits = [448.0, 447.99997, 448.00003, 3.0e38, 1e-45, 127.0, 127.00001]
    x = np.float32(limits)[:, None].repeat(4, 1)
    for limit, scale in zip(x[:, 0], quantized(x, (1, 128), scheme).scales[:, 0], strict=True):
        wanted = 2.0**-100
        while np.float64(limit) > LIMITS.get(scheme, 127.0) * wanted:
            wanted *= 2
        assert float(scale) == wanted


@pytest.mark.parametrize(
    ("scheme", "block"),
    [*((scheme, (128, 128)) for scheme in SCHEMES), (FP8, (1, 128)), (INT8, (128, 1))],
)
def test_a_bad_number_makes_its_block_nan(scheme, block):
    x, is_bad = np.ones((130, 600), np.float32), np.zeros((130, 600), bool)
    for bad, *index in ((np.nan, 1, 130), (np.inf, 5, 300), (-np.inf, 129, 10)):
        x[*index] = bad
        is_bad[*(slice(i // n * n, i // n * n + n) for i, n in zip(index, block, strict=True))] = 1
    found = np.float32(quantized(x, block, scheme).dequantized(jnp.float32))
    np.testing.assert_array_equal(np.isnan(found), is_bad | (scheme is Quantization.FP8_TENSOR))


E5M2_LIMIT = 57344.0


def e5m2(x: np.ndarray) -> np.ndarray:
    """Returns a gradient as it is quantized with one scale, by the casts of ml_dtypes."""
    exponent = int(np.ceil(np.log2(np.float64(np.abs(x).max()) / E5M2_LIMIT)))
    return (x / 2.0**exponent).astype(ml_dtypes.float8_e5m2).astype(np.float64) * 2.0**exponent


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e20])
def test_gradients_with_one_scale_per_array_are_e5m2(scale):
    rng = np.random.default_rng(0)
    x = scale * rng.standard_normal((70, 90)) * 2.0 ** rng.integers(-30, 4, (70, 90))
    x = x.astype(np.float32)
    of_gradients = jax.jit(functools.partial(quantize, is_gradient=True), static_argnums=(1, 2))
    found = of_gradients(x, (1, 128), Quantization.FP8_TENSOR)
    assert found.values.dtype == jnp.float8_e5m2
    exact = np.asarray(found.dequantized(jnp.float32))
    np.testing.assert_array_equal(exact, e5m2(x).astype(np.float32))
    # Smaller than the smallest E4M3 of the same scale, of which the largest is 448.
    smallest = np.abs(exact[exact != 0]).min()
    assert smallest < np.abs(x).max() * 2.0**-9 / 448


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.format.in_blocks])
def test_gradients_in_blocks_have_the_dtype_of_activations(scheme):
    found = quantize(jnp.ones((2, 3)), (1, 128), scheme, is_gradient=True)
    assert found.values.dtype == scheme.format.dtype


# -- Matmuls ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(3,))
def dense(x, weight, grad, backend):
    run = lambda x, at: quantized_matmul(x, weight, at, backend=backend)
    return pulled(run, grad, x, jnp.zeros(weight.values.shape))


@pytest.mark.parametrize(
    ("backend", "scheme", "groups"),
    [
        ("xla", FP8, False),
        ("xla", FP8, True),
        ("xla", INT8, True),
        ("xla", Quantization.FP8_TENSOR, True),
        ("reference", FP8, True),
        ("float8", Quantization.FP8_TENSOR, False),
        ("float8", Quantization.FP8_TENSOR, True),
    ],
)
def test_matmuls_are_the_products_of_the_operands_of_the_table(backend, scheme, groups):
    b, t, k, n = 2, 130, 200, 70
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((b, t, size)).astype(np.float32) for size in (k, n))
    w = rng.standard_normal((b, k, n)[0 if groups else 1 :]).astype(np.float32)
    whole = lambda x: emulated(x.reshape(-1, x.shape[-1]), (1, 1), scheme).reshape(x.shape)

    def each(x, block, whole=whole):
        if scheme is Quantization.FP8_TENSOR:
            return whole(x)
        return np.stack([emulated(part, block, scheme) for part in x])

    of_grad = functools.partial(each, grad, whole=e5m2)

    weight = quantized(w, (128, 128), scheme)
    own = each(w if groups else w[None], (128, 128))
    block = (128, 1) if groups else (128, 128)
    products = each(x, block).swapaxes(1, 2) @ of_grad((128, 1))
    want = (
        each(x, (1, 128)) @ own,
        of_grad((1, 128)) @ own.swapaxes(1, 2),
        products if groups else products.sum(0),
    )
    # Float32 sums of exact products differ by rounding only.
    assert_close(dense(x, weight, grad, backend), want, 1e-6)


@pytest.mark.parametrize("groups", [False, True])
def test_straight_through_gradients_are_those_of_exact_products(groups):
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((2, 13, size)).astype(np.float32) for size in (20, 7))
    w = rng.standard_normal((2, 20, 7)[0 if groups else 1 :]).astype(np.float32)
    own = np.stack([emulated(part, (128, 128), FP8) for part in (w if groups else w[None])])
    rows = np.stack([emulated(part, (1, 128), FP8) for part in x])
    products = rows.swapaxes(1, 2) @ grad
    want = rows @ own, grad @ own.swapaxes(1, 2), products if groups else products.sum(0)
    weight = quantized(w, (128, 128), FP8)
    assert_close(dense(x, weight, grad, "straight_through"), want, 1e-6)


def test_straight_through_gradients_of_experts_are_those_of_exact_products():
    sizes, rng = np.array([5, 0, 6], np.int32), np.random.default_rng(0)
    rows, grad = (rng.standard_normal((13, size)).astype(np.float32) for size in (20, 7))
    w = rng.standard_normal((3, 20, 7)).astype(np.float32)
    with kernel_backends({"quantized_matmul": "straight_through"}):
        y, found = grouped(rows, quantized(w, (128, 128), FP8), grad, sizes, None)
    own, of = [emulated(part, (128, 128), FP8) for part in w], np.repeat(range(3), sizes)
    rows, grad = emulated(rows, (1, 128), FP8)[:11], grad[:11]
    assert_close(y[:11], np.stack([rows[i] @ own[g] for i, g in enumerate(of)]), 1e-6)
    of_rows = np.stack([grad[i] @ own[g].T for i, g in enumerate(of)])
    of_weights = np.stack([rows[of == g].T @ grad[of == g] for g in range(3)])
    assert_close((found[0][:11], found[1]), (of_rows, of_weights), 1e-6)


def test_dots_of_8_bits_refuse_scales_of_blocks():
    weight = quantized(np.ones((8, 8), np.float32), (128, 128), FP8)
    x = np.ones((1, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"'float8'.*FP8_BLOCK"):
        dense(x, weight, x, "float8")
    with pytest.raises(ValueError, match=r"'cudnn'; it has float8"):
        dense(x, weight, x, "cudnn")


@functools.partial(jax.jit, static_argnums=4)
def grouped(rows, weight, grad, sizes, backend):
    run = lambda rows, at: quantized_gmm(rows, weight, at, sizes, backend=backend)
    return pulled(run, grad, rows, jnp.zeros(weight.values.shape))


@pytest.mark.parametrize("backend", ["xla", "tpu", "reference"])
def test_grouped_matmuls_are_the_products_of_the_operands_of_the_table(backend):
    sizes, rng = np.array([100, 0, 130, 20], np.int32), np.random.default_rng(0)
    m, k, n = 260, 200, 70  # Ten rows are of no group.
    rows, grad = (rng.standard_normal((m, size)).astype(np.float32) for size in (k, n))
    w = rng.standard_normal((4, k, n)).astype(np.float32)
    rows[250:], grad[250:] = np.nan, np.nan
    weight = quantized(w, (128, 128), FP8)
    y, (rows_grad, w_grad) = grouped(rows, weight, grad, sizes, backend)
    rows[250:], grad[250:] = 0, 0
    own = [emulated(part, (128, 128), FP8) for part in w]
    of = np.repeat(range(4), sizes)
    forward, backward = (emulated(part, (1, 128), FP8) for part in (rows, grad))
    want = np.stack([forward[i] @ own[g] for i, g in enumerate(of)])
    assert_close(y[:250], want, 1e-6)
    want = np.stack([backward[i] @ own[g].T for i, g in enumerate(of)])
    assert_close(rows_grad[:250], want, 1e-6)
    assert not np.asarray(y[250:]).any()
    along = [emulated(part, (128, 1), FP8)[:250] for part in (rows, grad)]
    assert_close(
        w_grad, np.stack([along[0][of == g].T @ along[1][of == g] for g in range(4)]), 1e-6
    )


def test_rows_of_no_group_change_nothing_with_one_scale_per_array():
    rng, sizes = np.random.default_rng(0), np.array([3, 4], np.int32)
    weight = quantized(np.ones((2, 8, 8), np.float32), (128, 128), Quantization.FP8_TENSOR)
    rows, grad = (rng.standard_normal((9, 8)).astype(np.float32) for _ in range(2))

    def run(last):
        rows[7:], grad[7:] = last, last
        y, (rows_grad, w_grad) = jax.device_get(grouped(rows, weight, grad, sizes, None))
        return y[:7], rows_grad[:7], w_grad

    for last in (np.nan, 1e6):
        for got, want in zip(run(last), run(0.0), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", [Quantization.FP8_BLOCK, Quantization.FP8_TENSOR])
def test_a_weights_gradient_is_rounded_after_its_sum(scheme):
    draw = lambda i, shape: jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
    x, weight, grad = draw(0, (1, 256, 128)), draw(1, (128, 256)), draw(2, (1, 256, 256))
    quantized = quantize(weight, TILES, scheme)

    def gradient(wide, grad):
        product = lambda w: quantized_matmul(x, quantized, w, sums_in_float32=wide, backend="xla")
        return jax.vjp(product, weight)[1](grad)[0]

    np.testing.assert_array_equal(gradient(True, grad), gradient(False, grad))  # On one device.
    sums = [
        (site.eqn.invars[0].aval.dtype, site.eqn.outvars[0].aval.dtype)
        for site in walk(jax.make_jaxpr(functools.partial(gradient, True))(grad))
        if site.eqn.primitive.name == "dot_general" and site.eqn.outvars[0].aval.shape == (128, 256)
    ]
    assert sums == [(jnp.bfloat16, jnp.float32)]
