"""`auto_partition_specs`: the sharding of any function's parameters."""

import math
import numbers
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.param import is_spec
from moelib.parallel.auto_sharding.choice import benefit, best_classes, sent_bytes
from moelib.parallel.auto_sharding.classes import Analysis, Collective
from moelib.parallel.auto_sharding.shapes import dimensions_from_shapes, square_window
from moelib.parallel.sharding import SplitError, mesh_axes_of, partition_spec

_SMALL = 1 << 14  # Entries below which a parameter may stay whole without being reported.

Leftover = Literal["fsdp", "replicate", "error"]
_Shapes = Mapping[str, jax.ShapeDtypeStruct]


class ShardedClass(NamedTuple):
    """Dimensions of parameters that are sharded together."""

    size: int  # Of its first member.
    members: tuple[tuple[str, int], ...]  # (path of the parameter, dimension).
    collectives: tuple[Collective, ...]  # Those that its sharding adds to a step.


class ShardingReport(NamedTuple):
    """The sharded dimensions, and the reasons why other parameters are whole."""

    num_shards: int
    classes: tuple[ShardedClass, ...] = ()
    whole: Mapping[str, str] = {}  # Large parameters that are not sharded over the axis: reasons.
    small: Mapping[str, str] = {}  # The same of those below 16,384 entries, which is not printed.
    unused: tuple[str, ...] = ()  # Parameters that the function does not use.
    unknown: Mapping[str, int] = {}  # Operations without a dimension rule, and their number.
    # Dimensions of parameters in which a convolution's window lies or along which it moves.
    windows: Mapping[str, Collection[int]] = {}

    def predicted(self) -> dict[str, tuple[int, float]]:
        """Returns {kind: (number of collectives, bytes of their arrays)} of a step."""
        found: dict[str, tuple[int, float]] = {}
        for each in (each for group in self.classes for each in group.collectives):
            count, num_bytes = found.get(each.kind, (0, 0.0))
            found[each.kind] = count + 1, num_bytes + each.num_bytes
        return dict(sorted(found.items()))

    def predicted_bytes_sent(self) -> float:
        """Returns the bytes that each device sends for the collectives of a step."""
        totals = self.predicted().items()
        return sum(sent_bytes(kind, size, self.num_shards) for kind, (_, size) in totals)

    def __str__(self) -> str:
        """Returns a line per class, prediction, whole or unused parameter, unknown operation."""
        lines = []
        for each in self.classes:
            members = [f"{path}[{dim}]" for path, dim in each.members]
            shown = ", ".join(members[:6]) + (f" and {len(members) - 6} more" * (len(members) > 6))
            counts = Counter(c.kind for c in each.collectives).items()
            price = ", ".join(f"{count} {kind}" for kind, count in counts) or "no collective"
            lines.append(f"{each.size:>9,} over {self.num_shards}: {shown} ({price})")
        for kind, (count, num_bytes) in self.predicted().items():
            lines.append(f"predicted: {count} {kind} of {num_bytes / 2**20:,.2f} MiB")
        lines += [f"whole: {path}: {reason}" for path, reason in self.whole.items()]
        lines += [f"unused: {path}" for path in self.unused]
        return "\n".join([*lines, *self.unknown_lines()])

    def unknown_lines(self) -> list[str]:
        """Returns a line per unknown operation."""
        advice = "which needs its operands whole; declare it with register_dimension_rule"
        unknown = self.unknown.items()
        return [f"unknown operation: {name} ({count} times), {advice}" for name, count in unknown]


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
        fn: Function of (params, *example_batch) with any result, such as a loss or predictions;
            None decides by shapes alone.
        params: Tree of arrays or `jax.ShapeDtypeStruct`s. `ParameterSpec`s with logical axes keep
            the sharding of the table (`moelib.parallel.sharding`).
        *example_batch: The function's other arguments, of one data-parallel replica. Their
            dimensions are not sharded over `axis`.
        num_shards: Size of the mesh axis `axis`.
        axis: Mesh axis for tensor parallelism.
        fsdp_shards: Size of the mesh axis `fsdp_axis`, over which each parameter's storage is
            sharded along the largest dimension that is whole.
        fsdp_axis: Mesh axis for FSDP.
        overrides: Pairs (regex of a path, PartitionSpec) over these axes, or those of the current
            mesh. Dimensions that the function computes with together follow: they are sharded over
            `axis`, or stay whole, like those of the override. FSDP adds `fsdp_axis` to specs
            without it.
        leftover: Treatment of other large parameters that `axis` does not shard: "replicate",
            "fsdp" to shard their storage only, or "error".

    Raises:
        UserError: If an argument has an invalid value, nothing can be sharded, overrides match
            nothing, do not fit, or contradict each other or logical axes, or parameters are left
            over.
    """
    leaves = tree.flatten_items(params, is_leaf=is_spec)
    shapes = {path: _struct(path, leaf) for path, leaf in leaves}
    if len(shapes) < len(leaves):
        path = Counter(path for path, _ in leaves).most_common(1)[0][0]
        raise UserError(f"params: two parameters have the path {path!r}; rename one.")
    _check_options(axis, num_shards, fsdp_axis, fsdp_shards, leftover)
    _check_divisible(shapes, num_shards)
    sizes = {axis: num_shards, fsdp_axis: fsdp_shards}
    annotated = {
        path: partition_spec(leaf.axes, {axis: num_shards}, shape=leaf.shape, array=path)
        for path, leaf in leaves
        if is_spec(leaf) and not {*leaf.axes} <= {None, "layers"}  # Not stacked layers' alone.
    }
    overridden = _overridden(shapes, overrides, sizes)
    for path, spec in overridden.items():
        if _dims(annotated.get(path, spec), axis) != _dims(spec, axis):
            raise UserError(
                f"overrides: {path}: {spec} contradicts {annotated[path]}, the sharding of its "
                "logical axes; remove the override, or change the axes or their sharding rules."
            )
    pinned = annotated | overridden
    structure = jax.tree.structure(params, is_leaf=is_spec)
    if fn is None:
        chosen = dimensions_from_shapes({p: s.shape for p, s in shapes.items()}, num_shards)
        unclear = {path: "shapes alone decide nothing" for path in shapes if path not in chosen}
        windows = {path: square_window(struct.shape) for path, struct in shapes.items()}
        report = ShardingReport(num_shards, whole=unclear, windows=windows)
    else:
        arguments = jax.tree.unflatten(structure, list(shapes.values()))
        jaxpr = jax.make_jaxpr(fn)(arguments, *example_batch).jaxpr
        chosen, report = _traced(jaxpr, shapes, pinned, overridden, num_shards, axis)
    free = {path: reason for path, reason in report.whole.items() if path not in pinned}
    is_small = lambda path: math.prod(shapes[path].shape) < _SMALL
    whole = {path: reason for path, reason in free.items() if not is_small(path)}
    small = {path: reason for path, reason in free.items() if is_small(path)}
    if leftover == "error" and whole:
        path, reason = next(iter(whole.items()))
        raise UserError(
            f"leftover='error': {len(whole)} parameters are whole, first {path} ({reason}); "
            "give it an override, or set leftover to 'fsdp' or 'replicate'."
        )
    used, stored = [], []
    for path, struct in shapes.items():
        dim = chosen.get(path)
        spec = pinned.get(path, PartitionSpec() if dim is None else _sharded({dim: axis}))
        used.append(_without(spec, fsdp_axis))
        storage = {fsdp_axis: fsdp_shards}
        if leftover == "fsdp" and path in whole:
            storage |= {axis: num_shards}
        stored.append(with_storage(spec, struct.shape, storage, report.windows.get(path, ())))
    build = lambda specs: jax.tree.unflatten(structure, specs)
    return AutoShardings(build(stored), build(used), report._replace(whole=whole, small=small))


def _struct(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise UserError(
            f"params: {path} is {type(leaf).__name__}; pass arrays only (with Equinox, "
            "eqx.filter(model, eqx.is_inexact_array))."
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or jnp.float32)


def _check_options(
    axis: str, num_shards: int, fsdp_axis: str, fsdp_shards: int, leftover: str
) -> None:
    for name, size in (("num_shards", num_shards), ("fsdp_shards", fsdp_shards)):
        if not isinstance(size, numbers.Integral) or size < 1:
            raise UserError(f"{name}={size!r}: set the size of a mesh axis, an integer above 0.")
    for name, value in (("axis", axis), ("fsdp_axis", fsdp_axis)):
        if not isinstance(value, str) or not value:
            raise UserError(f"{name}={value!r}: set the name of a mesh axis.")
    if axis == fsdp_axis:
        raise UserError(f"axis={axis!r} and fsdp_axis={fsdp_axis!r}: set two different mesh axes.")
    if leftover not in get_args(Leftover):
        raise UserError(f"leftover={leftover!r}: {did_you_mean(str(leftover), get_args(Leftover))}")


def _check_divisible(shapes: _Shapes, num_shards: int) -> None:
    sizes = {size for struct in shapes.values() for size in struct.shape}
    if sizes and all(size % num_shards for size in sizes):
        fitting = [n for n in range(2, 65) if any(size % n == 0 for size in sizes)]
        raise SplitError(
            f"num_shards={num_shards} divides no dimension of a parameter; set one of "
            f"{', '.join(map(str, fitting)) or '1'}."
        )


def _overridden(
    shapes: _Shapes, overrides: Any, sizes: Mapping[str, int]
) -> dict[str, PartitionSpec]:
    """Returns the specs of overrides by path."""
    for each in overrides if isinstance(overrides, tuple | list) else [overrides]:
        if not isinstance(each, tuple | list) or [*map(type, each)] != [str, PartitionSpec]:
            raise UserError(f"overrides: {each!r}: write pairs (regex of a path, PartitionSpec).")
    found = tree.match_rules(shapes, overrides, default=None, field="overrides")
    specs = {path: spec for path, spec in found.items() if spec is not None}
    mesh = jax.sharding.get_abstract_mesh()
    for path, spec in specs.items():
        check_spec(spec, shapes[path].shape, {**mesh.shape, **sizes}, f"overrides: {path}")
    return specs


def check_spec(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int], array: str
) -> None:
    """Checks that a spec fits an array and the sizes of mesh axes.

    Raises:
        UserError: If it does not; the message begins with `array`.
    """
    if len(spec) > len(shape):
        raise UserError(
            f"{array}: {spec} has {len(spec)} entries, but the shape is {tuple(shape)}."
        )
    names: list[str] = []
    for dim, axes in enumerate(mesh_axes_of(spec)):
        for name in axes:
            if name not in mesh:
                advice = did_you_mean(str(name), mesh)
                raise UserError(f"{array}: {spec} has the unknown mesh axis {name!r}; {advice}")
            if name in names:
                raise UserError(f"{array}: {spec} has the mesh axis {name!r} twice; remove one.")
            names.append(name)
        if shape[dim] % (parts := math.prod(mesh[name] for name in axes)):
            raise UserError(
                f"{array}: {spec} cannot be sharded along dimension {dim}: size {shape[dim]} is "
                f"not divisible by {parts}."
            )


def check_windows(spec: PartitionSpec, windows: Collection[int], array: str) -> None:
    """Raises UserError if a spec shards one of a parameter's `ShardingReport.windows`."""
    for dim, axes in enumerate(mesh_axes_of(spec)):
        if axes and dim in windows:
            raise UserError(
                f"{array}: {spec} shards dimension {dim}, in which a convolution's window lies or "
                "along which it moves: gradients would be wrong; set its entry to None."
            )


