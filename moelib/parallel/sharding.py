"""Sharding rules: the one table from logical axes to mesh axes, and the shardings that follow.

Layers name the dimensions of their parameters and activations ("embed", "ffn", "batch"); only
this file knows the mesh. Without a mesh nothing is sharded.
"""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.jaxpr import abstract_parameters
from moelib.core.param import ParameterSpec, is_spec
from moelib.parallel.mesh import MESH_AXIS_NAMES, describe_mesh

Rules = Mapping[str, tuple[str, ...]]

# Weights are sharded over fsdp along the model width, those outside of experts over expert too, and
# over model along the dimensions of tensor parallelism. Activations are sharded over the batch
# axes, and between layers over model along the sequence (Korthikanti et al., arXiv:2205.05198).
# Experts have logical axes of their own, so that other rules can shard them: {"experts": ("expert",
# "model"), "expert_ffn": ()}. A mesh axis that is absent or of size 1 shards nothing.
DEFAULT_RULES: Rules = {
    # Parameters.
    "vocab": ("model",),
    "embed": ("expert", "fsdp"),  # In the batch's order, so that embeddings need no exchange.
    "ffn": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "head_dim": (),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
    "expert_ffn": ("model",),
    "layers": (),
    "norm": (),
    # Parameters whose dimensions have no names, sharded automatically.
    "model": ("model",),
    "fsdp": ("fsdp",),
    # Activations.
    "batch": ("data", "expert", "fsdp"),
    "sequence": ("seq",),
    "residual_sequence": ("seq", "model"),  # Between layers: shards norms and residual sums too.
    "activation_embed": (),
    "activation_ffn": ("model",),
    "activation_heads": ("model",),
}

# Rules of a pipeline, whose ranks store a part of every layer.
PIPELINE_RULES: Rules = {
    name: (*DEFAULT_RULES[name], "pipeline") for name in ("embed", "expert_embed")
}

_WIDTHS = ("embed", "expert_embed")  # Logical axes of the model width in weights.
_TILE = 128  # Numbers of the last dimension in a tile of a TPU.
# Rows of a tile of 32 bits. Gradients of fewer are all-reduced: 2 of head_dim 128 over fsdp=64, 768
# MiB in a step of qwen3-30b-a3b.
_TILE_ROWS = 8

# The changed rules: (logical axis, mesh axes), sorted. JAX includes them in the keys of its traces.
_overrides = jax.make_user_context(())
_used: ContextVar[set[str] | None] = ContextVar("moelib_logical_axes_used", default=None)


class SplitError(UserError):
    """An array or axis that a mesh cannot shard."""


