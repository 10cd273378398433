"""Comparison of two trees of arrays."""

import dataclasses
from typing import Any

import numpy as np

from moelib.core import tree


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference in the first leaf of a tree that differs."""

    leaf: str  # Path of the array, or name of the number.
    index: tuple[int, ...]  # Entry that differs most; () for a number.
    expected: float
    found: float
    error: float
    allowed: float
    entries: tuple[int, int] = (1, 1)  # (entries that differ by more than allowed, all entries)

    def __str__(self) -> str:
        """Returns the leaf, both values and their difference."""
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        differ, total = self.entries
        share = f"; {differ:,} of {total:,} entries differ" if total > 1 else ""
        return (
            f"{self.leaf}{at} is {self.found:.9g}, expected {self.expected:.9g}: error "
            f"{self.error:.3g}, allowed {self.allowed:.3g}{share}"
        )


def first_difference(
    expected: Any, found: Any, *, relative: float, floor: float = 0.0
) -> Difference | None:
    """Returns the first leaf that differs, or None; in the order of the paths, or of a flat dict.

    A leaf may differ by `relative` times its largest expected magnitude, plus `floor`. A value that
    is finite on one side only always differs. Raises ValueError if leaves have other paths.
    """
    want, got = _leaves(expected), _leaves(found)
    if unlike := sorted(want.keys() ^ got.keys()):
        raise ValueError(f"{', '.join(unlike)}: on one side only.")
    differences = (_difference(path, x, got[path], relative, floor) for path, x in want.items())
    return next((each for each in differences if each is not None), None)


def _leaves(values: Any) -> dict[str, Any]:
    """Returns the leaves by path; those of a flat dict in its own order."""
    if isinstance(values, dict) and not any(isinstance(x, dict) for x in values.values()):
        return values
    return dict(tree.flatten_items(values))


def _difference(
    path: str, expected: Any, found: Any, relative: float, floor: float
) -> Difference | None:
    a, b = np.asarray(expected), np.asarray(found)
    if a.shape != b.shape:
        raise ValueError(f"{path}: shape {b.shape}, expected {a.shape}.")
    if not a.size:
        return None
    wide = np.float64 if a.dtype.kind in "fV" else np.int64  # V: bfloat16 and similar dtypes.
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
    """Returns the first leaf that differs in any bit, or None.

    Raises:
        ValueError: If the trees differ in their leaves, shapes or dtypes, or equal values in bits.
    """
    if (difference := first_difference(expected, found, relative=0.0)) is not None:
        return difference
    found_leaves = dict(tree.flatten_items(found))
    for path, value in tree.flatten_items(expected):
        a, b = np.asarray(value), np.asarray(found_leaves[path])
        if a.dtype != b.dtype:
            raise ValueError(f"{path}: dtype {b.dtype}, expected {a.dtype}.")
        if a.tobytes() != b.tobytes():  # Signs of zeros, or kinds of NaN.
            raise ValueError(f"{path}: equal values differ in their bits.")
    return None
