"""The one table from logical axes to mesh axes, and the places of arrays that follow from it.

Layers name the dimensions of their parameters and activations ("embed", "ffn", "batch"); only
this file knows the mesh. Without a mesh everything here does nothing.
"""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, is_spec
from moelib.parallel.mesh import MESH_AXIS_NAMES

Rules = Mapping[str, tuple[str, ...]]

# Weights are split along the model width over fsdp, and over expert too but for those of experts;
# and over model along what tensor parallelism splits. Activations are split over the batch axes,
# and between layers over model along the sequence (Korthikanti et al., arXiv:2205.05198). Experts
# have axes of their own, so that they can be split over others: {"experts": ("expert", "model"),
# "expert_ffn": ()}. An axis that the mesh lacks or that has size 1 is no split. A logical axis with
# an empty tuple is never split.
DEFAULT_RULES: Rules = {
    # Parameters.
    "vocab": ("model",),
    "embed": ("expert", "fsdp"),  # In the batch's order: embeddings go to their rows at once.
    "ffn": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "head_dim": (),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
    "expert_ffn": ("model",),
    "layers": (),
    "norm": (),
    # Activations.
    "batch": ("data", "expert", "fsdp"),
    "sequence": ("seq",),
    "residual_sequence": ("seq", "model"),  # Between layers: norms and sums are split too.
    "activation_embed": (),
    "activation_ffn": ("model",),
    "activation_heads": ("model",),
}

# The lines changed: (logical axis, mesh axes), sorted. Part of what JAX keys its traces on.
_overrides = jax.make_user_context(())
_asked: ContextVar[set[str] | None] = ContextVar("moelib_logical_axes_asked", default=None)


class SplitError(UserError):
    """Something that a mesh cannot split; the message says what, and what to set instead."""


@contextlib.contextmanager
def sharding_rules(overrides: Mapping[str, Sequence[str]]) -> Iterator[set[str]]:
    """Changes some lines of the table inside the block; functions under jit are traced anew for it.

    Yields:
        The logical axes asked for inside the block; it grows.

    Raises:
        ValueError: If a logical axis is not in the table, or a mesh axis is none of
            `MESH_AXIS_NAMES` or of the mesh that is set.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    known = tuple(dict.fromkeys((*MESH_AXIS_NAMES, *names)))
    for name, axes in overrides.items():
        _check_known(name, DEFAULT_RULES)
        for axis in axes:
            if axis not in known:
                raise ValueError(
                    f"sharding rule for {name!r}: there is no mesh axis {axis!r}; "
                    + did_you_mean(axis, known)
                )
    changed = dict(_overrides.value) | {name: tuple(axes) for name, axes in overrides.items()}
    outer, asked = _asked.get(), set[str]()
    token = _asked.set(asked)
    try:
        with _overrides(tuple(sorted(changed.items()))):
            yield asked
    finally:
        _asked.reset(token)
        if outer is not None:
            outer |= asked


def check_rules_asked(overrides: Collection[str], asked: Collection[str]) -> None:
    """Checks that rules had something to split.

    Args:
        overrides: The logical axes of the rules.
        asked: Those that parameters, batches and activations have, as `sharding_rules` yields them.

    Raises:
        ValueError: If a rule is about an axis that nothing has.
    """
    for name in overrides:
        if name not in asked:
            raise ValueError(
                f"sharding_rules: nothing has the logical axis {name!r}, so it splits nothing; "
                f"leave it out, or choose one of: {', '.join(sorted(asked))}."
            )


def current_rules() -> Rules:
    """Returns the table in force."""
    return {**DEFAULT_RULES, **dict(_overrides.value)}


def check_mesh_axes(mesh_shape: Mapping[str, int], rules: Rules | None = None) -> None:
    """Checks that something is split over every mesh axis larger than 1.

    Args:
        mesh_shape: Sizes of the mesh axes.
        rules: The table; by default the one in force.

    Raises:
        SplitError: If no rule names an axis, whose devices would all compute the same.
    """
    rules = current_rules() if rules is None else rules
    used = {axis for axes in rules.values() for axis in axes}
    for axis, size in mesh_shape.items():
        if size > 1 and axis not in used:
            why = (
                "nothing is split over it yet; set it to 1, and one of "
                f"{', '.join(sorted(used))} in its place."
                if axis in MESH_AXIS_NAMES
                else f"no sharding rule names it; {did_you_mean(axis, used)}"
            )
            raise SplitError(
                f"The mesh axis {axis!r} has size {size}, but all its devices would compute the "
                f"same: {why}"
            )


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """Returns the mesh that `jax.set_mesh` set, or None without one or inside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes else mesh