# -- Rules ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def sharding_rules(overrides: Mapping[str, Sequence[str]]) -> Iterator[set[str]]:
    """Changes rules inside the block; jitted functions are traced again for each set of rules.

    Yields:
        The logical axes used inside the block, a set that grows.

    Raises:
        UserError: If a logical axis is not in the table, or a mesh axis is neither one of
            `MESH_AXIS_NAMES` nor of the current mesh.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    known = tuple(dict.fromkeys((*MESH_AXIS_NAMES, *names)))
    for name, axes in overrides.items():
        _check_known(name, DEFAULT_RULES)
        for axis in axes:
            if axis not in known:
                raise UserError(
                    f"sharding_rules[{name!r}]: unknown mesh axis {axis!r}; "
                    + did_you_mean(axis, known)
                )
    changed = dict(_overrides.value) | {name: tuple(axes) for name, axes in overrides.items()}
    outer, used = _used.get(), set[str]()
    token = _used.set(used)
    try:
        with _overrides(tuple(sorted(changed.items()))):
            yield used
    finally:
        _used.reset(token)
        if outer is not None:
            outer |= used


def check_rules_used(overrides: Collection[str], used: Collection[str]) -> None:
    """Checks that every rule shards something.

    Args:
        overrides: Logical axes of the rules.
        used: Logical axes of parameters, batches and activations, as `sharding_rules` yields them.

    Raises:
        UserError: If nothing has the logical axis of a rule.
    """
    for name in overrides:
        if name not in used:
            raise UserError(
                f"sharding_rules[{name!r}]: nothing has this logical axis; remove the rule, or "
                f"choose one of: {', '.join(sorted(used))}."
            )


def current_rules() -> Rules:
    """Returns the table with the changes of enclosing `sharding_rules` blocks."""
    return {**DEFAULT_RULES, **dict(_overrides.value)}


def check_mesh_axes(mesh_shape: Mapping[str, int], rules: Rules | None = None) -> None:
    """Checks that one of the rules, by default the current ones, has every mesh axis larger than 1.

    Raises:
        SplitError: If none has an axis, so that all its devices would compute the same.
    """
    rules = current_rules() if rules is None else rules
    used = {axis for axes in rules.values() for axis in axes}
    for axis, size in mesh_shape.items():
        if size > 1 and axis not in used:
            over_layers = any(axis in axes for axes in PIPELINE_RULES.values())
            schedule = "set pipeline_schedule, or " if over_layers else ""
            raise SplitError(
                f"mesh axis {axis}={size}: no sharding rule uses it; {schedule}set it to 1 and use "
                f"one of {', '.join(sorted(used))} instead."
            )


def _check_known(name: str, rules: Rules, array: str = "sharding_rules") -> None:
    if name not in rules:
        advice = did_you_mean(name, rules)
        raise UserError(f"{array}: no sharding rule for the logical axis {name!r}; {advice}")


def _note_used(*names: str) -> None:
    used = _used.get()
    if used is not None:
        used.update(names)


def _names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis or ()


# -- Shardings -----------------------------------------------------------------------------------


def mesh_axes(
    name: str, mesh_shape: Mapping[str, int], rules: Rules | None = None, *, array: str = "array"
) -> tuple[str, ...]:
    """Returns the mesh axes, larger than 1, that shard a logical axis of an array.

    Inside of a `shard_map`, its own axes are not among them. The rules are by default the current
    ones; `array` is the array's name, for errors.
    """
    if rules is None:
        rules = current_rules()
        _note_used(name)
    _check_known(name, rules, array)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in rules[name] if mesh_shape.get(a, 1) > 1 and a not in manual)


def partition_spec(
    axes: Sequence[str | tuple[str, ...] | None],
    mesh_shape: Mapping[str, int],
    *,
    shape: Sequence[int] | None = None,
    rules: Rules | None = None,
    array: str = "array",
) -> PartitionSpec:
    """Returns the sharding of an array with these logical axes.

    A weight whose last dimension is the width, which only storage shards, has its rows sharded
    instead if shards of the width end inside a tile: see `_of_rows`.

    Args:
        axes: A logical axis, several that shard it together, or None, for each dimension.
        mesh_shape: Sizes of the mesh axes.
        shape: Shape of the array, which the sharding must divide; None if unknown.
        rules: The table; by default the current one.
        array: Name of the array, for errors.

    Raises:
        SplitError: If a mesh axis would shard two dimensions, or does not divide one.
    """
    splits: list[tuple[str, ...]] = []
    used: dict[str, Any] = {}
    for i, name in enumerate(axes):
        split = tuple(a for n in _names(name) for a in mesh_axes(n, mesh_shape, rules, array=array))
        for axis in split:
            if axis in used:
                raise SplitError(
                    f"{array}: mesh axis {axis!r} would shard both {used[axis]!r} and {name!r}; "
                    "change one of their sharding rules."
                )
            used[axis] = name
        parts = math.prod(mesh_shape[axis] for axis in split)
        if shape is not None and shape[i] % parts:
            mesh = describe_mesh({axis: mesh_shape[axis] for axis in split})
            raise SplitError(
                f"{array}: dimension {name!r} of size {shape[i]} is not divisible by {parts} "
                f"({mesh}); change the size or mesh_shape."
            )
        splits.append(split)
    if shape is not None:
        splits = _of_rows(axes, splits, mesh_shape, shape, rules or current_rules())
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in splits))


def _of_rows(
    axes: Sequence[Any],
    splits: list[tuple[str, ...]],
    mesh_shape: Mapping[str, int],
    shape: Sequence[int],
    rules: Rules,
) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, those of a last dimension "embed" moved to its rows.

    TPUs hold the last dimension in tiles of 128 numbers. Where a shard of the width is no multiple
    of them, XLA stores the weight transposed, copies what it gathers, and all-reduces the gradient:
    four layers of width 2,880 over fsdp=2 lose 50 of 337 Mcycles on a v6e, and 1.1 GiB. Rows of
    lookup tables, which stay sharded, and of experts' biases are left as they are.
    """
    if len(axes) < 2 or axes[-1] not in _WIDTHS or axes[-2] in (None, "layers", "experts", "vocab"):
        return splits
    # A layer in a pipeline decides as the storage does, which the pipeline's axis shards too.
    rows, width = (math.prod(mesh_shape.get(a, 1) for a in rules[x]) for x in axes[-2:] if x)
    num_rows, rest = divmod(shape[-2], rows * width)
    if shape[-1] // width % _TILE == 0 or rest or num_rows < _TILE_ROWS:
        return splits
    return [*splits[:-2], (*splits[-2], *splits[-1]), ()]


