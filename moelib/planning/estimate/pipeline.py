"""Pipelines: idle time, buffers and messages of a schedule, from its simulation.

Passes cost their FLOPs, so that ranks wait for the one with the head, or with layers before the
blocks. A step without a schedule is a pipeline of one stage.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from moelib.parallel.pipeline.engine import AXIS
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.planning.estimate.workload import Workload
from moelib.planning.schedules import Costs, lockstep_time, simulate
from moelib.train.pipeline import stage_sizes

__all__ = ["AXIS", "Pipeline", "pipeline_of"]

# Micro-batches per rank from which on each more adds as much; further ones are not simulated.
_SIMULATED = 5


class _Figures(NamedTuple):
    """Figures of a schedule, times in FLOPs per token."""

    end: float  # Time of a step whose ranks wait for their inputs only.
    lockstep: float  # The same if all wait for the slowest in every tick.
    ticks: float
    inputs: float  # Inputs that a chunk keeps until its forward pass.
    gradients: float  # Gradients that a chunk keeps.
    saved: float  # Chunks whose saved activations a rank keeps.
    deferred: float  # Chunks whose deferred weight gradients a rank keeps.


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A schedule for the layers of a workload."""

    num_ranks: int
    sizes: tuple[int, ...]  # Blocks of each stage.
    # Idle share of the mean rank: if it waits for its inputs only, and if all ranks wait for the
    # slowest in every tick.
    idle: tuple[float, float] = (0.0, 0.0)
    # Activations and gradients that a rank sends per step; one per tick and way.
    num_sent: float = 0.0
    num_kept: float = 0.0  # Inputs of stages and gradients of outputs that a rank keeps.
    num_saved: float = 0.0  # Blocks whose saved activations a rank keeps besides those of a stage.
    num_deferred: float = 0.0  # Blocks whose weight gradients a rank keeps for later.

    @functools.cached_property
    def largest(self) -> int:
        """Blocks of the largest stage."""
        return max(self.sizes)

    @functools.cached_property
    def rows(self) -> int:
        """Blocks of a rank with its stages filled up to the largest."""
        return len(self.sizes) // self.num_ranks * self.largest

    @functools.cached_property
    def filled(self) -> float:
        """The same, as a multiple of an even share of all blocks."""
        return self.rows * self.num_ranks / sum(self.sizes)


def pipeline_of(
    work: Workload,
    schedule: Schedule | None,
    num_ranks: int,
    num_microbatches: int,
    *,
    recomputed: bool = True,
) -> Pipeline:
    """Returns a schedule for a workload.

    Args:
        work: The workload.
        schedule: Order of the passes; None for one after the other.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of micro-batches.
        recomputed: Whether a backward pass recomputes the forward passes of its blocks.

    Raises:
        UserError: If the schedule needs more, or a multiple of other, micro-batches.
    """
    if schedule is None:
        return Pipeline(num_ranks=1, sizes=(work.num_blocks,))
    sizes = stage_sizes(work.num_blocks, num_ranks * schedule.num_chunks)
    costs = _costs(work, sizes, 2 if recomputed else 1)
    found = _figures(schedule, num_ranks, num_microbatches, costs)
    busy = num_microbatches * sum(x.forward + x.input + x.weight for x in costs) / num_ranks
    ways = ticks_of(schedule, num_ranks, 2 * num_ranks).transfers
    num_ways = {(t.forward, (t.target - t.source) % num_ranks) for tick in ways for t in tick}
    return Pipeline(
        num_ranks=num_ranks,
        sizes=sizes,
        idle=(1 - busy / found.end, 1 - busy / found.lockstep),
        num_sent=found.ticks * sum(distance > 0 for _, distance in num_ways),
        num_kept=schedule.num_chunks * (found.inputs + found.gradients),
        num_saved=max(sizes) * found.saved,
        num_deferred=max(sizes) * found.deferred,
    )


def _costs(work: Workload, sizes: Sequence[int], passes: int) -> tuple[Costs, ...]:
    """Returns the FLOPs per token of the passes of each stage.

    Attention has no weights, and its kernels recompute the scores in the backward pass. The loss is
    computed with its gradients. Frozen matrices have no gradients of weights; they are assumed to
    be spread evenly over the layers and the head.
    """
    matrices = work.forward_flops - work.attention_flops
    trained = 1.0 - work.untrained_flops / matrices
    layer, scores = (x / work.num_layers for x in (work.decoder_flops, work.attention_flops))
    first = work.num_first_layers
    costs = [
        Costs(n * layer, n * (passes * layer + 1.5 * scores), n * trained * (layer - scores))
        for n in (work.block_size * size for size in sizes)
    ]
    begin = costs[0]
    costs[0] = begin._replace(
        forward=begin.forward + first * layer,
        input=begin.input + first * (passes * layer + 1.5 * scores + trained * (layer - scores)),
    )
    head = (2 + trained) * (work.forward_flops - work.decoder_flops)
    costs[-1] = costs[-1]._replace(forward=costs[-1].forward + head)
    return tuple(costs)


def _figures(
    schedule: Schedule, num_ranks: int, num_microbatches: int, costs: tuple[Costs, ...]
) -> _Figures:
    if num_microbatches <= _SIMULATED * num_ranks:
        return _simulated(schedule, num_ranks, num_microbatches, costs)
    few, many = (
        _simulated(schedule, num_ranks, n * num_ranks, costs) for n in (_SIMULATED - 1, _SIMULATED)
    )
    more = num_microbatches / num_ranks - _SIMULATED
    return _Figures(*(b + more * (b - a) for a, b in zip(few, many, strict=True)))


@functools.cache
def _simulated(
    schedule: Schedule, num_ranks: int, num_microbatches: int, costs: tuple[Costs, ...]
) -> _Figures:
    timeline = simulate(schedule, num_ranks, num_microbatches, costs)
    ticks = ticks_of(schedule, num_ranks, num_microbatches)
    lockstep = lockstep_time(schedule, num_ranks, num_microbatches, costs)
    kept = ticks.num_inputs, ticks.num_gradients, ticks.num_saved, ticks.num_deferred
    return _Figures(timeline.end, lockstep, len(ticks.slots), *kept)
