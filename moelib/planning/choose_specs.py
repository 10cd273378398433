"""`choose_specs`: candidate shardings compiled ahead of time, and the cheapest of them."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.param import is_spec
from moelib.parallel.auto_sharding.choice import bytes_worth, sent_bytes
from moelib.parallel.auto_sharding.constrain import constrain_at_use
from moelib.parallel.auto_sharding.specs import (
    AutoShardings,
    Leftover,
    auto_partition_specs,
    check_windows,
)
from moelib.parallel.sharding import mesh_axes_of
from moelib.planning.hlo import program
from moelib.planning.report.collectives import collectives_by_axes
from moelib.planning.report.count import matmul_flops
from moelib.planning.report.step_report import Collective
from moelib.runtime import memory_maps

_LOG = logging.getLogger(__name__)
# Bytes that links carry during the latency of a collective: 3 microseconds at 100 GB/s.
_LATENCY_BYTES = 3e5
_MARGIN = 2.0  # Sent bytes, relative to the prediction, above which there is a warning.


class Candidate(NamedTuple):
    """Shardings, with the collectives of the compiled loss and gradient."""

    name: str
    specs: Any
    collectives: Sequence[Collective]
    sent_bytes: float  # Per device, of all collectives.
    parameter_bytes: float  # Per device.
    flops: float  # Per device, of matmuls.

    @property
    def cost(self) -> float:
        """Bytes on the links: those sent, and those that latencies, memory and FLOPs are worth."""
        latencies = _LATENCY_BYTES * sum(each.executions for each in self.collectives)
        return self.sent_bytes + latencies + bytes_worth(self.flops, self.parameter_bytes)


class Choice(NamedTuple):
    """The cheapest candidate, and all of them."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    traced: AutoShardings


def choose_specs(
    loss: Callable[..., jax.Array],
    params: Any,
    *example_batch: Any,
    mesh: Mesh,
    axis: str = "model",
    fsdp_axis: str = "fsdp",
    overrides: Sequence[tuple[str, PartitionSpec]] = (),
    leftover: Leftover = "replicate",
) -> Choice:
    """Compiles the loss and its gradient for several shardings, and returns the cheapest.

    The candidates are the traced sharding, replication, and the sharding from shapes unless it
    shards a convolution's window; `compile_candidate` compiles another one. Nothing runs:
    parameters and batch may be `jax.ShapeDtypeStruct`s, and the mesh may be one of described
    devices.

    Args:
        loss: Function of (params, *example_batch) with a scalar result.
        params: Tree of arrays. In the place of an array a `ParameterSpec` may stand, whose logical
            axes shard it in all candidates but the replicated one.
        *example_batch: A batch; leading dimensions are sharded over the other axes of the mesh.
        mesh: The mesh, with axes of type `AxisType.Auto`.
        axis: Mesh axis for tensor parallelism.
        fsdp_axis: Mesh axis for FSDP; the mesh may lack it.
        overrides: As in `auto_partition_specs`.
        leftover: As in `auto_partition_specs`.

    Raises:
        UserError: If the result is not a scalar, or the mesh lacks `axis`; and the errors of
            `auto_partition_specs`.
    """
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype or "float32") if is_spec(x) else x,
        params,
        is_leaf=is_spec,
    )
    result = jax.eval_shape(loss, arrays, *example_batch)
    if getattr(result, "shape", None) != ():
        found = getattr(result, "shape", type(result).__name__)
        raise UserError(f"loss returns {found}; it must return a scalar, of shape ().")
    if not isinstance(mesh, Mesh):
        raise UserError(
            f"mesh={mesh!r}: pass a jax.sharding.Mesh, of described devices if need be."
        )
    sizes = dict(mesh.shape)
    if axis not in sizes:
        raise UserError(f"axis={axis!r}: the mesh lacks this axis; {did_you_mean(axis, sizes)}")
    shard = lambda fn: auto_partition_specs(
        fn,
        params,
        *example_batch,
        num_shards=sizes[axis],
        axis=axis,
        fsdp_shards=sizes.get(fsdp_axis, 1),
        fsdp_axis=fsdp_axis,
        overrides=overrides,
        leftover=leftover,
    )
    traced, by_shape = shard(loss), shard(None)
    whole = jax.tree.map(lambda _: PartitionSpec(), traced.specs)
    named = {
        "traced": (traced.specs, traced.use_specs),
        "replicated": (whole, whole),
    }
    with contextlib.suppress(UserError):  # Shapes do not show all windows of convolutions.
        for spec, (path, windows) in zip(
            jax.tree.leaves(by_shape.specs), traced.report.windows.items(), strict=True
        ):
            check_windows(spec, windows, path)
        named["shapes"] = by_shape.specs, by_shape.use_specs
    compiled = [
        compile_candidate(
            name, loss, arrays, *example_batch, mesh=mesh, axis=axis, specs=x, use=use
        )
        for name, (x, use) in named.items()
    ]
    _warn_above_prediction(compiled[0], traced, axis)
    return Choice(min(compiled, key=lambda each: each.cost), tuple(compiled), traced)


