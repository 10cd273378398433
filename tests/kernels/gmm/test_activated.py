import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.gmm import gmm, gmm_activated
from tests.kernels.comparing import assert_close, pulled


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def clamped(gate, up):
    return (jnp.clip(up, -1, 1) + 1) * jax.nn.sigmoid(jnp.minimum(gate, 1))


def _operands(sizes, num_rows, k=12, p=2, n=20, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    g = len(sizes)
    shapes = (num_rows, k), (g, p, k, n), (g, p, n), (num_rows, n)
    made = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return *made, jnp.asarray(sizes, jnp.int32)


def _plain(lhs, rhs, bias, sizes, activation):
    """One matmul per row, with the matrices of its group."""
    group = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    rows = jnp.asarray(lhs[: len(group)], jnp.float32)
    parts = jnp.einsum("mk,mpkn->pmn", rows, rhs[group].astype(jnp.float32))
    if bias is not None:
        parts += jnp.moveaxis(bias[group], 1, 0)
    return jnp.pad(activation(*parts), ((0, len(lhs) - len(group)), (0, 0)))


CASES: dict[str, Any] = {
    # The activation of zeros is not zero, and 31 rows are of no group.
    "clamped": ([37, 0, 60], {}, clamped),
    "swiglu": ([70, 58], {"n": 128}, swiglu),
    "one": ([5, 1, 3], {"p": 1}, jax.nn.gelu),
}


@functools.cache
def by_row(case):
    """Returns the operands of a case, and its value and gradients by one matmul per row."""
    sizes, shape, activation = CASES[case]
    *arrays, grad, group_sizes = _operands(sizes, 128, **shape)
    plain = lambda lhs, rhs, bias: _plain(lhs, rhs, bias, sizes, activation)
    return arrays, grad, group_sizes, jax.jit(functools.partial(pulled, plain))(grad, *arrays)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("xla", "clamped"),
        ("tpu", "clamped"),
        ("reference", "clamped"),
        ("tpu", "swiglu"),
        pytest.param("xla", "one", marks=pytest.mark.slow),
        pytest.param("tpu", "one", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_equal_one_matmul_per_row(backend, case):
    (lhs, rhs, bias), grad, group_sizes, want = by_row(case)
    stale = np.array(lhs)
    stale[sum(CASES[case][0]) :] = np.nan

    @jax.jit
    def run(lhs, rhs, bias):
        kw = {"bias": bias, "activation": CASES[case][2], "backend": backend}
        return gmm_activated(lhs, rhs, group_sizes, **kw)

    assert_close(jax.jit(functools.partial(pulled, run))(grad, stale, rhs, bias), want)
    assert_close(run(stale, rhs, bias), want[0])  # Not differentiated: no products are saved.


def test_on_a_tpu_products_leave_the_kernel_only_to_be_differentiated():
    lhs, rhs, _, _, sizes = _operands([70, 58], 128, n=128)
    run = functools.partial(gmm_activated, activation=swiglu)

    def shapes(function):
        traced = jax.jit(function).trace(lhs, rhs, sizes)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
        return [line.split("->")[-1].count("128x128xf32") for line in calls]

    assert shapes(run) == [1]
    assert shapes(jax.grad(lambda *x: run(*x).sum())) == [3, 0]
    remat = jax.checkpoint(lambda *x: run(*x).sum())
    assert shapes(jax.value_and_grad(remat)) == [1, 3, 0]
    named = functools.partial(run, products_name="up")
    policy = jax.checkpoint_policies.save_only_these_names("up")
    remat = jax.checkpoint(lambda *x: named(*x).sum(), policy=policy)
    assert shapes(jax.value_and_grad(remat)) == [3, 0]


def test_bfloat16_is_activated_in_float32_on_a_tpu():
    lhs, rhs, bias, _, sizes = _operands([37, 60], 128, dtype=jnp.bfloat16)
    run = functools.partial(gmm_activated, activation=clamped, backend="tpu")
    out = jax.jit(run)(lhs, rhs, sizes, bias=bias)
    lhs, rhs, bias = (np.asarray(x, np.float32) for x in (lhs, rhs, bias))
    assert out.dtype == jnp.bfloat16
    assert_close(out, _plain(lhs, rhs, bias, [37, 60], clamped), 2**-8)


def test_gated_experts_work_under_remat_in_a_scan_of_shard_maps():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, up, _, grad, _ = _operands([1, 1], 16, k=20)
    counts = [[5, 3], [2, 6]]
    sizes, up = np.asarray(counts, np.int32), np.asarray(up) / 5
    ups, downs = np.stack([up, up[::-1]]), np.stack([up[:, 0], up[:, 1]])
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, up, down, sizes):
        hidden = gmm_activated(x, up, sizes[0], activation=swiglu)
        return gmm(hidden, down, sizes[0])

    specs = (split, whole, whole, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split)

    def loss(step, *arrays):
        return jnp.sum(jax.lax.scan(step, arrays[0], arrays[1:])[0] * grad)

    def plain(x, layer):
        up, down = layer
        shards = []
        for i, own in enumerate(counts):
            hidden = _plain(x[i * 8 : i * 8 + 8], up, None, own, swiglu)
            shards.append(_plain(hidden, down[:, None], None, own, lambda y: y))
        return jnp.tanh(jnp.concatenate(shards)), None

    step = jax.checkpoint(lambda x, layer: (jnp.tanh(run(x, layer[0], layer[1], sizes)), None))
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, each), argnums=(0, 1, 2)))(
            lhs, ups, downs
        )
        for each in (step, plain)
    )
    assert_close(got, want)


def test_the_kernels_for_tpus_take_arrays_that_vary_over_mesh_axes():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, rhs, bias, _, _ = _operands([1, 1], 26)
    sizes = jnp.asarray([[5, 3], [2, 11]], jnp.int32)
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(lhs, rhs, bias, sizes):
        out = gmm_activated(lhs, rhs, sizes[0], bias=bias, activation=swiglu)
        return jax.lax.psum(jnp.sum(out), "data")

    specs = (split, whole, whole, split)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=whole)
    traced = jax.jit(jax.grad(run, argnums=(0, 1, 2))).trace(lhs, rhs, bias, sizes)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
