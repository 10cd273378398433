"""Schedules as programs: every result is sent before it is used; entries of buffers."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.parallel.pipeline.buffers import Entry, entries, read, write
from moelib.parallel.pipeline.schedule import Pass, Schedule, Task
from moelib.parallel.pipeline.ticks import Ticks, ticks_of
from moelib.planning.schedules import Costs, lockstep_time, simulate
from tests.parallel.pipeline.test_schedule import allowed


def check(ticks: Ticks, schedule: Schedule, num_ranks: int) -> None:
    """Runs the program on buffers of its sizes, each entry of which names its micro-batch."""
    sizes = {"inputs": ticks.num_inputs, "gradients": ticks.num_gradients}
    held: dict[tuple[str, int, int, int], int] = {}
    shared: dict[Any, Any] = {}
    stage = lambda rank, task: schedule.stage(num_ranks, rank, task.chunk)
    key = lambda name, rank, task: (name, rank, task.chunk, task.microbatch % sizes[name])
    needs = {
        Pass.FORWARD: ["inputs"],
        Pass.BACKWARD: ["gradients"],
        Pass.INPUT_GRADIENT: ["gradients"],
        Pass.WEIGHT_GRADIENT: [],
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
            check_shared(shared, ticks, rank, task)
        for each in transfers:
            name = "inputs" if each.forward else "gradients"
            held[key(name, each.target, each)] = each.microbatch


def check_shared(held: dict[Any, Any], ticks: Ticks, rank: int, task: Task) -> None:
    """Reads what a task reads from the buffers of all chunks, and writes what it writes."""
    own = rank, task.chunk, task.microbatch
    if task.kind in (Pass.BACKWARD, Pass.INPUT_GRADIENT):
        assert held["saved", rank, ticks.saved[own]] == own
    if task.kind is Pass.WEIGHT_GRADIENT:
        assert held["deferred", rank, ticks.deferred[own]] == own
    if task.kind is Pass.FORWARD:
        held["saved", rank, ticks.saved[own]] = own
    if task.kind is Pass.INPUT_GRADIENT:
        held["deferred", rank, ticks.deferred[own]] = own


@pytest.mark.parametrize("schedule", Schedule)
def test_buffers_hold_what_is_used(schedule):
    for num_ranks, num in itertools.product((1, 2, 3, 4, 8), (1, 8, 24)):
        if allowed(schedule, num_ranks, num):
            ticks = ticks_of(schedule, num_ranks, num)
            check(ticks, schedule, num_ranks)


@pytest.mark.parametrize(
    ("schedule", "inputs", "saved", "gradients", "deferred"),
    [
        (Schedule.GPIPE, 1, 16, 16, 0),
        (Schedule.ONE_F_ONE_B, 1, 8, 2, 0),
        (Schedule.INTERLEAVED, 1, 12, 2, 0),
        (Schedule.ZB_H1, 1, 4, 1, 4),
        (Schedule.ZB_V, 2, 10, 2, 1),
        (Schedule.DUALPIPE_V, 2, 9, 1, 4),
    ],
)
def test_a_rank_keeps_as_much_as_the_schedule_has_in_flight(
    schedule, inputs, saved, gradients, deferred
):
    ticks, timeline = ticks_of(schedule, 4, 16), simulate(schedule, 4, 16)
    assert (ticks.num_inputs, ticks.num_gradients) == (inputs, gradients)
    assert ticks.num_saved == saved == max(timeline.peak_activations())
    assert ticks.num_deferred == deferred == max(timeline.peak_deferred)


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.ZB_V])
@pytest.mark.parametrize(("num_ranks", "num"), [(4, 8), (4, 16), (8, 32), (2, 12), (5, 15)])
def test_ranks_wait_little_for_slots_of_others(schedule, num_ranks, num):
    """Ticks that all last as long as their longest slot, at equal costs of F, I and W."""
    lockstep, alone = lockstep_time(schedule, num_ranks, num), simulate(schedule, num_ranks, num)
    assert lockstep <= 1.05 * alone.end
    if schedule is not Schedule.DUALPIPE_V:
        assert lockstep == alone.end


@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.5, 0.7), Costs(1, 2.5, 0.8)])
def test_ranks_of_zb_v_wait_little_however_long_each_kind_of_pass_takes(costs):
    lockstep, alone = (each(Schedule.ZB_V, 4, 64, costs) for each in (lockstep_time, simulate))
    assert lockstep <= 1.02 * alone.end


def test_a_rank_sends_to_its_neighbors_and_hands_over_to_itself_where_a_v_turns():
    for schedule in Schedule:
        for row in ticks_of(schedule, 4, 8).transfers:
            for each in row:
                distance = (each.target - each.source) % 4
                assert distance in ((0, 1, 3) if schedule.is_v else (1, 3))
                assert distance or each.source == 3


BUFFER = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)


def test_an_entry_is_read_and_written():
    entry = Entry(BUFFER, (1,)).inside(jnp.int32(2))
    np.testing.assert_array_equal(entry.read(), BUFFER[1, 2])
    np.testing.assert_array_equal(entry.write(jnp.ones(4)), BUFFER.at[1, 2].set(1))


def test_sums_have_the_dtype_of_the_buffer():
    x = jnp.full((3, 4), 2**-8, jnp.bfloat16)
    (found,) = write(entries([BUFFER], 1, adds=True), [x])
    np.testing.assert_array_equal(found, BUFFER.at[1].add(2.0**-8))  # Not exact in bfloat16.


def test_arrays_are_read_as_they_are():
    whole, part = read((BUFFER, Entry(BUFFER, (0,))))
    assert whole is BUFFER
    np.testing.assert_array_equal(part, BUFFER[0])
