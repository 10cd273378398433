import functools
import inspect

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moelib.kernels.gmm import gmm, gmm_activated, gmm_input_gradient, gmm_weight_gradient
from moelib.kernels.gmm.reference import forward, input_gradient, weight_gradient
from tests.kernels.comparing import assert_close, compiled_for, pulled
from tests.kernels.gmm.cases import by_group, operands

BACKENDS = ["xla", "tpu", "reference"]

# Rows, and sizes of groups among them. The mean group decides the blocks: 32, 32, 256 and 64, 8.
CASES = [
    *((128, sizes) for sizes in ([64, 64], [1, 127], [0, 128], [128, 0], [0, 0], [37, 60])),
    *((320, sizes) for sizes in ([300, 1, 0, 19, 0], [0, 0, 0, 0, 320], [63, 65, 64, 1, 127])),
    *((600, sizes) for sizes in ([600, 0], [1, 599], [321, 255])),
    *((13, sizes) for sizes in ([2, 1, 3, 0, 1], [0, 13, 0, 0, 0])),
]
WITH_BACKENDS = [
    *(("xla", *case) for case in CASES),
    *(("tpu", *case) for case in [*CASES[:7], CASES[-2]]),
    *(("reference", *case) for case in CASES[4:6]),
]


@functools.partial(jax.jit, static_argnames="backend")
def _compiled(lhs, rhs, bias, grad, sizes, backend):
    """Compiled once for all groups of one shape."""
    run = lambda lhs, rhs, bias: gmm(lhs, rhs, sizes, bias=bias, backend=backend)
    return pulled(run, grad, lhs, rhs, bias)


@pytest.mark.parametrize(("backend", "num_rows", "sizes"), WITH_BACKENDS, ids=str)
def test_values_and_gradients_equal_one_matmul_per_group(backend, num_rows, sizes):
    *arrays, group_sizes = operands(sizes, num_rows)
    assert_close(_compiled(*arrays, group_sizes, backend), by_group(arrays, sizes))


