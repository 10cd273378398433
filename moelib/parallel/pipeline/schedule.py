"""Pipeline schedules as data: the passes of each rank, in order.

A rank holds one chunk of the model's layers, or two. With S ranks, chunk 0 of rank r is stage r. A
second chunk is stage S + r where schedules are interleaved, or stage 2S - 1 - r in a V, in which
rank 0 has the first and the last stage.

Ranks exchange results after each slot, so that a short slot waits for a long one of a neighbor. A
forward and a backward pass are therefore one slot wherever most ranks compute both.
"""

import collections
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from moelib.core.errors import UserError


class Schedule(enum.Enum):
    """The order of forward and backward passes of micro-batches in a pipeline."""

    GPIPE = "gpipe"  # All forward, then all backward. Huang et al., arXiv:1811.06965.
    ONE_F_ONE_B = "1f1b"  # Pairs of a forward and a backward. Narayanan et al., arXiv:2006.09503.
    INTERLEAVED = "interleaved"  # 1F1B with two chunks per rank. arXiv:2104.04473, section 2.2.
    ZB_H1 = "zb-h1"  # 1F1B, idle time filled by weight gradients. Qi et al., arXiv:2401.10241.
    ZB_V = "zb-v"  # Two chunks in a V, weight gradients later. Qi et al., arXiv:2405.15362.
    DUALPIPE_V = "dualpipe-v"  # Pairs of a forward and a backward. DeepSeek-V3, arXiv:2412.19437.

    @property
    def num_chunks(self) -> int:
        """Chunks of layers per rank."""
        return 1 if self in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1) else 2

    @property
    def is_v(self) -> bool:
        """Whether rank 0 has the first and the last stage."""
        return self in (Schedule.ZB_V, Schedule.DUALPIPE_V)

    def stage(self, num_ranks: int, rank: int, chunk: int) -> int:
        """Returns the stage of a rank's chunk; the embedding's is 0."""
        return chunk * num_ranks + (num_ranks - 1 - rank if self.is_v and chunk else rank)


class Pass(enum.Enum):
    """A pass of a micro-batch through a chunk."""

    FORWARD = "F"
    BACKWARD = "B"  # Gradients of inputs and weights.
    INPUT_GRADIENT = "I"  # The gradient of weights follows in a pass of its own.
    WEIGHT_GRADIENT = "W"


class Task(NamedTuple):
    """A pass of one micro-batch through one chunk of a rank."""

    kind: Pass
    chunk: int
    microbatch: int


# A task; a forward and a backward that a rank computes together; a forward, and after it the weight
# gradient of another micro-batch; or (), a tick in which the rank waits for the others.
Slot = tuple[Task, ...]


def is_pair(slot: Slot) -> bool:
    """Returns whether a slot is a forward and a backward together."""
    return len(slot) > 1 and slot[1].kind is not Pass.WEIGHT_GRADIENT


def parts_of(slot: Slot) -> tuple[Slot, ...]:
    """Returns a slot as several: a pair, or one task each."""
    return (slot,) if is_pair(slot) else tuple((task,) for task in slot)


@functools.cache
def slots(schedule: Schedule, num_ranks: int, rank: int, num_microbatches: int) -> tuple[Slot, ...]:
    """Returns what a rank computes, in order.

    Raises:
        UserError: If the schedule needs more, or a multiple of other, micro-batches.
    """
    check_microbatches(schedule, num_ranks, num_microbatches)
    return tuple(_ORDERS[schedule](num_ranks, rank, num_microbatches))


