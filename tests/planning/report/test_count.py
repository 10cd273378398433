"""Counts of programs that libtpu compiles, compared with counts that are known beforehand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moelib.kernels.gmm import gmm
from moelib.parallel.mesh import HybridMeshShape, create_device_mesh, mesh_shape_from_axes
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.hardware.topologies import topology
from moelib.planning.hlo.program import parse
from moelib.planning.report.count import count
from moelib.train.compiler_options import BY_DEVICE_KIND
from tests.planning.report.test_step_report import make_report

L, B, D = 6, 64, 512


@pytest.fixture(scope="module")
def where():
    pytest.importorskip("libtpu")
    return topology("v6e:2x2x1")


def _report(where, function, *arguments):
    """Returns the report of a function of (shape, dtype, spec), on a mesh of fsdp 2, expert 2."""
    mesh = create_device_mesh(mesh_shape_from_axes(fsdp=2, expert=2), devices=where.devices)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arguments
    ]
    with jax.set_mesh(mesh), no_compilation_cache():
        compiled = (
            jax.jit(function)
            .lower(*shapes)
            .compile(compiler_options=dict(BY_DEVICE_KIND[where.accelerator.device_kind]))
        )
    program = parse(compiled.as_text())
    return make_report(**count(compiled, program, mesh.shape))


@pytest.fixture(scope="module")
def layers(where):
    """L layers of matmuls, whose weights are gathered over fsdp one by one, and a mean."""

    @functools.partial(
        jax.shard_map,
        in_specs=(PartitionSpec(None, "fsdp"), PartitionSpec(("expert", "fsdp"))),
        out_specs=PartitionSpec(),
    )
    def step(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ jax.lax.all_gather(weight, "fsdp", tiled=True)), None

        x, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.pmean(jnp.mean(x.astype(jnp.float32)), ("expert", "fsdp"))

    weights = ((L, D, D), jnp.bfloat16, PartitionSpec(None, "fsdp"))
    x = ((4 * B, D), jnp.bfloat16, PartitionSpec(("expert", "fsdp")))
    return _report(where, step, weights, x)


@pytest.mark.parametrize(
    "name",
    ["v6e:4x4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("v5p:4x4x4", "tpu7x:2x2x2"))],
)
def test_over_the_whole_torus_weights_are_gathered_and_gradients_scattered(name):
    pytest.importorskip("libtpu")
    where = topology(name)
    mesh = create_device_mesh((-1,), ("fsdp",), where.devices)
    split = PartitionSpec(None, "fsdp")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(split, PartitionSpec("fsdp")), out_specs=PartitionSpec()
    )
    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ jax.lax.all_gather(weight, "fsdp", tiled=True)), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return jax.lax.pmean(jnp.mean(x.astype(jnp.float32)), "fsdp")

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in [
            ((L, 2048, 2048), split),
            ((256 * mesh.size, 2048), PartitionSpec("fsdp")),
        ]
    ]
    options = dict(BY_DEVICE_KIND.get(where.accelerator.device_kind, {}))
    with no_compilation_cache():
        compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile(compiler_options=options)
    found = count(compiled, parse(compiled.as_text()), mesh.shape)["collectives"]
    kinds = {each.kind: (each.executions, each.count - each.asynchronous) for each in found}
    assert kinds == {"all-gather": (2 * L, 0), "reduce-scatter": (L, 0)}


def test_a_fused_reduce_scatter_is_no_all_reduce():
    pytest.importorskip("libtpu")
    mesh = create_device_mesh((4,), ("fsdp",), topology("v5e:2x2").devices)
    x = jax.ShapeDtypeStruct(
        (4096, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    scatter = jax.shard_map(
        lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    with no_compilation_cache():
        compiled = jax.jit(scatter).lower(x).compile()
    assert " all-reduce(" in compiled.as_text()
    found = count(compiled, parse(compiled.as_text()), mesh.shape)["collectives"]
    sizes = {each.kind: each.bytes for each in found}
    assert "all-reduce" not in sizes
    assert sizes["reduce-scatter"] == pytest.approx(1024 * 2048 * 2, rel=0.02)  # Padded.


def test_what_slices_exchange_is_counted():
    pytest.importorskip("libtpu")
    where = topology("2*v6e:1x2")
    hybrid = HybridMeshShape((1, 2), (2, 1))
    mesh = create_device_mesh(hybrid, ("data", "fsdp"), where.devices)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((4 * B, D), jnp.float32, sharding=sharding)
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "data", tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec(("data", "fsdp")),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    with no_compilation_cache():
        compiled = jax.jit(gather).lower(x).compile()
    (sent,) = count(compiled, parse(compiled.as_text()), mesh.shape)["collectives"]
    assert (sent.kind, sent.axes, sent.group_size) == ("all-gather", ("network",), 2)
    assert (sent.executions, sent.bytes) == (1, 2 * B * D * 4)


def test_a_loop_counts_each_time_and_a_scalars_reduction_is_told_apart(layers):
    gathers, reduces = layers.collectives
    assert (gathers.kind, gathers.executions, gathers.bytes) == ("all-gather", L, L * D * D * 2)
    assert (gathers.axes, gathers.group_size, gathers.small) == (("fsdp",), 2, 0)
    assert gathers.asynchronous == gathers.count
    assert (reduces.kind, reduces.count, reduces.small) == ("all-reduce", 1, 1)
    assert (reduces.executions, reduces.bytes) == (1, 4)
    assert reduces.axes == ("expert", "fsdp")
    figures = layers.figures
    assert figures["all-gather.bytes"] == L * D * D * 2
    assert figures["matmul_flops"] == L * 2 * B * D * D
    assert layers.loops_of_unknown_length == ()
    assert figures["memory.arguments"] == L * D * D + B * D * 2
    assert figures["memory.peak"] >= figures["memory.arguments"]


def test_cycles_are_attributed_to_the_line_of_the_source(layers):
    cycles = layers.figures["cycles"]
    assert cycles == sum(row["cycles"] for row in layers.sources) > 0
    assert cycles == pytest.approx(sum(row["cycles"] for row in layers.cycles))
    assert any("test_count.py layer" in row["name"] for row in layers.sources)
    assert layers.costliest[0]["cycles"] == max(row["cycles"] for row in layers.costliest)


def test_grouped_matmuls_report_the_rows_that_they_compute(where):
    replicated = PartitionSpec()

    @functools.partial(jax.shard_map, in_specs=(replicated,) * 3, out_specs=replicated)
    def multiply(lhs, rhs, sizes):
        return gmm(lhs, rhs, sizes)

    report = _report(
        where,
        multiply,
        ((1024, 256), jnp.bfloat16, replicated),
        ((4, 256, 128), jnp.bfloat16, replicated),
        ((4,), jnp.int32, replicated),
    )
    (kernel,) = report.kernels
    assert (kernel.name, kernel.count, kernel.executions) == ("gmm", 1, 1)
    assert kernel.flops == 2 * 1024 * 256 * 128
    assert (kernel.rows, kernel.groups) == (1024, 4)
    computed = 1024 + 3 * (kernel.rows_at_once - 1)
    assert report.figures["rows_computed_over_routed"] == computed / 1024