@pytest.mark.parametrize("seed", range(12))
def test_random_groups_equal_one_matmul_per_group(seed):
    rng = np.random.default_rng(seed)
    m, g, k, n = [(320, 5, 12, 20), (600, 2, 12, 20), (13, 5, 12, 20), (200, 9, 33, 7)][seed % 4]
    sizes = rng.multinomial(rng.integers(m // 2, m + 1), rng.dirichlet(np.full(g, 0.4))).tolist()
    *arrays, group_sizes = operands(sizes, m, k, n)
    assert_close(_compiled(*arrays, group_sizes, None), by_group(arrays, sizes))


def test_the_separate_parts_are_the_gradients():
    sizes = [5, 0, 70, 30]
    lhs, rhs, bias, grad, group_sizes = operands(sizes, 128)
    _, (lhs_grad, rhs_grad, _) = by_group((lhs, rhs, bias, grad), sizes)
    assert_close(jax.jit(gmm_input_gradient)(grad, rhs, group_sizes), lhs_grad)
    assert_close(jax.jit(gmm_weight_gradient)(lhs, grad, group_sizes), rhs_grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_group_may_hold_anything(backend):
    lhs, rhs, bias, grad, sizes = operands([37, 60], 128)
    stale, stale_grad = lhs.at[97:].set(jnp.nan), grad.at[97:].set(jnp.nan)
    got = _compiled(stale, rhs, bias, stale_grad, sizes, backend)
    assert_close(got, by_group((lhs, rhs, bias, grad), [37, 60]))
    np.testing.assert_array_equal(got[0][97:], 0)
    np.testing.assert_array_equal(got[1][0][97:], 0)


def test_nan_in_a_row_stays_in_that_row_and_its_groups_gradient():
    lhs, rhs, bias, grad, sizes = operands([37, 60], 128)
    value, grads = _compiled(lhs.at[40].set(jnp.nan), rhs, bias, grad, sizes, None)
    assert np.flatnonzero(np.isnan(value).any(axis=1)).tolist() == [40]
    assert np.isfinite(grads[0]).all()
    assert np.isfinite(grads[1][0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_summed_in_float32(backend):
    *arrays, sizes = operands([1, 127], 128, k=1024, dtype=jnp.bfloat16)
    value, grads = _compiled(*arrays, sizes, backend)
    assert {x.dtype for x in (value, *grads)} == {jnp.dtype(jnp.bfloat16)}
    assert_close((value, grads), by_group(arrays, [1, 127]), 2**-8)


def test_the_reference_can_be_differentiated_twice():
    lhs, rhs, _, _, sizes = operands([5, 3], 8)
    square = lambda rhs: jnp.sum(gmm(lhs, rhs, sizes, backend="reference") ** 2)
    twice = jax.grad(lambda rhs: jnp.vdot(jax.grad(square)(rhs), jnp.ones_like(rhs)))
    twice = jax.jit(twice)(rhs)
    lhs = np.asarray(lhs)
    own = np.stack([lhs[:5].T @ lhs[:5], lhs[5:].T @ lhs[5:]])  # Half of the Hessian.
    assert_close(twice, 2 * np.einsum("gkj,gjn->gkn", own, np.ones_like(rhs)))


@pytest.mark.parametrize(("dtype", "has_kernel"), [("float32", True), ("float16", False)])
def test_a_program_lowered_for_a_tpu_elsewhere_gets_its_kernel(dtype, has_kernel):
    lhs, rhs, _, _, sizes = operands([5, 3], 8, dtype=dtype)
    traced = jax.jit(gmm).trace(lhs, rhs, sizes)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in lowered) == has_kernel
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


HALF = {"lhs": array(8, 12, dtype="float16"), "rhs": array(2, 12, 20, dtype="float16")}
WIDE = {  # A side of 72 elements.
    "lhs": array(16, 64, dtype="bfloat16"),
    "rhs": array(2, 64, 72, dtype="bfloat16"),
    "grad": array(16, 72, dtype="bfloat16"),
    "backend": "gpu",
}


def refused(function, change):
    """Calls a function with operands of which some are changed."""
    arrays = {"lhs": array(8, 12), "rhs": array(2, 12, 20), "grad": array(8, 20)}
    arrays |= {"group_sizes": array(2, dtype="int32")} | change
    names = inspect.signature(function).parameters
    arrays = {name: x for name, x in arrays.items() if name in names}
    backend = arrays.pop("backend", None)
    jax.eval_shape(lambda x: function(**x, backend=backend), arrays)


activated = functools.partial(gmm_activated, activation=jnp.multiply)


@pytest.mark.parametrize(
    ("function", "change", "named"),
    [
        (gmm, {"rhs": array(1, 12, 20)}, r"\[1, 1, 12, 20\].*\[m, k\], \[g.*n\]"),
        (gmm, {"lhs": array(8, 7)}, r"lhs \[8, 7\]"),
        (gmm, {"lhs": array(1, 8, 12)}, r"lhs \[1, 8, 12\]"),
        (gmm, {"lhs": array(0, 12)}, r"\[0, 12\].*above 0"),
        (gmm, {"bias": array(2, 5)}, r"bias \[2, 1, 5\]"),
        (gmm, {"group_sizes": array(1, dtype="int32")}, r"group_sizes \[1\]"),
        (gmm, {"group_sizes": array(2)}, "group_sizes are float32"),
        (gmm, {"lhs": array(8, 12, dtype="bfloat16")}, r"bfloat16.*float32"),
        (gmm_input_gradient, {"grad": array(8, 20, dtype="bfloat16")}, r"bfloat16.*float32"),
        (gmm_weight_gradient, {"grad": array(7, 20)}, r"grad \[7, 20\]"),
        (activated, {}, r"rhs \[2, 12, 20\]"),
        (activated, {"rhs": array(2, 2, 12, 20), "bias": array(2, 20)}, r"bias \[2, 20\]"),
        (gmm, HALF | {"backend": "tpu"}, r"'tpu'.*bfloat16.*float32.*float16"),
        (gmm, WIDE, "72 elements"),
        (gmm_weight_gradient, WIDE, "72 elements"),
        (gmm, {"backend": "gpu"}, r"'gpu'.*bfloat16.*float16.*float32"),
    ],
)
def test_operands_that_disagree_or_have_no_kernel_are_refused(function, change, named, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # As for users.
    with pytest.raises(ValueError, match=named):
        refused(function, change)


def test_a_dtype_without_a_kernel_is_refused_on_tpus():
    with compiled_for("TPU v6 lite"):
        with pytest.raises(ValueError, match=r"not float16; .*MOELIB_KERNEL_BACKEND=gmm=xla"):
            refused(gmm, HALF)
        refused(gmm, HALF | {"backend": "xla"})


SIZES = jnp.asarray([2, 0, 1], jnp.int32)
LHS = jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
GRADS = (jnp.asarray([[1.0], [10.0], [100.0], [1000.0]]),)
RHS = jnp.asarray([1.0, 10.0, 100.0]).reshape(3, 1, 1, 1)


def test_each_row_meets_the_matrices_of_its_own_group():
    out, products = forward(LHS, RHS, SIZES, None, activation=lambda x: x + 1, save=True)
    np.testing.assert_array_equal(out[:, 0], [2, 3, 301, 0])
    np.testing.assert_array_equal(products[0][:, 0], [1, 2, 300, 0])
    np.testing.assert_array_equal(input_gradient(GRADS, RHS, SIZES)[:, 0], [1, 10, 10_000, 0])


def test_weight_gradients_sum_over_the_rows_of_each_group():
    weights, sums = weight_gradient(LHS, GRADS, SIZES, with_sums=True)
    np.testing.assert_array_equal(weights.ravel(), [21, 0, 300])
    np.testing.assert_array_equal(sums.ravel(), [11, 0, 100])
