import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm as megablox_gmm
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm as megablox_tgmm

from moelib.kernels.gmm import tpu
from moelib.kernels.gmm.tpu_tiles import Tiles
from tests.kernels.comparing import assert_close
from tests.kernels.gmm.cases import by_group, operands

# Rows, k and n, in several tiles and off them; tiles; sizes of groups among the rows.
_EVEN = (128, 256, 256), Tiles(32, 128, 128, 16)
_OFF = (100, 200, 72), Tiles(64, 128, 72, 64)
_CASES = {
    "straddled": (*_EVEN, [37, 0, 60]),
    "over": (*_EVEN, [9, 160, 4]),
    "none": (*_EVEN, [0, 0, 0]),
    "off": (*_OFF, [5, 40, 55]),
}


def _forward(lhs, rhs, bias, sizes, **kernel):
    kw = {"activation": None, "save": False, **kernel}
    return tpu.forward(lhs, rhs[:, None], sizes, bias[:, None], **kw)[0]


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def _by_kernels(arrays, sizes, **kernel):
    """Returns value, and gradients in lhs, rhs and bias."""
    lhs, rhs, bias, grad = arrays
    out = _forward(lhs, rhs, bias, sizes, **kernel)
    lhs_grad = tpu.input_gradient((grad,), rhs[:, None], sizes, **kernel)
    weights = tpu.weight_gradient(lhs, (grad,), sizes, with_sums=True, **kernel)
    return out, (lhs_grad, *(x[:, 0] for x in weights))


@pytest.mark.parametrize("case", _CASES)
def test_values_and_gradients_with_tiles_of_every_kind(case):
    (m, k, n), tiles, sizes = _CASES[case]
    *arrays, group_sizes = operands(sizes, m, k, n)
    got = _by_kernels(arrays, group_sizes, tiles=tiles, interpret=True)
    assert_close(got, by_group(arrays, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["straddled", "off"])
def test_nothing_is_read_before_it_is_written(case):
    """This interpreter fills uninitialized memory with NaN, and finds reads out of bounds."""
    (m, k, n), tiles, sizes = _CASES[case]
    *arrays, group_sizes = operands(sizes, m, k, n)
    got = _by_kernels(arrays, group_sizes, tiles=tiles, interpret=pltpu.InterpretParams())
    assert_close(got, by_group(arrays, sizes))


def test_nan_stays_in_its_row_and_its_groups_gradient():
    (m, k, n), tiles, sizes = _CASES["straddled"]
    lhs, rhs, bias, grad, group_sizes = operands(sizes, m, k, n)
    stale, grads = np.array(lhs), np.array(grad)
    stale[[40, *range(97, m)]] = np.nan  # Of the last group, and of none.
    grads[41] = np.nan
    out, (lhs_grad, rhs_grad, _) = _by_kernels(
        (stale, rhs, bias, grads), group_sizes, tiles=tiles, interpret=True
    )
    assert np.flatnonzero(np.isnan(out).any(axis=1)).tolist() == [40]
    assert np.flatnonzero(np.isnan(lhs_grad).any(axis=1)).tolist() == [41]
    np.testing.assert_array_equal(out[97:], 0)
    assert np.isfinite(rhs_grad[:2]).all()
    np.testing.assert_array_equal(rhs_grad[1], 0)  # Empty.


def test_bfloat16_is_summed_in_float32_over_tiles():
    *arrays, sizes = operands([30, 34], 64, 512, 128, jnp.bfloat16)
    got = _by_kernels(arrays, sizes, tiles=Tiles(32, 128, 128, 16), interpret=True)
    assert_close(got, by_group(arrays, [30, 34]), 2**-8)


@pytest.mark.slow
def test_values_equal_megablox():
    lhs, rhs, bias, grad, sizes = operands([37, 0, 91], 128, 128, 128)
    kernel = {"tiles": Tiles(32, 128, 128, 16), "interpret": True}
    got = _forward(lhs, rhs, 0 * bias, sizes, **kernel)
    made, _ = tpu.weight_gradient(lhs, (grad,), sizes, with_sums=False, **kernel)
    theirs = {"tiling": (32, 128, 128), "interpret": True}
    with jax.numpy_dtype_promotion("standard"):
        assert_close(got, megablox_gmm(lhs, rhs, sizes, jnp.float32, **theirs))
        assert_close(made[:, 0], megablox_tgmm(lhs.T, grad, sizes, jnp.float32, **theirs))