def compile_candidate(
    name: str,
    loss: Callable[..., jax.Array],
    params: Any,
    *example_batch: Any,
    mesh: Mesh,
    specs: Any,
    axis: str = "model",
    use: Any = None,
) -> Candidate:
    """Returns a candidate: the loss and its gradient, compiled for a sharding.

    Args:
        name: Name of the candidate.
        loss: Function of (params, *example_batch) with a scalar result.
        params: Tree of arrays.
        *example_batch: A batch, as for `choose_specs`.
        mesh: The mesh.
        specs: Tree of PartitionSpecs: how each parameter is stored.
        axis: Mesh axis for tensor parallelism, which does not shard the batch.
        use: Tree of PartitionSpecs: how the loss uses each parameter; by default `specs`.
    """
    sizes = dict(mesh.shape)
    step = jax.value_and_grad(constrain_at_use(loss, specs if use is None else use))
    parsed = program.parse(compile_sharded(step, params, example_batch, specs, mesh, axis))
    collectives = collectives_by_axes(parsed, sizes)
    held = sum(
        leaf.size * leaf.dtype.itemsize / _num_parts(spec, sizes)
        for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True)
    )
    sent = sum(_sent_bytes(each) for each in collectives)
    return Candidate(name, specs, collectives, sent, held, matmul_flops(parsed))


def compile_sharded(
    step: Callable[..., Any], params: Any, batch: Any, specs: Any, mesh: Mesh, axis: str
) -> str:
    """Returns the compiled text of a loss and its gradient, ahead of time."""
    parallel = tuple(name for name in mesh.axis_names if name != axis)

    def split(x: Any) -> NamedSharding:
        rows = x.shape[0] if getattr(x, "ndim", 0) else 0
        count = mesh.size // mesh.shape[axis]
        return NamedSharding(mesh, PartitionSpec(parallel if rows and rows % count == 0 else None))

    memory_maps.warn_if_many()
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    replicated = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        jitted = jax.jit(
            step,
            in_shardings=(shardings, *jax.tree.map(split, tuple(batch))),
            out_shardings=(replicated, shardings),
        )
        return jitted.lower(params, *batch).compile().as_text() or ""


def _num_parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axes in mesh_axes_of(spec) for axis in axes)


def _sent_bytes(each: Collective) -> float:
    return sent_bytes(each.kind, each.bytes, max(each.group_size, 1))


def _warn_above_prediction(candidate: Candidate, traced: AutoShardings, axis: str) -> None:
    predicted = traced.report.predicted_bytes_sent()
    found = sum(_sent_bytes(each) for each in candidate.collectives if axis in each.axes)
    if found > _MARGIN * predicted:
        _LOG.warning(
            "auto-sharding: the compiled step sends %.2f MiB over the axis %s, the prediction was "
            "%.2f MiB; print the report, and declare unknown operations or give overrides.",
            found / 2**20,
            axis,
            predicted / 2**20,
        )
