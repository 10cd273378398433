"""`auto_partition_specs`: the sharding of any function's parameters."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import is_spec
from moelib.parallel.auto_sharding.choice import benefit, best_classes, wire_bytes
from moelib.parallel.auto_sharding.classes import Analysis, Collective
from moelib.parallel.auto_sharding.shapes import dimensions_from_shapes
from moelib.parallel.sharding import partition_spec

_SMALL = 1 << 14  # Entries below which a parameter may stay whole without being reported.

Leftover = Literal["fsdp", "replicate", "error"]


class ShardedClass(NamedTuple):
    """Dimensions of parameters that are sharded together."""

    size: int  # Of its first member.
    members: tuple[tuple[str, int], ...]  # (path of the parameter, dimension).
    collectives: tuple[Collective, ...]  # What sharding it adds to a step.


class ShardingReport(NamedTuple):
    """What was sharded, and why the rest was not."""

    num_shards: int
    classes: tuple[ShardedClass, ...]
    whole: Mapping[str, str]  # Large parameters that are not sharded over the axis: the reason.
    unused: tuple[str, ...]  # Parameters that the function does not use.
    unknown: Mapping[str, int]  # Operations without a dimension rule, and their number.

    def predicted(self) -> dict[str, tuple[int, float]]:
        """Returns {kind: (number of collectives, bytes of their arrays)} of a step."""
        found = [each for group in self.classes for each in group.collectives]
        kinds = sorted({each.kind for each in found})
        of_kind = {kind: [each.num_bytes for each in found if each.kind == kind] for kind in kinds}
        return {kind: (len(sizes), sum(sizes)) for kind, sizes in of_kind.items()}

    def predicted_bytes_sent(self) -> float:
        """Returns the bytes that each device sends for the collectives of a step."""
        found = [each for group in self.classes for each in group.collectives]
        return sum(wire_bytes(each, self.num_shards) for each in found)

    def __str__(self) -> str:
        """Returns a line per class, and one for each kind of thing that was left."""
        lines = []
        for each in self.classes:
            members = [f"{path}[{dim}]" for path, dim in each.members]
            shown = ", ".join(members[:6]) + (f" and {len(members) - 6} more" * (len(members) > 6))
            costs = Counter(c.kind for c in each.collectives)
            price = ", ".join(f"{count} {kind}" for kind, count in costs.items())
            over = f"{each.size:>9,} over {self.num_shards}"
            lines.append(f"{over}: {shown} ({price or 'no collective'})")
        for kind, (count, num_bytes) in self.predicted().items():
            lines.append(f"predicted: {count} {kind} of {num_bytes / 2**20:,.2f} MiB")
        lines += [f"whole: {path}: {reason}" for path, reason in self.whole.items()]
        lines += [f"unused: {path}" for path in self.unused]
        for name, count in self.unknown.items():
            lines.append(
                f"unknown operation: {name} ({count} times), which keeps its operands whole; "
                "declare it with register_dimension_rule"
            )
        return "\n".join(lines)


class AutoShardings(NamedTuple):
    """The shardings of a function's parameters."""

    specs: Any  # Tree of PartitionSpecs: how each parameter is stored.
    use_specs: Any  # The same without FSDP: how the function uses it (`constrain_at_use`).
    report: ShardingReport


