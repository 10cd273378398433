"""Pipeline schedules in time: idle time, activations, a chart, and a table that compares them."""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.parallel.pipeline.schedule import (
    Key,
    Pass,
    Schedule,
    Slot,
    Task,
    check_microbatches,
    inputs_of,
    is_pair,
    key_of,
    parts_of,
    slots,
)
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.runtime.table import Table

_FOOTNOTES = (
    "Every pass of a chunk takes as long: forward, gradient of inputs, gradient of weights.",
    "Activations are those of a micro-batch in a rank's layers, until their weights' gradient.",
    "F forward, B backward, I gradient of inputs, W of weights, X forward and backward together;",
    "lower case: the second chunk of a rank.",
)


class Costs(NamedTuple):
    """Times of the passes of a chunk, in any unit. A whole backward pass is `input` + `weight`."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    pair: float | None = None  # A forward and a whole backward together; None: their sum.

    def of(self, kind: Pass) -> float:
        """Returns the time of a pass."""
        if kind is Pass.FORWARD:
            return self.forward
        if kind is Pass.WEIGHT_GRADIENT:
            return self.weight
        return self.input + (self.weight if kind is Pass.BACKWARD else 0.0)


class TimedSlot(NamedTuple):
    """A slot in time: a task or a pair."""

    slot: Slot
    begin: float
    end: float


class Timeline(NamedTuple):
    """All slots of all ranks in time."""

    ranks: tuple[tuple[TimedSlot, ...], ...]

    @property
    def end(self) -> float:
        """Time of the whole step."""
        return max(rank[-1].end for rank in self.ranks)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time in which each rank waits for others."""
        return tuple(self.end - sum(x.end - x.begin for x in rank) for rank in self.ranks)

    def peak_activations(self, *, until_weights: bool = False) -> tuple[int, ...]:
        """Returns the largest number of chunks' activations that each rank holds.

        Args:
            until_weights: Whether activations are held until the pass of their weights' gradient,
                not only until that of their inputs.
        """
        inputs = (Pass.BACKWARD, Pass.WEIGHT_GRADIENT if until_weights else Pass.INPUT_GRADIENT)
        return tuple(_peak(rank, (Pass.FORWARD,), inputs) for rank in self.ranks)

    @property
    def peak_deferred(self) -> tuple[int, ...]:
        """The largest number of deferred weight gradients of each rank."""
        kinds = (Pass.INPUT_GRADIENT,), (Pass.WEIGHT_GRADIENT,)
        return tuple(_peak(rank, *kinds) for rank in self.ranks)

    def chart(self, width: int = 100) -> str:
        """Returns a Gantt chart: a line per rank, letters of the second chunk in lower case.

        A pair of a forward and a backward pass is an X, idle time a dot. Columns are equal times.
        """
        lines = []
        columns = [(i + 0.5) * self.end / width for i in range(width)]
        for number, rank in enumerate(self.ranks):
            shown = (next((x.slot for x in rank if x.begin <= at < x.end), ()) for at in columns)
            lines.append(f"{number:>3} " + "".join(map(_letter, shown)))
        return "\n".join(lines)


def _letter(slot: Slot) -> str:
    if len(slot) != 1:
        return "X" if slot else "."
    letter = slot[0].kind.value
    return letter.lower() if slot[0].chunk else letter


def _peak(rank: tuple[TimedSlot, ...], begins: tuple[Pass, ...], ends: tuple[Pass, ...]) -> int:
    live = peak = 0
    for timed in rank:
        kinds = [task.kind for task in timed.slot]
        live += sum(kind in begins for kind in kinds)
        peak = max(peak, live)
        live -= sum(kind in ends for kind in kinds)
    assert live == 0
    return peak


class _Waiting(NamedTuple):
    """A slot of a rank that has not begun."""

    slot: Slot
    tasks: list[tuple[int, Task]]  # Each after its stage.
    inputs: set[Key]


def _waiting(schedule: Schedule, num_ranks: int, rank: int, num: int) -> Iterator[_Waiting]:
    """Yields the slots of a rank for some micro-batches, in order."""
    stages = [schedule.stage(num_ranks, rank, chunk) for chunk in range(schedule.num_chunks)]
    for slot in slots(schedule, num_ranks, rank, num):
        for part in parts_of(slot):
            tasks = [(stages[task.chunk], task) for task in part]
            inputs = {key for each in tasks for key in inputs_of(schedule, num_ranks, *each)}
            yield _Waiting(part, tasks, inputs)


