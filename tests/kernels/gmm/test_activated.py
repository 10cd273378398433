import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.gmm import clamped_swiglu, gmm_activated, swiglu

BACKENDS = ["cpu", "xla", "tpu", "reference"]


def _operands(sizes, num_rows, k=12, p=2, n=20, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    g = len(sizes)
    shapes = (num_rows, k), (g, p, k, n), (g, p, n), (num_rows, n)
    made = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return *made, jnp.asarray(sizes, jnp.int32)


def _plain(lhs, rhs, bias, sizes, activation, offset=0):
    """One matmul for each row, and its own group's."""
    group = np.repeat(np.arange(len(sizes)), np.asarray(sizes))[: len(lhs)] - offset
    held = jnp.asarray((group >= 0) & (group < len(rhs)))[:, None]
    group = np.clip(group, 0, len(rhs) - 1)
    rows = jnp.asarray(lhs[: len(group)], jnp.float32)
    parts = jnp.einsum("mk,mpkn->pmn", rows, rhs[group].astype(jnp.float32))
    if bias is not None:
        parts += jnp.moveaxis(bias[group], 1, 0)
    made = jnp.where(held, activation(*parts), 0)
    return jnp.pad(made, ((0, len(lhs) - len(group)), (0, 0)))


def _assert_close(value, expected, tolerance=1e-5):
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(value / scale, expected / scale, atol=tolerance, rtol=0)


def _pull(function, grad, *primals):
    value, pull = jax.vjp(function, *primals)
    return value, pull(grad.astype(value.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("sizes", "num_rows", "shape", "activation"),
    [
        ([37, 0, 60], 128, {}, swiglu),
        ([70, 58], 128, {"n": 128}, clamped_swiglu),
        pytest.param([5, 1, 3], 13, {"p": 1}, jax.nn.gelu, marks=pytest.mark.slow),
    ],
    ids=["swiglu", "clamped", "one"],
)
def test_values_and_gradients_equal_one_matmul_a_row(backend, sizes, num_rows, shape, activation):
    lhs, rhs, bias, grad, group_sizes = _operands(sizes, num_rows, **shape)
    run = functools.partial(
        gmm_activated, group_sizes=group_sizes, activation=activation, backend=backend
    )
    value, grads = jax.jit(
        functools.partial(_pull, lambda lhs, rhs, bias: run(lhs, rhs, bias=bias))
    )(grad, lhs, rhs, bias)
    expected, expected_grads = _pull(
        lambda x, w, b: _plain(x, w, b, sizes, activation), grad, lhs, rhs, bias
    )
    _assert_close(value, expected)
    _assert_close(run(lhs, rhs, bias=bias), expected)  # Not differentiated: nothing is saved.
    for got, want in zip(grads, expected_grads, strict=True):
        _assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_less_than_no_rows_has_none(backend):
    lhs, rhs, bias, _, sizes = _operands([-3, 40, -1, 5], 64)
    value = gmm_activated(lhs, rhs, sizes, activation=swiglu, bias=bias, backend=backend)
    _assert_close(value, _plain(lhs, rhs, bias, [0, 40, 0, 5], swiglu))


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_held_in_part_and_no_bias(backend):
    sizes = [20, 30, 0, 25, 10]
    lhs, rhs, _, grad, group_sizes = _operands(sizes, 90)
    held = rhs[1:4]

    def run(lhs, rhs):
        return gmm_activated(
            lhs, rhs, group_sizes, activation=swiglu, group_offset=1, backend=backend
        )

    value, grads = jax.jit(functools.partial(_pull, run))(grad, lhs, held)
    expected, expected_grads = _pull(
        lambda lhs, rhs: _plain(lhs, rhs, None, sizes, swiglu, 1), grad, lhs, held
    )
    for got, want in zip([value, *grads], [expected, *expected_grads], strict=True):
        _assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_group_are_zeros_whatever_the_activation(backend):
    lhs, rhs, _, _, sizes = _operands([5, 3], 13)
    stale = lhs.at[8:].set(jnp.nan)
    out = gmm_activated(stale, rhs, sizes, activation=lambda x, y: x + y + 1, backend=backend)
    np.testing.assert_array_equal(out[8:], 0)
    assert np.isfinite(out).all()


def test_on_a_tpu_products_leave_the_kernel_only_to_be_differentiated():
    lhs, rhs, _, _, sizes = _operands([70, 58], 128, n=128)
    run = functools.partial(gmm_activated, activation=swiglu, backend="tpu")

    def shapes(function):
        traced = jax.jit(function).trace(lhs, rhs, sizes)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
        return [line.split("->")[-1].count("128x128xf32") for line in calls]

    assert shapes(run) == [1]
    assert shapes(jax.grad(lambda *x: run(*x).sum())) == [3, 0]
    remat = jax.checkpoint(lambda *x: run(*x).sum())
    assert shapes(jax.value_and_grad(remat)) == [1, 3, 0]


def test_bfloat16_is_activated_in_float32_on_a_tpu():
    lhs, rhs, bias, _, sizes = _operands([37, 60], 128, dtype=jnp.bfloat16)
    out = gmm_activated(lhs, rhs, sizes, activation=clamped_swiglu, bias=bias, backend="tpu")
    lhs, rhs, bias = (x.astype(jnp.float32) for x in (lhs, rhs, bias))
    assert out.dtype == jnp.bfloat16
    _assert_close(out, _plain(lhs, rhs, bias, [37, 60], clamped_swiglu), 2**-8)


def test_it_works_under_remat_in_a_scan_of_shard_maps():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, rhs, _, grad, _ = _operands([1, 1], 16, k=20)
    sizes, layers = jnp.asarray([[5, 3], [2, 6]], jnp.int32), jnp.stack([rhs, rhs[::-1]]) / 5
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, rhs, sizes):
        return gmm_activated(x, rhs, sizes[0], activation=swiglu)

    run = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, split), out_specs=split)

    @jax.jit
    def remat(lhs, layers):
        step = jax.checkpoint(lambda x, rhs: (jnp.tanh(run(x, rhs, sizes)), None))
        return jax.value_and_grad(
            lambda *x: jnp.sum(jax.lax.scan(step, *x)[0] * grad), argnums=(0, 1)
        )(lhs, layers)

    def plain(lhs, layers):
        for rhs in layers:
            parts = [_plain(lhs[i * 8 : i * 8 + 8], rhs, None, sizes[i], swiglu) for i in range(2)]
            lhs = jnp.tanh(jnp.concatenate(parts))
        return jnp.sum(lhs * grad)

    want = jax.value_and_grad(plain, argnums=(0, 1))(lhs, layers)
    got = remat(lhs, layers)
    for value, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        _assert_close(value, expected)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_it_works_in_shard_map(backend):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, rhs, bias, grad, _ = _operands([1, 1], 26)
    sizes = jnp.asarray([[5, 3], [2, 11]], jnp.int32)
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(lhs, rhs, bias, sizes, grad):
        run = functools.partial(gmm_activated, activation=swiglu, backend=backend)
        return jax.lax.psum(jnp.sum(run(lhs, rhs, sizes[0], bias=bias) * grad), "data")

    specs = (split, whole, whole, split, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    got = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(lhs, rhs, bias, sizes, grad)

    def plain(lhs, rhs, bias):
        parts = [_plain(lhs[i * 13 : i * 13 + 13], rhs, bias, sizes[i], swiglu) for i in range(2)]
        return jnp.sum(jnp.concatenate(parts) * grad)

    want = jax.value_and_grad(plain, argnums=(0, 1, 2))(lhs, rhs, bias)
    for value, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        _assert_close(value, expected)


def test_the_clamped_swiglu_is_that_of_gpt_oss():
    gate, up = np.meshgrid(np.linspace(-12, 12, 25), np.linspace(-12, 12, 25))
    low, mid = np.minimum(gate, 7), np.clip(up, -7, 7)
    expected = (mid + 1) * low / (1 + np.exp(-1.702 * low))
    _assert_close(clamped_swiglu(jnp.asarray(gate[0]), jnp.asarray(up[0])), expected[0], 1e-6)
    made = clamped_swiglu(jnp.asarray(gate.ravel()), jnp.asarray(up.ravel()))
    _assert_close(made, expected.ravel(), 1e-6)


@pytest.fixture
def _no_shape_checks(monkeypatch):
    """What a user runs: no jaxtyping, so our own errors are seen."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("_no_shape_checks")
def test_bad_input_is_refused():
    lhs, rhs, bias, _, sizes = _operands([5, 3], 8)
    run = functools.partial(gmm_activated, activation=swiglu)
    with pytest.raises(ValueError, match=r"rhs \(2, 12, 20\) is not \[g, p, k, n\]"):
        run(lhs, rhs[:, 0], sizes)
    with pytest.raises(ValueError, match=r"bias \(2, 20\) is not \[g, p, n\], \(2, 2, 20\)"):
        run(lhs, rhs, sizes, bias=bias[:, 0])
    with pytest.raises(ValueError, match="holds 1 groups, so it has no matrix for each of 2"):
        run(lhs, rhs[:1], sizes)
    with pytest.raises(ValueError, match="no kernel for float16; cast to one of bfloat16, float32"):
        run(lhs.astype(jnp.float16), rhs.astype(jnp.float16), sizes, backend="tpu")