def auto_partition_specs(
    fn: Callable[..., Any] | None,
    params: Any,
    *example_batch: Any,
    num_shards: int,
    axis: str = "model",
    fsdp_shards: int = 1,
    fsdp_axis: str = "fsdp",
    overrides: Sequence[tuple[str, PartitionSpec]] = (),
    leftover: Leftover = "replicate",
) -> AutoShardings:
    """Returns shardings of parameters that need few collectives, from a trace of the function.

    The function is traced for shapes only. Dimensions that it computes with together form classes;
    an integer program chooses the classes to shard, by the bytes that their collectives send and
    the FLOPs and memory that they save.

    Args:
        fn: Function of (params, *example_batch), such as a loss; None decides by shapes alone.
        params: Tree of arrays or `jax.ShapeDtypeStruct`s. `ParameterSpec`s with logical axes keep
            the sharding of the table (`moelib.parallel.sharding`).
        *example_batch: The function's other arguments, of one data-parallel replica. Their
            dimensions are not sharded over `axis`.
        num_shards: Size of the mesh axis `axis`.
        axis: Mesh axis for tensor parallelism.
        fsdp_shards: Size of the mesh axis `fsdp_axis`, over which each parameter's storage is
            sharded along the largest dimension that is whole.
        fsdp_axis: Mesh axis for FSDP.
        overrides: (regex of a path, its PartitionSpec). Dimensions that the function computes with
            together with those sharded over `axis` follow.
        leftover: What becomes of parameters that `axis` does not shard: "replicate", "fsdp" to
            shard their storage only, or "error".

    Raises:
        UserError: If nothing can be sharded, an override matches nothing or cannot be applied, or
            parameters are left over.
    """
    leaves = tree.flatten_items(params, is_leaf=is_spec)
    shapes = {path: _struct(path, leaf) for path, leaf in leaves}
    pinned = {
        path: partition_spec(leaf.axes, {axis: num_shards}, shape=leaf.shape, array=path)
        for path, leaf in leaves
        if is_spec(leaf) and not {*leaf.axes} <= {None, "layers"}  # The copies of a layer.
    }
    found = tree.match_rules(shapes, overrides, default=None, field="overrides")
    pinned |= {path: spec for path, spec in found.items() if spec is not None}
    _check_divisible(shapes, num_shards)
    structure = jax.tree.structure(params, is_leaf=is_spec)
    if fn is None:
        chosen = dimensions_from_shapes({p: s.shape for p, s in shapes.items()}, num_shards)
        report = ShardingReport(num_shards, (), {}, (), {})
    else:
        arguments = jax.tree.unflatten(structure, list(shapes.values()))
        chosen, report = _traced(fn, arguments, example_batch, shapes, pinned, num_shards, axis)
    used, stored = {}, {}
    for path, struct in shapes.items():
        dim = chosen.get(path)
        spec = pinned.get(path, PartitionSpec() if dim is None else _sharded({dim: axis}))
        used[path] = spec
        whole = leftover == "fsdp" and path in report.whole
        stored[path] = with_storage(
            spec, struct.shape, {fsdp_axis: fsdp_shards} | ({axis: num_shards} if whole else {})
        )
    if leftover == "error" and report.whole:
        path, reason = next(iter(report.whole.items()))
        raise UserError(
            f"leftover='error': {len(report.whole)} parameters are whole, first {path} ({reason}); "
            "give it an override, or set leftover to 'fsdp' or 'replicate'."
        )
    build = lambda specs: jax.tree.unflatten(structure, list(specs.values()))
    return AutoShardings(build(stored), build(used), report)


