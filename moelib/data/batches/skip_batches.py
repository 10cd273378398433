"""Ranges of batches that training skips.

Batch n of the data, counted from 0, is at position n; a range is [first, stop).
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moelib.core.errors import UserError
from moelib.data.batches.input import BatchIterator, State

if TYPE_CHECKING:
    from moelib.core.tree import Batch

SKIPPED = "skipped"  # Key of the ranges in the state of an iterator.


def parse_range(text: str) -> list[int]:
    """Returns [first, stop] of "first:stop". Raises UserError if it is no such range."""
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(
            f"skip_batches has {text!r}; set positions first:stop with first < stop, such as "
            "100:120 for the batches 100 to 119, counted from 0."
        )
    return [int(found[1]), int(found[2])]


def merged(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns the union of ranges as disjoint [first, stop], in ascending order."""
    union: list[list[int]] = []
    for first, stop in sorted(map(list, ranges)):
        if union and first <= union[-1][1]:
            union[-1][1] = max(union[-1][1], stop)
        else:
            union.append([first, stop])
    return union


def position_of(step: int, ranges: Iterable[Sequence[int]]) -> int:
    """Returns the position of the batch of a training step, from 1, of a run that skips ranges."""
    position = step - 1
    for first, stop in merged(ranges):
        if first <= position:
            position += stop - first
    return position


def check_ranges(ranges: Iterable[Sequence[int]], state: State) -> None:
    """Raises UserError if a batch of the ranges was trained on before a saved position."""
    position = state.get("step", 0)
    for first, stop in ranges:
        before = min(stop, position)
        was_skipped = any(a <= first and before <= b for a, b in state.get(SKIPPED, ()))
        if first < position and not was_skipped:
            raise UserError(
                f"skip_batches={first}:{stop}: batches of it have been trained on, as the run is "
                f"at position {position}; set rewind_to to a step before them, or remove the "
                "range."
            )


class SkippingBatches(BatchIterator):
    """The batches of another iterator, without those in some ranges.

    The state is that of the other iterator, and the ranges: a resumed run knows what it skipped.
    """

    can_seek = True

    def __init__(self, batches: BatchIterator, ranges: Iterable[Sequence[int]]) -> None:
        """Raises UserError if the other iterator cannot go to a batch by its position."""
        self._batches, self._ranges = batches, merged(ranges)
        if not batches.can_seek:
            first, stop = self._ranges[0]
            raise UserError(
                f"skip_batches={first}:{stop}: {type(batches).__name__} cannot go to a batch by "
                "its position, as streams and inputs that read parameters; prepare a token store, "
                "or remove the range."
            )

    def __next__(self) -> "Batch":
        """Returns this host's rows of the next batch that is not skipped."""
        position = self._batches.state()["step"]
        for first, stop in self._ranges:
            if first <= position < stop:
                self._batches.seek(stop)
        return next(self._batches)

    def seek(self, position: int) -> None:
        """Goes to a batch."""
        self._batches.seek(position)

    def state(self) -> State:
        """Returns the position after the batches returned so far, and the ranges."""
        return {**self._batches.state(), SKIPPED: self._ranges}

    def follow(self, state: State) -> None:
        """Goes to the first batch after those of another input; raises as `restore`."""
        self._batches.follow(state)
        check_ranges(self._ranges, state)

    def restore(self, state: State) -> None:
        """Goes to a saved position. Raises UserError if a batch to skip was trained on before."""
        self._batches.restore(state)
        check_ranges(self._ranges, state)
