"""Entries of buffers, which loops read and write in place."""

import dataclasses
from typing import Any

import jax
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """An array inside of a buffer: `array[at]`."""

    array: jax.Array
    at: tuple[Any, ...]  # Indices of the leading dimensions.
    # Whether a write adds to the values that are there.
    adds: bool = dataclasses.field(default=False, metadata={"static": True})

    def inside(self, index: Any, array: jax.Array | None = None) -> "Entry":
        """Returns the entry of one more index, of a later state of the buffer if it is given."""
        array = self.array if array is None else array
        return Entry(array, (*self.at, index), self.adds)

    def read(self) -> jax.Array:
        """Returns the array of this entry."""
        sizes = *(1 for _ in self.at), *self.array.shape[len(self.at) :]
        return lax.squeeze(lax.dynamic_slice(self.array, self._start, sizes), range(len(self.at)))

    def write(self, x: jax.Array) -> jax.Array:
        """Returns the buffer after a write; a sum is computed in the dtype of the buffer."""
        if self.adds:
            x = self.read() + x.astype(self.array.dtype)
        # `array.at[at].set(x)` would also check the indices.
        x = lax.expand_dims(x, range(len(self.at)))
        return lax.dynamic_update_slice(self.array, x, self._start)

    @property
    def _start(self) -> list[Any]:
        return [*self.at, *(0 for _ in self.array.shape[len(self.at) :])]


def is_entry(x: Any) -> bool:
    """Returns whether `x` is an `Entry`."""
    return isinstance(x, Entry)


def entries(tree: Any, *at: Any, adds: bool = False) -> Any:
    """Returns a tree of the entries of arrays at these indices."""
    return jax.tree.map(lambda a: Entry(a, at, adds), tree)


def read(tree: Any) -> Any:
    """Returns a tree of arrays, also in place of entries."""
    return jax.tree.map(lambda x: x.read() if is_entry(x) else x, tree, is_leaf=is_entry)


def write(tree: Any, values: Any) -> Any:
    """Returns the buffers of a tree of entries after a write of each."""
    return jax.tree.map(lambda entry, x: entry.write(x), tree, values, is_leaf=is_entry)