def check_microbatches(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Raises UserError if a schedule needs more, or a multiple of other, micro-batches."""
    for name, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise UserError(f"{name}={value}: set 1 or more.")
    if schedule is Schedule.INTERLEAVED and num_microbatches % num_ranks:
        raise UserError(
            f"num_microbatches={num_microbatches}: schedule 'interleaved' requires a multiple of "
            f"its {num_ranks} ranks."
        )
    if schedule is Schedule.DUALPIPE_V and num_microbatches < 2 * num_ranks:
        raise UserError(
            f"num_microbatches={num_microbatches}: schedule 'dualpipe-v' requires at least "
            f"{2 * num_ranks}, twice its {num_ranks} ranks."
        )


class _Rank:
    """The next micro-batch of each pass and chunk of a rank, and its deferred weight gradients."""

    def __init__(self) -> None:
        self._next = collections.Counter[tuple[bool, int]]()
        self._deferred = collections.deque[Task]()

    def forward(self, chunk: int = 0) -> Task:
        return self._task(Pass.FORWARD, chunk)

    def backward(self, chunk: int = 0, *, defer: bool = False) -> Task:
        task = self._task(Pass.INPUT_GRADIENT if defer else Pass.BACKWARD, chunk)
        if defer:
            self._deferred.append(task)
        return task

    def weights(self) -> Task:
        """Returns the weight gradient that was deferred first."""
        return self._deferred.popleft()._replace(kind=Pass.WEIGHT_GRADIENT)

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    @property
    def num_saved(self) -> int:
        """The number of forward passes without a backward pass."""
        return self.num_started(forward=True) - self.num_started(forward=False)

    def num_started(self, *, forward: bool) -> int:
        """Returns the number of passes so far, of all chunks."""
        return sum(num for (is_forward, _), num in self._next.items() if is_forward == forward)

    def next(self, kind: Pass, chunk: int) -> Task:
        """Returns the next pass of a kind through a chunk, which has not started."""
        return Task(kind, chunk, self._next[kind is Pass.FORWARD, chunk])

    def _task(self, kind: Pass, chunk: int) -> Task:
        task = self.next(kind, chunk)
        self._next[kind is Pass.FORWARD, chunk] += 1
        return task


def _gpipe(num_ranks: int, rank: int, num: int) -> Iterator[Slot]:
    del num_ranks, rank
    for kind, microbatch in itertools.product((Pass.FORWARD, Pass.BACKWARD), range(num)):
        yield (Task(kind, 0, microbatch),)


def _one_f_one_b(num_ranks: int, rank: int, num: int) -> Iterator[Slot]:
    """Yields 1F1B with twice its micro-batches in flight, so that each rank has pairs."""
    own, ahead = _Rank(), 2 * (num_ranks - rank) - 1
    yield from _pairs(num, ahead, lambda _: own.forward(), lambda _: own.backward())


def _zb_h1(num_ranks: int, rank: int, num: int) -> Iterator[Slot]:
    own, ahead = _Rank(), min(num_ranks - rank - 1, num)
    for _ in range(ahead):
        yield (own.forward(),)
    for i in range(num):
        if ahead + i < num:
            yield (own.forward(),)
        yield (own.backward(defer=True),)
        if i >= rank:  # The first `rank` weight gradients fill the idle time at the end.
            yield (own.weights(),)
    while own.num_deferred:
        yield (own.weights(),)


def _interleaved(num_ranks: int, rank: int, num: int) -> Iterator[Slot]:
    own, ahead = _Rank(), 2 * (num_ranks - rank - 1) + num_ranks + 1

    def chunk(i: int) -> int:
        return i // num_ranks % 2  # Groups of as many micro-batches as ranks.

    yield from _pairs(
        2 * num, ahead, lambda i: own.forward(chunk(i)), lambda i: own.backward(1 - chunk(i))
    )


def _pairs(
    num: int, ahead: int, forward: Callable[[int], Task], backward: Callable[[int], Task]
) -> Iterator[Slot]:
    """Yields `num` passes of each kind, of which the first `ahead` forward ones are alone."""
    ahead = min(ahead, num)
    for i in range(ahead):
        yield (forward(i),)
    for i in range(num):
        yield (forward(ahead + i), backward(i)) if ahead + i < num else (backward(i),)


def _dualpipe_v(num_ranks: int, rank: int, num: int) -> Iterator[Slot]:
    """Yields the eight steps of DeepSeek's schedule.

    The weight gradients of step 3, but the first, follow in the slots of the next forward pass.
    """
    own, later = _Rank(), num_ranks - rank - 1
    for _ in range(2 * later):
        yield (own.forward(0),)
    for _ in range(rank + 1):
        yield (own.forward(0),)
        yield (own.forward(1),)
    for i in range(later):
        yield (own.backward(1, defer=True),)
        if i == 0:
            yield (own.weights(),)
            yield (own.forward(1),)
        else:
            yield (own.forward(1), own.weights())
    for i in range(num - 2 * num_ranks + rank + 1):
        first = (own.forward(0), own.backward(1))
        yield from ([(task,) for task in first] if i == 0 and later == 0 else [first])
        yield (own.forward(1), own.backward(0))
    for _ in range(later):
        yield (own.backward(1),)
        yield (own.forward(1), own.backward(0))
    for i in range(2 * (rank + 1)):
        yield (own.backward(1 - i % 2, defer=i > rank),)
    for _ in range(later):
        yield (own.weights(),)
        yield (own.backward(0, defer=True),)
    while own.num_deferred:
        yield (own.weights(),)


class _ZbV:
    """The slots of all ranks of ZB-V, from a simulation of their ticks.

    In the paper's order, a slot is the first pass that is possible. Ranks then compute passes of
    several kinds in the same tick, and all wait for the longest: with F 1, I 1.5 and W 0.7, 4 ranks
    idle for 29 % of the time, however many micro-batches there are. From 2S micro-batches on, ranks
    therefore compute forward passes, each with a weight gradient, in even ticks, and backward
    passes in odd ticks. Kinds differ before a rank's first backward pass only, and after the last
    forward pass of all ranks.
    """

    def __init__(self, num_ranks: int, num: int) -> None:
        self._num, self._limit = num, 2 * num_ranks + 2
        self._is_short = num < 2 * num_ranks
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._ended = set[Key]()  # Passes of earlier ticks.
        self._stage = functools.partial(Schedule.ZB_V.stage, num_ranks)

    def rows(self) -> Iterator[tuple[Slot, ...]]:
        """Yields the slots of each tick."""
        for tick in itertools.count():
            is_end = all(own.num_started(forward=True) == 2 * self._num for own in self._ranks)
            row = [self._slot(rank, tick % 2 == 0, is_end) for rank in range(len(self._ranks))]
            for rank, task in [(rank, task) for rank, slot in enumerate(row) for task in slot]:
                if task.kind is not Pass.WEIGHT_GRADIENT:
                    self._ended.add(key_of(self._stage(rank, task.chunk), task))
            if any(row):
                yield tuple(row)
            elif is_end:
                return

    def _slot(self, rank: int, is_even: bool, is_end: bool) -> Slot:
        own, forward, backward = self._ranks[rank], None, None
        is_any = self._is_short or not own.num_started(forward=False)  # Whether kinds may differ.
        num_held = own.num_saved + self._is_short * own.num_deferred
        if (is_even or is_any) and num_held < self._limit:
            forward = self._next_chunk(rank, Pass.FORWARD, (1, 0))
        if forward is None and (is_any or is_end or not is_even):
            backward = self._next_chunk(rank, Pass.BACKWARD, (0, 1))
        if backward is not None:  # One weight gradient is deferred at a time.
            return (own.backward(backward, defer=self._is_short or not own.num_deferred),)
        passes = () if forward is None else (own.forward(forward),)
        is_free = own.num_deferred > 0 and not (self._is_short and passes)
        return (*passes, own.weights()) if is_free else passes

    def _next_chunk(self, rank: int, kind: Pass, chunks: Sequence[int]) -> int | None:
        """Returns the first of the chunks whose next pass has its inputs."""
        for chunk in chunks:
            task = self._ranks[rank].next(kind, chunk)
            stage = self._stage(rank, chunk)
            inputs = inputs_of(Schedule.ZB_V, len(self._ranks), stage, task)
            if task.microbatch < self._num and self._ended.issuperset(inputs):
                return chunk
        return None


@functools.cache
def _zb_v_of_all(num_ranks: int, num: int) -> tuple[tuple[Slot, ...], ...]:
    return tuple(zip(*_ZbV(num_ranks, num).rows(), strict=True))


def _zb_v(num_ranks: int, rank: int, num: int) -> Sequence[Slot]:
    return _zb_v_of_all(num_ranks, num)[rank]


_ORDERS: dict[Schedule, Callable[[int, int, int], Iterable[Slot]]] = {
    Schedule.GPIPE: _gpipe,
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.INTERLEAVED: _interleaved,
    Schedule.ZB_H1: _zb_h1,
    Schedule.ZB_V: _zb_v,
    Schedule.DUALPIPE_V: _dualpipe_v,
}


# A pass that others wait for: (is forward, stage, micro-batch).
Key = tuple[bool, int, int]


def key_of(stage: int, task: Task) -> Key:
    """Returns the key of a task that is no weight gradient."""
    return task.kind is Pass.FORWARD, stage, task.microbatch


def inputs_of(schedule: Schedule, num_ranks: int, stage: int, task: Task) -> list[Key]:
    """Returns the passes that a task waits for."""
    last = schedule.num_chunks * num_ranks - 1
    if task.kind is Pass.FORWARD:
        return [(True, stage - 1, task.microbatch)] if stage else []
    if task.kind is Pass.WEIGHT_GRADIENT:
        return [(False, stage, task.microbatch)]
    own = (True, stage, task.microbatch)
    return [own] if stage == last else [own, (False, stage + 1, task.microbatch)]
