import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.kernels.gmm import gmm, gmm_activated
from tests.kernels.comparing import assert_close, pulled

BACKENDS = ["xla", "tpu", "reference"]


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("sizes", "num_rows", "shape", "activation"),
    [
        ([37, 0, 60], 128, {}, swiglu),
        ([70, 58], 128, {"n": 128}, clamped),
        pytest.param([5, 1, 3], 13, {"p": 1}, jax.nn.gelu, marks=pytest.mark.slow),
    ],
    ids=["swiglu", "clamped", "one"],
)
def test_values_and_gradients_equal_one_matmul_per_row(backend, sizes, num_rows, shape, activation):
    lhs, rhs, bias, grad, group_sizes = _operands(sizes, num_rows, **shape)

    @jax.jit
    def run(lhs, rhs, bias):
        kw = {"bias": bias, "activation": activation, "backend": backend}
        return gmm_activated(lhs, rhs, group_sizes, **kw)

    plain = lambda lhs, rhs, bias: _plain(lhs, rhs, bias, sizes, activation)
    want, got = (
        jax.jit(functools.partial(pulled, function))(grad, lhs, rhs, bias)
        for function in (plain, run)
    )
    assert_close(got, want)
    assert_close(run(lhs, rhs, bias), want[0])  # Not differentiated: no products are saved.


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_group_are_zeros_whatever_the_activation(backend):
    lhs, rhs, _, _, sizes = _operands([5, 3], 13)
    stale = lhs.at[8:].set(jnp.nan)
    out = gmm_activated(stale, rhs, sizes, activation=lambda x, y: x + y + 1, backend=backend)
    np.testing.assert_array_equal(out[8:], 0)
    assert np.isfinite(out).all()


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
    out = gmm_activated(lhs, rhs, sizes, activation=clamped, bias=bias, backend="tpu")
    lhs, rhs, bias = (x.astype(jnp.float32) for x in (lhs, rhs, bias))
    assert out.dtype == jnp.bfloat16
    assert_close(out, _plain(lhs, rhs, bias, [37, 60], clamped), 2**-8)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_gated_experts_work_under_remat_in_a_scan_of_shard_maps(backend):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    lhs, up, _, grad, _ = _operands([1, 1], 16, k=20)
    counts = [[5, 3], [2, 6]]
    sizes = jnp.asarray(counts, jnp.int32)
    ups, downs = jnp.stack([up, up[::-1]]) / 5, jnp.stack([up[:, 0], up[:, 1]]) / 5
    split, whole = PartitionSpec("data"), PartitionSpec()

    def local(x, up, down, sizes):
        hidden = gmm_activated(x, up, sizes[0], activation=swiglu, backend=backend)
        return gmm(hidden, down, sizes[0], backend=backend)

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


def test_bad_input_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    lhs, rhs, bias, _, sizes = _operands([5, 3], 8)
    run = functools.partial(gmm_activated, activation=swiglu)
    with pytest.raises(ValueError, match=r"rhs \[2, 12, 20\]"):
        run(lhs, rhs[:, 0], sizes)
    with pytest.raises(ValueError, match=r"bias \[2, 20\]"):
        run(lhs, rhs, sizes, bias=bias[:, 0])
    with pytest.raises(ValueError, match=r"'tpu'.*bfloat16.*float32.*float16"):
        run(lhs.astype(jnp.float16), rhs.astype(jnp.float16), sizes, backend="tpu")
