"""A schedule as a program: what all ranks compute in each tick, and what they send after it.

A slot runs in the first tick after those of its inputs, and its results are sent after it.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moelib.parallel.pipeline.schedule import Key, Pass, Schedule, Slot, inputs_of, key_of, slots


class Transfer(NamedTuple):
    """An activation or a gradient that a rank sends to another, or hands over to itself."""

    forward: bool  # Whether it is an activation.
    source: int  # Rank.
    target: int  # Rank.
    chunk: int  # The target's chunk.
    microbatch: int

    def channel(self, num_ranks: int) -> tuple[bool, int]:
        """Returns (whether it is an activation, number of ranks from the source to the target)."""
        return self.forward, (self.target - self.source) % num_ranks


class Ticks(NamedTuple):
    """The program of all ranks, and the sizes of their buffers.

    The activation of micro-batch m that enters a chunk is kept at the index m % num_inputs. Saved
    values of all chunks share a buffer, and so do deferred ones.
    """

    slots: tuple[tuple[Slot, ...], ...]  # By tick, then by rank; () where a rank is idle.
    transfers: tuple[tuple[Transfer, ...], ...]  # After each tick.
    num_inputs: int  # Activations per chunk, from their arrival to the forward pass.
    num_gradients: int  # Gradients per chunk, from their arrival to the gradient of inputs.
    saved: "Indices"  # Indices of values kept from the forward pass to the gradient of inputs.
    deferred: "Indices"  # Indices of values kept until the weight gradient.

    @property
    def num_saved(self) -> int:
        """Saved values per rank."""
        return max(self.saved.values()) + 1

    @property
    def num_deferred(self) -> int:
        """Deferred weight gradients per rank; 0 if the schedule has none."""
        return max(self.deferred.values(), default=-1) + 1


Indices = dict[tuple[int, int, int], int]  # {(rank, chunk, micro-batch): index in a buffer}.


@functools.cache
def ticks_of(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Ticks:
    """Returns the program of a schedule.

    Args:
        schedule: Order of the passes.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of micro-batches.

    Raises:
        UserError: If the schedule needs more micro-batches.
    """
    ranks = range(num_ranks)
    todo = [list(slots(schedule, num_ranks, rank, num_microbatches)) for rank in ranks]
    stage = functools.partial(schedule.stage, num_ranks)
    place = {stage(r, c): (r, c) for r in ranks for c in range(schedule.num_chunks)}
    ended: dict[Key, int] = {}
    weights: dict[tuple[int, int], int] = {}  # Ticks of weight gradients of (stage, micro-batch).
    rows: list[list[Slot]] = []

    def is_ready(rank: int, slot: Slot) -> bool:
        """Returns whether all inputs of a slot are there in the next tick."""
        inputs = (inputs_of(schedule, num_ranks, stage(rank, t.chunk), t) for t in slot)
        return all(ended.get(key, len(rows)) < len(rows) for key in itertools.chain(*inputs))

    while any(todo):
        now = len(rows)
        row = [w.pop(0) if w and is_ready(r, w[0]) else () for r, w in enumerate(todo)]
        for rank, task in [(rank, task) for rank, slot in enumerate(row) for task in slot]:
            of = stage(rank, task.chunk)
            if task.kind is Pass.WEIGHT_GRADIENT:
                weights[of, task.microbatch] = now
            else:
                ended[key_of(of, task)] = now
        assert any(row), "deadlock"
        rows.append(row)
    sent: list[list[Transfer]] = [[] for _ in rows]
    arrival = dict[Key, int]()  # First ticks in which inputs and gradients of a stage are there.
    for (forward, of, m), end in ended.items():
        user = forward, of + (1 if forward else -1), m
        if user[1] in place:
            (source, _), (target, chunk) = place[of], place[user[1]]
            sent[end].append(Transfer(forward, source, target, chunk, m))
            arrival[user] = end + 1
    keys = [key for key in ended if not key[0]]

    def at_forward(key: Key) -> int:
        """Returns the tick of the forward pass of a backward pass."""
        return ended[True, key[1], key[2]]

    ring = functools.partial(_ring_size, keys)
    return Ticks(
        slots=tuple(map(tuple, rows)),
        transfers=tuple(map(tuple, sent)),
        num_inputs=ring(lambda key: arrival.get((True, *key[1:]), at_forward(key)), at_forward),
        num_gradients=ring(lambda key: arrival.get(key, at_forward(key)), ended.__getitem__),
        saved=_indices(
            {(*place[of], m): (ended[True, of, m], ended[False, of, m]) for _, of, m in keys}
        ),
        deferred=_indices(
            {(*place[of], m): (ended[False, of, m], end) for (of, m), end in weights.items()}
        ),
    )


def kept_over_1f1b(
    schedule: Schedule, num_ranks: int, num_microbatches: int, deferred: float
) -> float:
    """Returns what a rank keeps from one pass for another, over what it keeps with 1F1B.

    Args:
        schedule: Order of the passes.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of micro-batches.
        deferred: Bytes of a deferred weight gradient, over those kept for a backward pass.
    """
    own, other = (
        ticks_of(each, num_ranks, num_microbatches) for each in (schedule, Schedule.ONE_F_ONE_B)
    )
    kept = own.num_saved + own.num_deferred * deferred
    return kept / (schedule.num_chunks * other.num_saved)


def _indices(lives: dict[tuple[int, int, int], tuple[int, int]]) -> Indices:
    """Returns indices such that no two lives of a rank have the same one in any tick."""
    indices, until = Indices(), dict[tuple[int, int], int]()
    for key, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
        rank = key[0]
        free = (i for i in itertools.count() if until.get((rank, i), -1) < begin)
        indices[key] = next(free)
        until[rank, indices[key]] = end
    return indices


def _ring_size(keys: Iterable[Key], begin: Callable[[Key], int], end: Callable[[Key], int]) -> int:
    """Returns the least n for which no micro-batch m + n begins before m has ended at a stage."""
    lives = {key: (begin(key), end(key)) for key in keys}
    size = 1 if lives else 0
    while any(
        (later := lives.get((forward, of, m + size))) is not None and later[0] <= ends
        for (forward, of, m), (_, ends) in lives.items()
    ):
        size += 1
    return size