def _traced(
    jaxpr: Any,
    shapes: _Shapes,
    pinned: Mapping[str, PartitionSpec],
    overridden: Collection[str],
    num_shards: int,
    axis: str,
) -> tuple[dict[str, int], ShardingReport]:
    """Returns the sharded dimension of each parameter, and the report."""
    analysis = Analysis(num_shards, axis)
    arguments = [
        analysis.new_value(variable, is_trained=i < len(shapes), fixed=i >= len(shapes))
        for i, variable in enumerate(jaxpr.invars)
    ]
    results = analysis.run(jaxpr, arguments)
    classes = {
        path: tuple(map(analysis.class_of, value.dims))
        for path, value in zip(shapes, arguments, strict=False)
    }
    reasons, collectives, flops = analysis.unshardable(), analysis.collectives(), analysis.flops()
    arrays = analysis.arrays()
    frozen = analysis.windows()
    windows = {p: [i for i, c in enumerate(each) if c in frozen] for p, each in classes.items()}
    for path, spec in pinned.items():
        field = "overrides" if path in overridden else "params"
        check_windows(spec, windows[path], f"{field}: {path}")
    required, kept = _required(classes, arrays, pinned, overridden, reasons, axis)
    reasons = {
        each: f"the override of {path} keeps it whole" for each, path in kept.items()
    } | reasons
    follows = lambda path, dim: path not in pinned or dim in _dims(pinned[path], axis)
    bytes_of = defaultdict[int, float](float)  # Those that sharding a class saves.
    for path, struct in shapes.items():
        for dim, each in enumerate(classes[path]):
            if each not in reasons and follows(path, dim):
                bytes_of[each] += math.prod(struct.shape) * struct.dtype.itemsize
    benefits = {
        each: benefit(collectives.get(each, ()), flops[each], num_bytes, num_shards)
        for each, num_bytes in bytes_of.items()
    }
    sharded = best_classes(benefits, arrays, required)
    members: dict[int, list[tuple[str, int]]] = defaultdict(list)
    dims, whole = {}, {}
    for path, of_path in classes.items():
        for dim, each in enumerate(of_path):
            if each in sharded and follows(path, dim):
                dims[path] = dim
                members[each].append((path, dim))
        if path not in dims:
            why = (reasons.get(each, "costs more than it saves") for each in of_path)
            whole[path] = "; ".join(f"[{dim}] {reason}" for dim, reason in enumerate(why))
    size = lambda path, dim: shapes[path].shape[dim]
    groups = [
        ShardedClass(size(*found[0]), tuple(found), tuple(collectives.get(each, ())))
        for each, found in members.items()
    ]
    _, is_needed = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    read = analysis.read | {value.source for value in results}  # Seen in custom derivatives too.
    unused = [
        path
        for path, value, needed in zip(shapes, arguments, is_needed, strict=False)
        if not (needed and value.source in read)
    ]
    groups.sort(key=lambda group: group.members)
    unknown = dict(analysis.unknown)
    report = ShardingReport(num_shards, tuple(groups), whole, {}, tuple(unused), unknown, windows)
    return dims, report