def simulate(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | Sequence[Costs] | None = None,
) -> Timeline:
    """Returns the schedule in time: a slot begins when its rank is free and its inputs are there.

    Sending takes no time.

    Args:
        schedule: Order of the passes.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of micro-batches.
        costs: Times of passes, of all stages or of each; 1 each by default.

    Raises:
        UserError: If the schedule needs more micro-batches.
    """
    check_microbatches(schedule, num_ranks, num_microbatches)
    costs = _of_each_stage(schedule, num_ranks, costs)
    waiting = [
        collections.deque(_waiting(schedule, num_ranks, rank, num_microbatches))
        for rank in range(num_ranks)
    ]
    ranks = [list[TimedSlot]() for _ in range(num_ranks)]
    end: dict[Key, float] = {}
    while any(waiting):
        before = len(end), sum(map(len, waiting))
        for rank, (todo, done) in enumerate(zip(waiting, ranks, strict=True)):
            while todo and todo[0].inputs <= end.keys():
                slot, tasks, inputs = todo.popleft()
                begin = max([end[key] for key in inputs] + [x.end for x in done[-1:]], default=0.0)
                done.append(TimedSlot(slot, begin, begin + _slot_time(tasks, costs)))
                for stage, task in tasks:
                    if task.kind is not Pass.WEIGHT_GRADIENT:
                        key = key_of(stage, task)
                        assert key not in end, f"{task} of rank {rank} is repeated"
                        end[key] = done[-1].end
        assert before != (len(end), sum(map(len, waiting))), "deadlock"
    return Timeline(tuple(map(tuple, ranks)))


def lockstep_time(
    schedule: Schedule,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | Sequence[Costs] | None = None,
) -> float:
    """Returns the time of a step whose ranks all wait for the slowest in every tick.

    In a compiled step, ranks wait for their neighbors in every tick, which takes no longer than
    this and no less than `simulate`. The arguments are those of `simulate`.
    """
    costs = _of_each_stage(schedule, num_ranks, costs)
    stage = functools.partial(schedule.stage, num_ranks)
    time = lambda rank, slot: _slot_time([(stage(rank, t.chunk), t) for t in slot], costs)
    rows = ticks_of(schedule, num_ranks, num_microbatches).slots
    return sum(max(time(rank, slot) for rank, slot in enumerate(row) if slot) for row in rows)


def _of_each_stage(
    schedule: Schedule, num_ranks: int, costs: Costs | Sequence[Costs] | None
) -> Sequence[Costs]:
    if costs is None or isinstance(costs, Costs):
        return [costs or Costs()] * (num_ranks * schedule.num_chunks)
    return costs


def _slot_time(tasks: Sequence[tuple[int, Task]], costs: Sequence[Costs]) -> float:
    """Returns the time of a slot, from its tasks, each after its stage."""
    pair = costs[tasks[0][0]].pair
    if pair is not None and is_pair(tuple(task for _, task in tasks)):
        return pair
    return sum(costs[stage].of(task.kind) for stage, task in tasks)


def schedule_timelines(texts: Sequence[str]) -> dict[str, Timeline]:
    """Returns the timelines of schedules such as "dualpipe-v:4x16" (ranks x micro-batches).

    Raises:
        UserError: If a text is no schedule, or the schedule needs more micro-batches.
    """
    found, names = {}, [each.value for each in Schedule]
    for text in texts:
        name, _, sizes = text.partition(":")
        if name not in names:
            raise UserError(f"schedule={text!r}: unknown schedule; {did_you_mean(name, names)}")
        numbers = sizes.split("x")
        if len(numbers) != 2 or not all(each.isdecimal() for each in numbers):
            raise UserError(f"schedule={text!r}: write ranks x micro-batches, as in {name}:4x16.")
        num_ranks, num_microbatches = map(int, numbers)
        found[text] = simulate(Schedule(name), num_ranks, num_microbatches)
    return found


def schedules_table(timelines: dict[str, Timeline]) -> Table:
    """Returns idle shares and memory of schedules."""
    rows = []
    for text, timeline in timelines.items():
        chunks = Schedule(text.partition(":")[0]).num_chunks
        peaks = [peak / chunks for peak in timeline.peak_activations(until_weights=True)]
        rows.append(
            [
                text,
                f"{max(timeline.idle) / timeline.end:.1%}",
                f"{max(peaks):.3g}",
                f"{min(peaks):.3g}",
                f"{max(timeline.peak_deferred)}",
            ]
        )
    columns = ["schedule", "idle>", "activations, most>", "least>", "deferred weight gradients>"]
    return Table("Pipeline schedules", columns, rows, _FOOTNOTES)
