"""Whether two trees of arrays are the same, and where they first are not."""

import dataclasses
from typing import Any

import numpy as np

from moelib.core import tree


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where something is not what it has to be.

    Attributes:
        leaf: Path of the array, or name of the number.
        index: Of the entry that differs most, () of a number.
        expected: Its value.
        found: The value in its place.
        error: By how much the two differ.
        allowed: By how much they may.
        entries: How many entries of the leaf differ by more than that, and how many it has.
    """

    leaf: str
    index: tuple[int, ...]
    expected: float
    found: float
    error: float
    allowed: float
    entries: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        """Returns the leaf, both values, and by how much they differ."""
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        differ, of = self.entries
        some = f"; {differ:,} of {of:,} entries differ" if of > 1 else ""
        return (
            f"{self.leaf}{at} is {self.found:.9g} and has to be {self.expected:.9g}: off by "
            f"{self.error:.3g}, where {self.allowed:.3g} is allowed{some}"
        )


def first_difference(
    expected: Any, found: Any, *, relative: float, floor: float = 0.0
) -> Difference | None:
    """Returns the first leaf that differs, or None.

    A leaf may differ by `relative` times its largest expected magnitude, and by `floor`. What is
    not finite on one side only always differs.

    Raises:
        ValueError: If the trees have not the same leaves.
    """
    want, got = dict(tree.flatten_items(expected)), dict(tree.flatten_items(found))
    if unlike := sorted(want.keys() ^ got.keys()):
        raise ValueError(f"{', '.join(unlike)}: on one side only.")
    for path, value in want.items():
        if (difference := _difference(path, value, got[path], relative, floor)) is not None:
            return difference
    return None


def _difference(
    path: str, expected: Any, found: Any, relative: float, floor: float
) -> Difference | None:
    a, b = np.asarray(expected), np.asarray(found)
    if a.shape != b.shape:
        raise ValueError(f"{path}: shape {b.shape} in the place of {a.shape}.")
    if not a.size:
        return None
    wide = np.float64 if a.dtype.kind in "fV" else np.int64  # V: bfloat16 and its like.
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error).astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    allowed = relative * float(finite.max(initial=0.0)) + floor
    if (worst := float(error.max())) <= allowed:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    return Difference(
        path,
        index,
        expected=float(a[index]),
        found=float(b[index]),
        error=worst,
        allowed=allowed,
        entries=(int((error > allowed).sum()), int(a.size)),
    )


def first_bit_difference(expected: Any, found: Any) -> Difference | None:
    """Returns the first leaf that is not the same bit for bit, or None.

    Raises:
        ValueError: If the trees have not the same leaves, of the same shapes and dtypes.
    """
    found_leaves = dict(tree.flatten_items(found))
    if (difference := first_difference(expected, found, relative=0.0)) is not None:
        return difference
    for path, value in tree.flatten_items(expected):
        a, b = np.asarray(value), np.asarray(found_leaves[path])
        if a.dtype != b.dtype:
            raise ValueError(f"{path}: {b.dtype} in the place of {a.dtype}.")
        if a.tobytes() != b.tobytes():  # Signs of zeros, or kinds of NaN.
            raise ValueError(f"{path}: other bits of values that are equal.")
    return None