def _dims(spec: PartitionSpec, axis: str) -> set[int]:
    """Returns the dimensions that a spec shards over a mesh axis."""
    return {dim for dim, axes in enumerate(mesh_axes_of(spec)) if axis in axes}


def _required(
    classes: Mapping[str, Sequence[int]],
    arrays: Iterable[Sequence[int]],
    pinned: Mapping[str, PartitionSpec],
    overridden: Collection[str],
    reasons: Mapping[int, str],
    axis: str,
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Returns the classes that pinned parameters shard, and those that overrides keep whole.

    Each has its first parameter. An annotation that does not fit the trace keeps its sharding, but
    no dimension follows it. An override that does not fit is refused.
    """
    neighbors: dict[int, set[int]] = defaultdict(set)
    for array in arrays:
        for each in array:
            neighbors[each].update(array)
    required: dict[int, str] = {}
    kept: dict[int, str] = {}
    for path, spec in pinned.items():  # Annotations come first.
        split, is_override = _dims(spec, axis), path in overridden
        for dim, each in enumerate(classes[path]):
            if dim in split:
                rivals = [kept.get(each), *map(required.get, neighbors[each] - {each})]
            else:
                rivals = [required.get(each)]
            rival = next((other for other in rivals if other is not None), None)
            if is_override and rival is not None:
                raise UserError(
                    f"overrides: {rival} and {path} contradict each other: {pinned[rival]} and "
                    f"{spec} shard an array of the computation differently."
                )
            if is_override and dim in split and each in reasons:
                raise UserError(
                    f"overrides: {path} cannot be sharded along dimension {dim}: {reasons[each]}."
                )
            if dim in split and rival is None and each not in reasons:
                required.setdefault(each, path)
            elif is_override:
                kept.setdefault(each, path)
    return required, kept


def _sharded(axes: Mapping[int, Any]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) for dim in range(max(axes, default=-1) + 1)))


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Returns the spec after a gather over a mesh axis."""
    kept = [tuple(name for name in axes if name != axis) for axes in mesh_axes_of(spec)]
    return _sharded(
        {dim: axes if len(axes) > 1 else axes[0] for dim, axes in enumerate(kept) if axes}
    )


def with_storage(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mapping[str, int], whole: Collection[int] = ()
) -> PartitionSpec:
    """Returns the spec with each mesh axis on the largest whole dimension that it divides.

    Dimensions in `whole` stay so. Arrays of less than 16,384 entries keep their spec.
    """
    axes: dict[int, Any] = {dim: entry for dim, entry in enumerate(spec) if entry is not None}
    used = {name for each in mesh_axes_of(spec) for name in each}
    for axis, size in mesh.items():
        if axis in used:
            continue
        free = [i for i, n in enumerate(shape) if i not in {*axes, *whole} and n % size == 0]
        if size > 1 and free and math.prod(shape) >= _SMALL:
            axes[max(free, key=lambda i: shape[i])] = axis
    return _sharded(axes)