def _check_known(name: str, rules: Rules) -> None:
    if name not in rules:
        raise ValueError(
            f"no sharding rule for the logical axis {name!r}; {did_you_mean(name, rules)}"
        )


def _note_asked(*names: str | None) -> None:
    asked = _asked.get()
    if asked is not None:
        asked.update(name for name in names if name is not None)


def mesh_axes(
    name: str, mesh_shape: Mapping[str, int], rules: Rules | None = None
) -> tuple[str, ...]:
    """Returns the mesh axes, larger than 1, over which a logical axis is split."""
    if rules is None:
        rules = current_rules()
        _note_asked(name)
    _check_known(name, rules)
    return tuple(axis for axis in rules[name] if mesh_shape.get(axis, 1) > 1)


def partition_spec(
    axes: Sequence[str | None],
    mesh_shape: Mapping[str, int],
    *,
    shape: Sequence[int] | None = None,
    rules: Rules | None = None,
    place: str = "an array",
) -> PartitionSpec:
    """Returns how an array with these logical axes is split over a mesh.

    Args:
        axes: A logical axis, or None, for each dimension.
        mesh_shape: Sizes of the mesh axes.
        shape: Sizes of the dimensions; if given, each must divide.
        rules: The table; by default the one in force.
        place: What the array is, for errors.

    Raises:
        SplitError: If a mesh axis would be used twice, or a dimension does not divide.
    """
    names = [() if name is None else mesh_axes(name, mesh_shape, rules) for name in axes]
    return split_over(names, mesh_shape, shape, place, axes)


def split_over(
    axes: Sequence[tuple[str, ...]],
    mesh_shape: Mapping[str, int],
    shape: Sequence[int] | None,
    place: str,
    names: Sequence[str | None] | None = None,
) -> PartitionSpec:
    """Returns the spec of an array whose dimensions are split over these mesh axes.

    Args:
        axes: The mesh axes of each dimension; none for one that is not split.
        mesh_shape: Sizes of the mesh axes.
        shape: Sizes of the dimensions; if given, each must divide.
        place: What the array is, for errors.
        names: Logical axes of the dimensions, for errors; by default their numbers.

    Raises:
        SplitError: If a mesh axis would be used twice, or a dimension does not divide.
    """
    entries: list[Any] = []
    used: dict[str, Any] = {}
    for i, split in enumerate(axes):
        name = i if names is None else names[i]
        for axis in split:
            if axis in used:
                raise SplitError(
                    f"{place}: the mesh axis {axis!r} would split both {used[axis]!r} and "
                    f"{name!r}; change one of their sharding rules."
                )
            used[axis] = name
        parts = math.prod(mesh_shape[axis] for axis in split)
        if shape is not None and shape[i] % parts:
            raise SplitError(
                f"{place}: its dimension {name!r} of {shape[i]} does not divide into {parts} parts "
                f"(mesh axes {', '.join(split)}); change the size or the mesh."
            )
        entries.append(split[0] if len(split) == 1 else split or None)
    return PartitionSpec(*entries)


def keep_axes(split: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Returns how an array is split once it is gathered over all mesh axes but these."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in split]
    return PartitionSpec(*(tuple(a for a in entry if a in axes) or None for entry in entries))


def partition_specs(
    specs: Any, mesh_shape: Mapping[str, int], rules: Rules | None = None, *, place: str = ""
) -> Any:
    """Returns a tree of PartitionSpecs, one for each ParameterSpec of a tree.

    Raises:
        ValueError: As `partition_spec`, with the parameter's path, and `place` before it.
    """

    def split(path: Any, spec: ParameterSpec) -> PartitionSpec:
        name = place + tree.path_string(path)
        return partition_spec(spec.axes, mesh_shape, shape=spec.shape, rules=rules, place=name)

    return jax.tree_util.tree_map_with_path(split, specs, is_leaf=is_spec)


def named_shardings(specs: Any, mesh: jax.sharding.Mesh, rules: Rules | None = None) -> Any:
    """Returns a tree of NamedShardings, one for each ParameterSpec of a tree.

    Raises:
        ValueError: As `partition_spec`, with the parameter's path.
    """
    splits = partition_specs(specs, dict(mesh.shape), rules)
    return jax.tree.map(lambda split: NamedSharding(mesh, split), splits)


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


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Tells the compiler how an activation is split. Does nothing without a mesh."""
    _note_asked(*axes)
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return x
    spec = partition_spec(axes, dict(mesh.shape), shape=x.shape, place=f"an activation {axes}")
    return jax.lax.with_sharding_constraint(x, spec)
