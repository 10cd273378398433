import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm as megablox_gmm
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm as megablox_tgmm

from moelib.kernels.gmm import reference, tpu
from moelib.kernels.gmm.tiles import Tiles

# Rows, k and n; the sizes of groups among the rows; tiles. Off the tile in every dimension.
_CASES = {
    "straddled": ((128, 128, 256), [37, 0, 60], Tiles(32, 128, 128, 16)),
    "off": ((100, 200, 72), [5, 40, 55], Tiles(64, 128, 72, 16)),
    "over": ((40, 256, 128), [9, 60, 4], Tiles(16, 128, 128, 16)),
    "none": ((64, 128, 128), [0, 0, 0], Tiles(32, 128, 128, 32)),
}


def _operands(shape, sizes, dtype=jnp.float32):
    (m, k, n), g = shape, len(sizes)
    rng = np.random.default_rng(0)
    shapes = (m, k), (g, k, n), (m, n), (g, n)
    made = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return *made, jnp.asarray(sizes, jnp.int32)


def _assert_close(value, expected, tolerance=1e-5):
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(value / scale, expected / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_rows_times_matrices_with_tiles_of_every_kind(case, transpose_rhs):
    shape, sizes, tiles = _CASES[case]
    lhs, rhs, _, bias, group_sizes = _operands(shape, sizes)
    rhs = rhs.transpose(0, 2, 1) if transpose_rhs else rhs
    options = {"transpose_rhs": transpose_rhs, "out_dtype": jnp.float32}
    got = tpu.gmm(lhs, rhs, group_sizes, bias, tiles=tiles, interpret=True, **options)
    _assert_close(got, reference.gmm(lhs, rhs, group_sizes, bias, **options))


@pytest.mark.parametrize("case", _CASES)
def test_weight_gradients_with_tiles_of_every_kind(case):
    shape, sizes, tiles = _CASES[case]
    lhs, _, grad, _, group_sizes = _operands(shape, sizes)
    options = {"out_dtype": jnp.float32, "bias_dtype": jnp.float32}
    got = tpu.gmm_weight_gradient(lhs, grad, group_sizes, tiles=tiles, interpret=True, **options)
    want = reference.gmm_weight_gradient(lhs, grad, group_sizes, **options)
    for value, expected in zip(got, want, strict=True):
        _assert_close(value, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["straddled", "off"])
def test_nothing_is_read_before_it_is_written(case):
    """This interpreter fills what was not written with NaN, and finds reads out of bounds."""
    shape, sizes, tiles = _CASES[case]
    lhs, rhs, grad, _, group_sizes = _operands(shape, sizes)
    options = {"out_dtype": jnp.float32}
    kernel = {"tiles": tiles, "interpret": pltpu.InterpretParams()}
    got = tpu.gmm(lhs, rhs, group_sizes, transpose_rhs=False, **options, **kernel)
    _assert_close(got, reference.gmm(lhs, rhs, group_sizes, transpose_rhs=False, **options))
    got = tpu.gmm_weight_gradient(lhs, grad, group_sizes, **options, **kernel)
    _assert_close(got, reference.gmm_weight_gradient(lhs, grad, group_sizes, **options))


def test_nan_stays_in_its_row_and_its_groups_gradient():
    shape, sizes, tiles = _CASES["straddled"]
    lhs, rhs, grad, _, group_sizes = _operands(shape, sizes)
    stale = lhs.at[40].set(jnp.nan).at[97:].set(jnp.nan)  # Of the last group, and of none.
    kernel = {"out_dtype": jnp.float32, "tiles": tiles, "interpret": True}
    out = tpu.gmm(stale, rhs, group_sizes, transpose_rhs=False, **kernel)
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [40]
    np.testing.assert_array_equal(out[97:], 0)
    made = tpu.gmm_weight_gradient(stale, grad.at[41].set(jnp.nan), group_sizes, **kernel)
    assert np.isfinite(made[:2]).all()
    np.testing.assert_array_equal(made[1], 0)  # Empty.


def test_bfloat16_is_summed_in_float32_over_tiles():
    lhs, rhs, grad, bias, sizes = _operands((64, 512, 128), [30, 34], jnp.bfloat16)
    kernel = {"tiles": Tiles(32, 128, 128, 16), "interpret": True}
    wide = {"out_dtype": jnp.float32, "transpose_rhs": False}
    exact = reference.gmm(lhs, rhs, sizes, bias, **wide)
    _assert_close(tpu.gmm(lhs, rhs, sizes, bias, **wide, **kernel), exact)
    made = tpu.gmm_weight_gradient(lhs, grad, sizes, out_dtype=jnp.float32, **kernel)
    _assert_close(made, reference.gmm_weight_gradient(lhs, grad, sizes, out_dtype=jnp.float32))


def test_values_equal_megablox():
    lhs, rhs, grad, _, sizes = _operands((128, 128, 128), [37, 0, 91])
    kernel = {"out_dtype": jnp.float32, "tiles": Tiles(32, 128, 128, 16), "interpret": True}
    got = tpu.gmm(lhs, rhs, sizes, transpose_rhs=False, **kernel)
    made = tpu.gmm_weight_gradient(lhs, grad, sizes, **kernel)
    theirs = {"tiling": (32, 128, 128), "interpret": True}
    with jax.numpy_dtype_promotion("standard"):
        _assert_close(got, megablox_gmm(lhs, rhs, sizes, jnp.float32, **theirs))
        _assert_close(made, megablox_tgmm(lhs.T, grad, sizes, jnp.float32, **theirs))