def _struct(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise UserError(
            f"params: {path} is {type(leaf).__name__}; pass arrays only (with Equinox, "
            "eqx.filter(model, eqx.is_inexact_array))."
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or jnp.float32)


def _check_divisible(shapes: Mapping[str, jax.ShapeDtypeStruct], num_shards: int) -> None:
    sizes = {size for struct in shapes.values() for size in struct.shape}
    if num_shards < 1 or (sizes and not any(size % num_shards == 0 for size in sizes)):
        fitting = [n for n in range(2, 65) if any(size % n == 0 for size in sizes)]
        raise UserError(
            f"num_shards={num_shards} divides no dimension of a parameter; set one of "
            f"{', '.join(map(str, fitting)) or '1'}."
        )


def _traced(
    fn: Callable[..., Any],
    params: Any,
    batch: Sequence[Any],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    pinned: Mapping[str, PartitionSpec],
    num_shards: int,
    axis: str,
) -> tuple[dict[str, int], ShardingReport]:
    """Returns the sharded dimension of each parameter, and the report."""
    jaxpr = jax.make_jaxpr(fn)(params, *batch).jaxpr
    analysis = Analysis(num_shards)
    arguments = [
        analysis.new_value(variable, is_trained=i < len(shapes), fixed=i >= len(shapes))
        for i, variable in enumerate(jaxpr.invars)
    ]
    analysis.run(jaxpr, arguments)
    classes = {
        path: tuple(map(analysis.class_of, value.dims))
        for path, value in zip(shapes, arguments, strict=False)
    }
    reasons, collectives, flops = (
        analysis.unshardable(),
        analysis.collectives(),
        analysis.flops(),
    )
    size_of = Counter[int]()
    for path, struct in shapes.items():
        for each in set(classes[path]):
            size_of[each] += math.prod(struct.shape) * struct.dtype.itemsize
    benefits = {
        each: benefit(collectives.get(each, ()), flops[each], num_bytes, num_shards)
        for each, num_bytes in size_of.items()
        if each not in reasons
    }
    arrays = list(analysis.arrays())
    required = _required(classes, arrays, pinned, reasons, axis)
    sharded = best_classes(benefits, arrays, required)
    dims: dict[str, int] = {}
    members: dict[int, list[tuple[str, int]]] = {each: [] for each in sharded}
    whole: dict[str, str] = {}
    for path, struct in shapes.items():
        hits = [dim for dim, each in enumerate(classes[path]) if each in sharded]
        if hits and path not in pinned:
            dims[path] = hits[0]
        for dim in hits:
            members[classes[path][dim]].append((path, dim))
        if not hits and path not in pinned and math.prod(struct.shape) >= _SMALL:
            why = [
                f"[{dim}] {reasons.get(each, 'costs more than it saves')}"
                for dim, each in enumerate(classes[path])
            ]
            whole[path] = "; ".join(why)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    read |= {v for v in jaxpr.outvars if not hasattr(v, "val")}
    unused = [p for p, v in zip(shapes, jaxpr.invars, strict=False) if v not in read]
    groups = [
        ShardedClass(
            shapes[found[0][0]].shape[found[0][1]],
            tuple(found),
            tuple(collectives.get(each, ())),
        )
        for each, found in members.items()
    ]
    groups.sort(key=lambda group: group.members)
    return dims, ShardingReport(
        num_shards, tuple(groups), whole, tuple(unused), dict(analysis.unknown)
    )


def _required(
    classes: Mapping[str, Sequence[int]],
    arrays: Sequence[Sequence[int]],
    pinned: Mapping[str, PartitionSpec],
    reasons: Mapping[int, str],
    axis: str,
) -> dict[int, str]:
    """Returns the classes that overrides shard, each with the parameter whose override does."""
    required: dict[int, str] = {}
    for path, spec in pinned.items():
        for dim, entry in enumerate(spec):
            if axis not in (entry if isinstance(entry, tuple) else (entry,)):
                continue
            each = classes[path][dim]
            if each in reasons:
                raise UserError(
                    f"overrides: {path} cannot be sharded along dimension {dim}: {reasons[each]}."
                )
            required.setdefault(each, path)
    for array in arrays:
        both = sorted({required[each] for each in array if each in required})
        if len(both) > 1:
            raise UserError(
                f"overrides: those of {both[0]} and {both[1]} contradict each other: an array of "
                "the computation would be sharded twice."
            )
    return required


def _sharded(axes: Mapping[int, Any]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) for dim in range(max(axes) + 1)))


def with_storage(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int]
) -> PartitionSpec:
    """Returns the spec with each mesh axis on the largest whole dimension that it divides.

    Arrays of less than 16,384 entries keep their spec.
    """
    axes: dict[int, Any] = {dim: entry for dim, entry in enumerate(spec) if entry is not None}
    used = {name for e in spec for name in (e if isinstance(e, tuple) else (e,))}
    for axis, size in mesh.items():
        if axis in used:
            continue
        free = [i for i in range(len(shape)) if i not in axes and shape[i] % size == 0]
        if size > 1 and free and math.prod(shape) >= _SMALL:
            axes[max(free, key=lambda i: shape[i])] = axis
    return _sharded(axes) if axes else PartitionSpec()
