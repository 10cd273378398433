"""A schedule as a program: what all ranks compute in each tick, and what they send after it.

A slot runs in the first tick after those of its inputs. Its results are sent at once, or in the
last tick before they are used, so that no rank waits for a receiver without need.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moelib.parallel.pipeline.schedule import Pass, Schedule, Slot, slots
from moelib.parallel.pipeline.timeline import Key, inputs_of, key_of


class Transfer(NamedTuple):
    """An activation or a gradient that a rank sends to another, or hands over to itself."""

    forward: bool  # Whether it is an activation.
    source: int  # Rank.
    target: int  # Rank.
    chunk: int  # Of the target.
    microbatch: int
    made: int  # Tick in which it is computed.


class Ticks(NamedTuple):
    """The program of all ranks, and the sizes of their buffers.

    The activation of micro-batch m that enters a chunk is kept at the index m % num_inputs.
    """

    slots: tuple[tuple[Slot, ...], ...]  # [tick][rank]; () where a rank is idle.
    transfers: tuple[tuple[Transfer, ...], ...]  # After each tick.
    num_inputs: int  # Activations per chunk, from their arrival to the gradient of inputs.
    num_gradients: int  # Gradients per chunk, from their arrival to the gradient of inputs.
    num_deferred: int  # Deferred weight gradients per chunk; 0 if the schedule has none.


@functools.cache
def ticks_of(
    schedule: Schedule, num_ranks: int, num_microbatches: int, *, eager: bool = False
) -> Ticks:
    """Returns the program of a schedule.

    Args:
        schedule: Order of the passes.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of micro-batches.
        eager: Whether results are sent in the tick in which they are computed.

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
    while any(todo):
        now = len(rows)
        is_ready = lambda rank, slot, now=now: all(
            ended.get(key, now) < now
            for task in slot
            for key in inputs_of(schedule, num_ranks, stage(rank, task.chunk), task)
        )
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
    arrival = dict[Key, int]()  # Ticks after which inputs and gradients of a stage are there.
    for (forward, of, m), made in ended.items():
        user = forward, of + (1 if forward else -1), m
        if user[1] in place:
            (source, _), (target, chunk) = place[of], place[user[1]]
            at = made if eager or source == target else ended[user] - 1
            sent[at].append(Transfer(forward, source, target, chunk, m, made))
            arrival[user] = at
    keys = [key for key in ended if not key[0]]
    at_forward = lambda key: ended[True, key[1], key[2]]
    ring = functools.partial(_ring_size, keys)
    return Ticks(
        slots=tuple(map(tuple, rows)),
        transfers=tuple(map(tuple, sent)),
        num_inputs=ring(
            lambda key: arrival.get((True, *key[1:]), at_forward(key)), ended.__getitem__
        ),
        num_gradients=ring(lambda key: arrival.get(key, at_forward(key)), ended.__getitem__),
        num_deferred=_ring_size(
            [key for key in keys if key[1:] in weights],
            ended.__getitem__,
            lambda key: weights[key[1:]],
        ),
    )


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
