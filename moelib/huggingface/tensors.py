"""Transfer of weights between Hugging Face tensors and parameters, one tensor at a time.

At most one tensor is held next to the parameters: each is written directly into the local shards
of the arrays, on any mesh.
"""

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.tree import Nested
from moelib.huggingface.tensor_mapping import (
    TensorMapping,
    join_rows,
    part_shape,
    slices,
    take_rows,
    tensor_shape,
    to_parameter,
    to_tensor,
)

_MAX_NAMED = 10  # Tensors of each kind listed in an error.


class TensorMismatchError(UserError):
    """The tensors of a checkpoint are not those of the model."""


@runtime_checkable
class Source(Protocol):
    """Tensors by name, read on request."""

    def keys(self) -> Collection[str]:
        """Returns the names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        ...

    def read(self, key: str) -> np.ndarray:
        """Returns a tensor."""
        ...


def load_parameters(
    source: Source,
    mappings: Sequence[TensorMapping],
    targets: Nested,
    *,
    ignored: Sequence[str] = (),
) -> Nested:
    """Returns parameters read from the tensors of a checkpoint.

    Parameters that no tensor holds (counters) are 0. A process reads only tensors of which its
    devices hold a part.

    Args:
        source: Tensors of the checkpoint.
        mappings: Mapping of each tensor, from `expand`.
        targets: A `jax.ShapeDtypeStruct` for each parameter; without a sharding the parameter goes
            to the first device. Values are rounded to the dtype.
        ignored: Regular expressions of names of tensors that may be present and are not read.

    Raises:
        TensorMismatchError: If tensors are missing, unknown, or of another shape, are not floating
            as their parameter is, or have values that are not finite in the parameter's dtype.
    """
    by_path: dict[str, list[TensorMapping]] = {}
    shapes = {path: target.shape for path, target in tree.flatten_items(targets)}
    present = set(source.keys())
    mappings = [
        _as_stored(source, mapping, shapes[mapping.path]) if mapping.tensor in present else mapping
        for mapping in mappings
    ]
    for mapping in mappings:
        by_path.setdefault(mapping.path, []).append(mapping)
    _check_tensors(source, mappings, shapes, ignored)

    def load(path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        shards = _Shards(target)
        for mapping in by_path.get(path, ()):
            index = slices(mapping.index, target.shape)
            if not shards.hold(index):
                continue
            tensor = take_rows(source.read(mapping.tensor), mapping.part)
            _check_values(tensor, mapping.tensor, target.dtype)
            shards.write(index, to_parameter(tensor, mapping, target.shape))
        return shards.array()

    return tree.map_by_path(load, targets)


def checkpoint_tensors(
    params: Nested, mappings: Sequence[TensorMapping]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, values) of each tensor of the checkpoint, in the order of the mappings.

    Raises:
        UserError: If parameters are on devices of other processes.
    """
    by_path = dict(tree.flatten_items(params))
    by_tensor: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        by_tensor.setdefault(mapping.tensor, []).append(mapping)
    for name, parts in by_tensor.items():
        pieces = [(to_tensor(_read_part(by_path[m.path], m), m), m.part) for m in parts]
        yield name, np.ascontiguousarray(join_rows(pieces))


def _as_stored(source: Source, mapping: TensorMapping, shape: tuple[int, ...]) -> TensorMapping:
    """Returns the mapping with the view whose shape the tensor has."""
    part = mapping.part
    if part.other_view is None or source.shape(mapping.tensor) == tensor_shape(mapping, shape):
        return mapping
    return mapping._replace(part=part._replace(view=part.other_view))


def _check_tensors(
    source: Source,
    mappings: Sequence[TensorMapping],
    shapes: dict[str, tuple[int, ...]],
    ignored: Sequence[str],
) -> None:
    """Raises TensorMismatchError unless the source has exactly the mapped tensors."""
    wanted: dict[str, tuple[int, ...]] = {}
    for mapping in mappings:
        shape = tensor_shape(mapping, shapes[mapping.path])
        if mapping.part.rows is not None:  # The tensor spans the rows of all of its parts.
            stop = mapping.part.num_rows or mapping.part.row_groups * mapping.part.rows[1]
            stop = max(stop, *wanted.get(mapping.tensor, (0,))[:1])
            shape = (stop, *shape[1:])
        wanted[mapping.tensor] = shape
    present = set(source.keys())
    extra = sorted(present - wanted.keys())
    unknown = [name for name in extra if not any(re.fullmatch(p, name) for p in ignored)]
    wrong_shape = [
        f"{name} {list(source.shape(name))} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in present and source.shape(name) != shape
    ]
    problems = {
        "missing": sorted(wanted.keys() - present),
        "unknown": unknown,
        "wrong shape": wrong_shape,
    }
    lines = [
        f"{len(names)} {problem}: {', '.join(names[:_MAX_NAMED])}"
        + (", ..." if len(names) > _MAX_NAMED else "")
        for problem, names in problems.items()
        if names
    ]
    if lines:
        raise TensorMismatchError("The tensors do not match the model; " + "; ".join(lines))


