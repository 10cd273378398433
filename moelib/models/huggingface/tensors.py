"""Moves weights between tensors of a Hugging Face checkpoint and our parameters, one at a time.

No more than one tensor is held beside the parameters themselves: each is written straight into the
devices' parts of our arrays, whatever the mesh.
"""

import functools
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.context import Nested
from moelib.models.huggingface.places import (
    Place,
    our_shape,
    slices,
    their_shape,
    to_ours,
    to_theirs,
)

logger = logging.getLogger(__name__)

_MAX_NAMED = 10


class TensorMismatchError(ValueError):
    """The tensors of a checkpoint are not those of the model."""


@runtime_checkable
class Source(Protocol):
    """Tensors by name, read when they are asked for."""

    def keys(self) -> Collection[str]:
        """Returns the names of all."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of one."""
        ...

    def read(self, key: str) -> np.ndarray:
        """Returns one."""
        ...


def load_parameters(
    source: Source, places: Sequence[Place], targets: Nested, *, ignored: Sequence[str] = ()
) -> Nested:
    """Returns our parameters, read from tensors of theirs.

    Parameters that no tensor holds (counters) are 0.

    Args:
        source: The tensors.
        places: Where each stands, as `expand` gives them.
        targets: A `jax.ShapeDtypeStruct` for each parameter; without a sharding it goes to the
            first device. Values are rounded to its dtype.
        ignored: Regular expressions of names that may be there and are left out.

    Raises:
        TensorMismatchError: If tensors are missing, unknown, or of another shape.
    """
    by_path: dict[str, list[Place]] = {}
    for place in places:
        by_path.setdefault(place.path, []).append(place)
    targets_by_path = dict(tree.flatten_items(targets))
    shapes = {path: target.shape for path, target in targets_by_path.items()}
    _check(source, places, shapes, ignored)
    arrays = {}
    for path, target in targets_by_path.items():
        filling = _Filling(target)
        for place in by_path.get(path, ()):
            theirs = source.read(place.key)
            if place.part.rows is not None:
                theirs = theirs[slice(*place.part.rows)]
            filling.write(slices(place.at, target.shape), to_ours(theirs, place, target.shape))
        arrays[path] = filling.array()
    leaves, structure = jax.tree_util.tree_flatten_with_path(targets)
    return jax.tree.unflatten(structure, [arrays[tree.path_string(path)] for path, _ in leaves])


def their_tensors(params: Nested, places: Sequence[Place]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the values of each tensor of theirs, in the order of the places.

    Raises:
        ValueError: If parameters lie on devices of other processes.
    """
    by_path = dict(tree.flatten_items(params))
    by_key: dict[str, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    for key, parts in by_key.items():
        parts = sorted(parts, key=lambda place: place.part.rows or (0, 0))
        pieces = [to_theirs(_read(by_path[p.path], p), p) for p in parts]
        yield key, np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


def _check(
    source: Source, places: Sequence[Place], shapes: dict[str, Any], ignored: Sequence[str]
) -> None:
    """Raises TensorMismatchError unless the tensors are those of the places."""
    there = set(source.keys())
    wanted = {place.key: place for place in places}
    missing = sorted(wanted.keys() - there)
    others = sorted(there - wanted.keys())
    unknown = [key for key in others if not any(re.fullmatch(pattern, key) for pattern in ignored)]
    if num_ignored := len(others) - len(unknown):
        logger.warning("%d tensors that the model has no use for are left out.", num_ignored)
    misshapen = []
    for key, place in wanted.items():
        if key in there:
            shape, found = their_shape(place, shapes[place.path]), source.shape(key)
            if place.part.rows is not None:  # It holds other parts, too.
                rows = max(p.part.rows[1] for p in places if p.key == key and p.part.rows)
                shape = (rows, *shape[1:])
            if found != shape:
                misshapen.append(f"{key} {list(found)}, not {list(shape)}")
    said = [
        f"{what} {len(names)}: {', '.join(names[:_MAX_NAMED])}"
        + (", ..." if len(names) > _MAX_NAMED else "")
        for what, names in (
            ("Missing:", missing),
            ("Unknown:", unknown),
            ("Of another shape:", misshapen),
        )
        if names
    ]
    if said:
        raise TensorMismatchError("The tensors are not those of the model.\n" + "\n".join(said))


class _Filling:
    """An array over devices, written part by part."""

    def __init__(self, target: jax.ShapeDtypeStruct) -> None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        self.shape, self.sharding = target.shape, target.sharding or one
        indices = self.sharding.addressable_devices_indices_map(target.shape)
        self.bounds = {
            device: [s.indices(n)[:2] for s, n in zip(index or (), target.shape, strict=True)]
            for device, index in indices.items()
        }
        self.parts = {
            device: jnp.zeros([b - a for a, b in bounds], target.dtype, device=device)
            for device, bounds in self.bounds.items()
        }

    def write(self, at: Sequence[slice], values: np.ndarray) -> None:
        """Writes values, of any shape of the right size, to a part of the array."""
        values = values.reshape([s.stop - s.start for s in at])
        for device, bounds in self.bounds.items():
            both = [(max(s.start, a), min(s.stop, b)) for s, (a, b) in zip(at, bounds, strict=True)]
            if any(first >= last for first, last in both):
                continue
            cut = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, at, strict=True))
            part = self.parts[device]
            piece = jax.device_put(values[cut].astype(part.dtype, copy=False), device)
            starts = [a - b for (a, _), (b, _) in zip(both, bounds, strict=True)]
            # Waits, so that no more than one tensor is on its way.
            with _alone(device):
                self.parts[device] = jax.block_until_ready(_update(part, piece, starts))

    def array(self) -> jax.Array:
        """Returns the array."""
        parts = list(self.parts.values())
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def _alone(device: jax.Device) -> Any:
    """Returns a context in which a device computes by itself, whatever mesh is set around it."""
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("one",)))


@functools.partial(jax.jit, donate_argnums=0)
def _update(part: jax.Array, piece: jax.Array, starts: list[Any]) -> jax.Array:
    return jax.lax.dynamic_update_slice(part, piece, starts)


@functools.partial(jax.jit, static_argnums=2)
def _piece(part: jax.Array, starts: list[Any], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(part, starts, sizes)


def _read(array: jax.Array, place: Place) -> np.ndarray:
    """Returns the part of an array that a place is."""
    if not array.is_fully_addressable:
        raise ValueError(f"{place.path} lies on devices of other processes; export from one.")
    at = slices(place.at, array.shape)
    out = np.empty([s.stop - s.start for s in at], array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        bounds = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
        both = [(max(s.start, a), min(s.stop, b)) for s, (a, b) in zip(at, bounds, strict=True)]
        if any(first >= last for first, last in both):
            continue
        starts = [a - b for (a, _), (b, _) in zip(both, bounds, strict=True)]
        there = tuple(slice(a - s.start, b - s.start) for (a, b), s in zip(both, at, strict=True))
        with _alone(shard.device):
            out[there] = _piece(shard.data, starts, tuple(b - a for a, b in both))
    return out.reshape(our_shape(place, array.shape))
