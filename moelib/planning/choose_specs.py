"""`choose_specs`: candidate shardings compiled ahead of time, and the best kept."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.errors import UserError
from moelib.parallel.auto_sharding.choice import BYTES_PER_PARAMETER_BYTE
from moelib.parallel.auto_sharding.constrain import constrain_at_use
from moelib.parallel.auto_sharding.specs import AutoShardings, auto_partition_specs
from moelib.planning.hlo import program
from moelib.planning.report.collectives import collectives_by_axes
from moelib.planning.report.step_report import Collective

_LOG = logging.getLogger(__name__)
_MARGIN = 2.0  # Sent bytes, relative to the prediction, above which there is a warning.


class Candidate(NamedTuple):
    """Shardings, with the collectives of the compiled loss and gradient."""

    name: str
    specs: Any
    collectives: tuple[Collective, ...]
    sent_bytes: float  # That each device sends, of all collectives.
    parameter_bytes: float  # That each device stores.

    @property
    def cost(self) -> float:
        """Bytes on the links, by the prices of `auto_partition_specs`; FLOPs are left out."""
        return self.sent_bytes + BYTES_PER_PARAMETER_BYTE * self.parameter_bytes


class Choice(NamedTuple):
    """The best candidate, and all of them."""

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
    others: Mapping[str, Any] | None = None,
    **options: Any,
) -> Choice:
    """Compiles the loss and its gradient for several shardings, and returns the cheapest.

    The candidates are the traced sharding, the one from shapes, replication, and `others`. Nothing
    runs: parameters and batch may be `jax.ShapeDtypeStruct`s, and the mesh may be one of described
    devices.

    Args:
        loss: Function of (params, *example_batch) with a scalar result.
        params: Tree of arrays.
        *example_batch: A batch; leading dimensions are sharded over the other axes of the mesh.
        mesh: The mesh.
        axis: Mesh axis for tensor parallelism.
        fsdp_axis: Mesh axis for FSDP; the mesh may lack it.
        others: Trees of PartitionSpecs by name.
        **options: `overrides` and `leftover` of `auto_partition_specs`.

    Raises:
        UserError: If the result is not a scalar, and the errors of `auto_partition_specs`.
    """
    result = jax.eval_shape(loss, params, *example_batch)
    if getattr(result, "shape", None) != ():
        found = getattr(result, "shape", type(result).__name__)
        raise UserError(f"loss returns {found}; it must return a scalar, of shape ().")
    sizes = dict(mesh.shape)
    shards: dict[str, Any] = {"num_shards": sizes[axis], "axis": axis, "fsdp_axis": fsdp_axis}
    shards |= {"fsdp_shards": sizes.get(fsdp_axis, 1), **options}
    traced = auto_partition_specs(loss, params, *example_batch, **shards)
    by_shape = auto_partition_specs(None, params, **shards)
    replicated = jax.tree.map(lambda _: PartitionSpec(), traced.specs)
    named = {
        "traced": (traced.specs, traced.use_specs),
        "shapes": (by_shape.specs, by_shape.use_specs),
        "replicated": (replicated, replicated),
        **{name: (specs, specs) for name, specs in (others or {}).items()},
    }
    compiled = []
    for name, (specs, use_specs) in named.items():
        step = jax.value_and_grad(constrain_at_use(loss, use_specs))
        text = compile_sharded(step, params, example_batch, specs, mesh, axis)
        collectives = collectives_by_axes(program.parse(text), sizes)
        sent = sum(sent_bytes(each) for each in collectives)
        held = sum(
            leaf.size * leaf.dtype.itemsize / _num_parts(spec, sizes)
            for leaf, spec in zip(jax.tree.leaves(params), _leaves(specs), strict=True)
        )
        compiled.append(Candidate(name, specs, collectives, sent, held))
    _warn_above_prediction(compiled[0], traced, axis)
    return Choice(min(compiled, key=lambda each: each.cost), tuple(compiled), traced)


def compile_sharded(
    step: Callable[..., Any], params: Any, batch: Any, specs: Any, mesh: Mesh, axis: str
) -> str:
    """Returns the compiled text of a loss and its gradient, ahead of time."""
    parallel = tuple(name for name in mesh.axis_names if name != axis)

    def split(x: Any) -> NamedSharding:
        rows = x.shape[0] if getattr(x, "ndim", 0) else 0
        count = mesh.size // mesh.shape[axis]
        return NamedSharding(mesh, PartitionSpec(parallel if rows and rows % count == 0 else None))

    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        jitted = jax.jit(
            step,
            in_shardings=(placed, *jax.tree.map(split, tuple(batch))),
            out_shardings=(whole, placed),
        )
        return jitted.lower(params, *batch).compile().as_text() or ""


def _leaves(specs: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _num_parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    axes = [(e,) if isinstance(e, str) else e or () for e in spec]
    return math.prod(sizes[axis] for entry in axes for axis in entry)


def sent_bytes(each: Collective) -> float:
    """Returns the bytes that a device sends for collectives, in a ring."""
    part = (each.group_size - 1) / max(each.group_size, 1)
    factor = {
        "all-reduce": 2 * part,
        "reduce-scatter": each.group_size - 1,
        "collective-permute": 1.0,
    }.get(each.kind, part)
    return factor * each.bytes


def _warn_above_prediction(candidate: Candidate, traced: AutoShardings, axis: str) -> None:
    predicted = traced.report.predicted_bytes_sent()
    found = sum(sent_bytes(each) for each in candidate.collectives if axis in each.axes)
    if found > _MARGIN * predicted:
        _LOG.warning(
            "auto-sharding: the compiled step sends %.2f MiB over the axis %s, the prediction was "
            "%.2f MiB; print the report, and declare unknown operations or give overrides.",
            found / 2**20,
            axis,
            predicted / 2**20,
        )