def _check_values(tensor: np.ndarray, name: str, dtype: Any) -> None:
    """Raises TensorMismatchError unless a tensor has values of a parameter of this dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise TensorMismatchError(
            f"{name} is of dtype {tensor.dtype}, but its parameter of {dtype}; store it as floats."
        )
    if tensor.size and jnp.finfo(tensor.dtype).max > jnp.finfo(dtype).max:
        with np.errstate(over="ignore", invalid="ignore"):
            tensor = np.array([tensor.min(), tensor.max()]).astype(dtype)  # NaN if one is.
    if not np.isfinite(tensor).all():
        raise TensorMismatchError(
            f"{name} has values that are not finite in {dtype}; restore its file, or load it as "
            "another dtype."
        )


def _overlap(index: Sequence[slice], bounds: Sequence[slice]) -> list[slice] | None:
    """Returns the intersection of two regions of an array, or None if it is empty."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(index, bounds, strict=True)
    ]
    return None if any(s.start >= s.stop for s in both) else both


def _relative(region: Sequence[slice], origin: Sequence[slice]) -> tuple[slice, ...]:
    """Returns a region relative to the start of another region."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, origin, strict=True)
    )


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> list[slice]:
    """Returns the index of a shard as slices with explicit bounds."""
    return [slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True)]


class _Shards:
    """The local shards of an array that is written part by part."""

    def __init__(self, target: jax.ShapeDtypeStruct) -> None:
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        self.shape, self.sharding = target.shape, target.sharding or first_device
        indices = self.sharding.addressable_devices_indices_map(target.shape)
        self.bounds = {d: _bounds(index or (), target.shape) for d, index in indices.items()}
        self.dtype = target.dtype
        self.shards: dict[jax.Device, jax.Array] = {}  # Those that were written.

    def _zeros(self, device: jax.Device) -> jax.Array:
        shape = [bound.stop - bound.start for bound in self.bounds[device]]
        return jnp.zeros(shape, self.dtype, device=device)

    def hold(self, index: Sequence[slice]) -> bool:
        """Returns whether a local shard holds a part of a region of the array."""
        return any(_overlap(index, bounds) for bounds in self.bounds.values())

    def write(self, index: Sequence[slice], values: np.ndarray) -> None:
        """Writes values, reshaped, to a region of the array."""
        values = values.reshape([s.stop - s.start for s in index])
        for device, bounds in self.bounds.items():
            if (region := _overlap(index, bounds)) is None:
                continue
            piece = values[_relative(region, index)].astype(self.dtype, copy=False)
            # Waits, so that no more than one tensor is in flight.
            if tuple(region) == tuple(bounds):  # The whole shard: no program is compiled.
                self.shards[device] = jax.block_until_ready(
                    jax.device_put(piece, device, may_alias=False)
                )
                continue
            shard = self.shards[device] if device in self.shards else self._zeros(device)
            piece = jax.device_put(piece, device)
            starts = [s.start for s in _relative(region, bounds)]
            with _only(device):
                self.shards[device] = jax.block_until_ready(_update(shard, piece, starts))

    def array(self) -> jax.Array:
        """Returns the array."""
        written = self.shards
        shards = [written[d] if d in written else self._zeros(d) for d in self.bounds]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


def _only(device: jax.Device) -> Any:
    """Returns a context in which a device computes alone, whatever mesh is set around it."""
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("one",)))


@functools.partial(jax.jit, donate_argnums=0)
def _update(shard: jax.Array, piece: jax.Array, starts: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, starts)


@functools.partial(jax.jit, static_argnums=2)
def _slice(shard: jax.Array, starts: list[Any], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)


def _read_part(array: jax.Array, mapping: TensorMapping) -> np.ndarray:
    """Returns the mapped part of a parameter."""
    if not array.is_fully_addressable:
        raise UserError(
            f"{mapping.path} is on devices of other processes; export it from one process."
        )
    index = slices(mapping.index, array.shape)
    out = np.empty([s.stop - s.start for s in index], array.dtype)
    for shard in array.addressable_shards:
        bounds = _bounds(shard.index, array.shape)
        if shard.replica_id or (region := _overlap(index, bounds)) is None:
            continue
        starts = [s.start for s in _relative(region, bounds)]
        sizes = tuple(s.stop - s.start for s in region)
        with _only(shard.device):
            out[_relative(region, index)] = _slice(shard.data, starts, sizes)
    return out.reshape(part_shape(mapping, array.shape))