def mesh_axes_of(split: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard each dimension."""
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in split]


def keep_axes(split: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns the sharding of an array after a gather over all mesh axes but these."""
    return PartitionSpec(
        *(tuple(a for a in each if a in axes) or None for each in mesh_axes_of(split))
    )


def partition_specs(specs: Any, mesh_shape: Mapping[str, int], *, prefix: str = "") -> Any:
    """Returns a tree of PartitionSpecs, one for each ParameterSpec of a tree.

    Raises:
        UserError: The errors of `partition_spec`, with `prefix` and the parameter's path.
    """

    def split(path: Any, spec: ParameterSpec) -> PartitionSpec:
        array = prefix + tree.path_string(path)
        return partition_spec(spec.axes, mesh_shape, shape=spec.shape, array=array)

    return jax.tree_util.tree_map_with_path(split, specs, is_leaf=is_spec)


def named_shardings(specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns a tree of NamedShardings, one for each ParameterSpec; raises as `partition_specs`."""
    splits = partition_specs(specs, dict(mesh.shape))
    return jax.tree.map(lambda split: NamedSharding(mesh, split), splits)


# -- The current mesh ----------------------------------------------------------------------------


def abstract_state(specs: Any, shardings: Any) -> Any:
    """Returns a `jax.ShapeDtypeStruct` with its sharding for each spec."""

    def struct(spec: ParameterSpec, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

    return jax.tree.map(struct, specs, shardings, is_leaf=is_spec)


def abstract_arrays(specs: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Returns a `jax.ShapeDtypeStruct` for each spec, with its sharding if there is a mesh."""
    if mesh is None:
        return abstract_parameters(specs)
    return abstract_state(specs, named_shardings(specs, mesh))


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh that `jax.set_mesh` set, or None without one or inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or not mesh.auto_axes else mesh


def constrain(x: jax.Array, axes: Sequence[str | tuple[str, ...] | None]) -> jax.Array:
    """Constrains the sharding of an activation; returns `x` itself without a mesh."""
    _note_used(*(name for each in axes for name in _names(each)))
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return x
    spec = partition_spec(axes, dict(mesh.shape), shape=x.shape, array=f"activation {axes}")
    return jax.lax.with_sharding_constraint(x, spec)


def num_parts(name: str) -> int:
    """Returns the number of parts into which the current mesh splits a logical axis."""
    mesh = current_mesh()
    sizes = {} if mesh is None else dict(mesh.shape)
    return math.prod(sizes[axis] for axis in mesh_axes(name, sizes))


def padded_batch(num_sequences: int, seq_len: int) -> tuple[int, int]:
    """Returns the smallest batch size and sequence length that the current mesh divides."""
    batch, ring = num_parts("batch"), num_parts("sequence")
    pieces = 2 * ring if ring > 1 else 1  # Ring attention gives each device two pieces.
    tokens = math.lcm(pieces, num_parts("residual_sequence"))
    return -(-num_sequences // batch) * batch, -(-seq_len // tokens) * tokens
