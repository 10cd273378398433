"""Schedules as programs: every result is sent before it is used, and no buffer is overwritten."""

import itertools

import pytest

from moelib.parallel.pipeline.schedule import Pass, Schedule
from moelib.parallel.pipeline.ticks import Ticks, ticks_of
from tests.parallel.pipeline.test_schedule import allowed


def check(ticks: Ticks, schedule: Schedule, num_ranks: int) -> None:
    """Runs the program on buffers of its sizes, each entry of which names its micro-batch."""
    sizes = {
        "inputs": ticks.num_inputs,
        "gradients": ticks.num_gradients,
        "deferred": ticks.num_deferred,
    }
    held: dict[tuple[str, int, int, int], int] = {}
    stage = lambda rank, task: schedule.stage(num_ranks, rank, task.chunk)
    key = lambda name, rank, task: (name, rank, task.chunk, task.microbatch % sizes[name])
    needs = {
        Pass.FORWARD: ["inputs"],
        Pass.BACKWARD: ["inputs", "gradients"],
        Pass.INPUT_GRADIENT: ["inputs", "gradients"],
        Pass.WEIGHT_GRADIENT: ["deferred"],
    }
    last = schedule.num_chunks * num_ranks - 1
    for slots, transfers in zip(ticks.slots, ticks.transfers, strict=True):
        for rank, task in [(rank, task) for rank, slot in enumerate(slots) for task in slot]:
            if task.kind is Pass.FORWARD and stage(rank, task) == 0:
                held[key("inputs", rank, task)] = task.microbatch
            for name in needs[task.kind]:
                assert held[key(name, rank, task)] == task.microbatch
            if task.kind is Pass.FORWARD and stage(rank, task) == last:
                held[key("gradients", rank, task)] = task.microbatch
            if task.kind is Pass.INPUT_GRADIENT:
                held[key("deferred", rank, task)] = task.microbatch
        for each in transfers:
            name = "inputs" if each.forward else "gradients"
            held[key(name, each.target, each)] = each.microbatch


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("eager", [False, True])
def test_buffers_hold_what_is_used(schedule, eager):
    for num_ranks, num in itertools.product((1, 2, 3, 4, 8), (1, 8, 24)):
        if allowed(schedule, num_ranks, num):
            ticks = ticks_of(schedule, num_ranks, num, eager=eager)
            check(ticks, schedule, num_ranks)


def test_a_rank_keeps_as_many_activations_as_the_schedule_has_in_flight():
    assert ticks_of(Schedule.ONE_F_ONE_B, 4, 16)[2:] == (4, 1, 0)
    assert ticks_of(Schedule.GPIPE, 4, 16)[2:] == (16, 16, 0)
    assert ticks_of(Schedule.ZB_H1, 4, 16).num_deferred == 4
    assert ticks_of(Schedule.ZB_V, 4, 16).num_inputs == 7


def test_a_rank_sends_to_its_neighbors_and_hands_over_to_itself_where_a_v_turns():
    for schedule in Schedule:
        for row in ticks_of(schedule, 4, 8).transfers:
            for each in row:
                distance = (each.target - each.source) % 4
                assert distance in ((0, 1, 3) if schedule.is_v else (1, 3))
                assert distance or each.source == 3
