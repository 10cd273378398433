"""Schedules against the published formulas of their idle time and memory."""

import itertools

import pytest

from moelib.core.errors import UserError
from moelib.parallel.pipeline.schedule import Pass, Schedule, is_pair, slots
from moelib.planning.schedules import Costs, Timeline, simulate

SIZES = [(4, 8), (4, 16), (8, 32)]
COSTS = [Costs(), Costs(forward=2.0, input=2.0, weight=1.0)]
# ZB-V has a closed form for equal costs alone, and is the paper's for few micro-batches alone.
CASES = [
    *((s, c, *sizes) for s in Schedule if s is not Schedule.ZB_V for c in COSTS for sizes in SIZES),
    *((Schedule.ZB_V, Costs(), num_ranks, num_ranks) for num_ranks in (2, 4, 8)),
]


def allowed(schedule: Schedule, num_ranks: int, num: int) -> bool:
    """Returns whether a schedule takes these sizes."""
    if schedule is Schedule.INTERLEAVED:
        return num % num_ranks == 0
    return schedule is not Schedule.DUALPIPE_V or num >= 2 * num_ranks


def idle(schedule: Schedule, num_ranks: int, costs: Costs) -> float:
    """Returns the idle time of each rank, in times of a chunk.

    Sources: the tables of the papers that `Schedule` names, and of DeepSeek's DualPipe.
    """
    f, i, w, _ = costs
    per_rank = {
        Schedule.GPIPE: f + i + w,
        Schedule.ONE_F_ONE_B: f + i + w,
        Schedule.INTERLEAVED: f + i + w,  # Of chunks half as large.
        Schedule.ZB_H1: f + i - w,
        Schedule.ZB_V: f,  # A rank's wait for its first micro-batch.
        Schedule.DUALPIPE_V: (f + i + w) + (i + w) - 3 * w,  # With f = i.
    }[schedule]
    return (num_ranks - 1) * per_rank


@pytest.mark.parametrize(("schedule", "costs", "num_ranks", "num"), CASES)
def test_idle_time_is_that_of_the_papers(schedule, costs, num_ranks, num):
    found = simulate(schedule, num_ranks, num, costs).idle
    assert found == pytest.approx([idle(schedule, num_ranks, costs)] * num_ranks)


@pytest.mark.parametrize(
    "costs", [Costs(), Costs(1, 1.2, 0.9), Costs(1, 1.5, 0.7), Costs(1, 2.5, 0.8)]
)
def test_zb_v_idles_little_however_long_each_kind_of_pass_takes(costs):
    timeline = simulate(Schedule.ZB_V, 4, 64, costs)
    assert max(timeline.idle) < 0.03 * timeline.end


def test_a_fast_pair_shortens_dualpipe_v():
    """The last rank is idle for (S - 1) (F&B + B - 3W), others for less."""
    found = simulate(Schedule.DUALPIPE_V, 4, 16, Costs(pair=2.4)).idle
    assert found == pytest.approx([3.0, 3.6, 4.2, 4.2])
    assert found[-1] == pytest.approx(3 * (2.4 + 2 - 3))


@pytest.mark.parametrize(("num_ranks", "num"), SIZES)
def test_activations_are_those_of_the_papers(num_ranks, num):
    peak = lambda schedule: simulate(schedule, num_ranks, num).peak_activations()
    assert peak(Schedule.GPIPE) == (num,) * num_ranks
    assert peak(Schedule.ZB_H1) == tuple(range(num_ranks, 0, -1))
    # Twice those of a 1F1B without pairs.
    assert peak(Schedule.ONE_F_ONE_B) == tuple(range(2 * num_ranks, 0, -2))
    # 1 + (S - 1) / 2S of the whole model's activations, in chunks of 1 / 2S; one more in a pair.
    assert peak(Schedule.INTERLEAVED)[0] == 2 * num_ranks + (num_ranks - 1) + 1
    assert peak(Schedule.DUALPIPE_V) == (2 * num_ranks + 1,) * num_ranks
    assert peak(Schedule.ZB_V) == (2 * num_ranks + 2,) * num_ranks  # The paper's is 2S.
    assert max(simulate(Schedule.ZB_V, num_ranks, num).peak_deferred) == 1
    deferred = simulate(Schedule.DUALPIPE_V, num_ranks, num).peak_deferred
    assert deferred == tuple(range(1, num_ranks + 1))


def test_pairs_of_dualpipe_v_are_those_of_the_published_schedule():
    ranks = [slots(Schedule.DUALPIPE_V, 4, rank, 16) for rank in range(4)]
    assert [sum(map(is_pair, rank)) for rank in ranks] == [21, 22, 23, 23]
    kinds = [[task.kind for slot in rank for task in slot] for rank in ranks]
    assert [rank.count(Pass.WEIGHT_GRADIENT) for rank in kinds] == [7, 6, 5, 4]
    assert simulate(Schedule.DUALPIPE_V, 4, 16).end == 102


def check(timeline: Timeline, schedule: Schedule, num: int) -> None:
    """Asserts that every pass is there once, on time, and that no rank does two at a time."""
    end, num_ranks = {}, len(timeline.ranks)
    for rank, timed in enumerate(timeline.ranks):
        for a, b in itertools.pairwise(timed):
            assert a.end <= b.begin
        for slot, task in [(each, task) for each in timed for task in each.slot]:
            stage = schedule.stage(num_ranks, rank, task.chunk)
            for kind in "IW" if task.kind is Pass.BACKWARD else task.kind.value:
                assert (kind, stage, task.microbatch) not in end
                end[kind, stage, task.microbatch] = slot
    stages = range(schedule.num_chunks * num_ranks)
    assert end.keys() == set(itertools.product("FIW", stages, range(num)))
    for stage, m in itertools.product(stages, range(num)):
        if stage:
            assert end["F", stage - 1, m].end <= end["F", stage, m].begin
            assert end["I", stage, m].end <= end["I", stage - 1, m].begin
        assert end["F", stage, m].end <= end["I", stage, m].begin
        assert end["I", stage, m] is end["W", stage, m] or (
            end["I", stage, m].end <= end["W", stage, m].begin
        )


@pytest.mark.parametrize("schedule", Schedule)
def test_every_pass_is_computed_once_and_in_order(schedule):
    for num_ranks in range(1, 9):
        for num in (*range(1, 10), 16, 24, 64):
            if allowed(schedule, num_ranks, num):
                timeline = simulate(schedule, num_ranks, num, Costs(1.0, 1.3, 0.6))
                check(timeline, schedule, num)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num", "message"),
    [
        (Schedule.DUALPIPE_V, 4, 7, "num_microbatches=7.*at least 8"),
        (Schedule.INTERLEAVED, 4, 6, "num_microbatches=6.*multiple of its 4"),
        (Schedule.GPIPE, 4, 0, "num_microbatches=0"),
        (Schedule.GPIPE, 0, 4, "num_ranks=0"),
    ],
)
def test_sizes_that_a_schedule_does_not_take_are_refused(schedule, num_ranks, num, message):
    with pytest.raises(UserError, match=message):
        slots(schedule, num_ranks, 0, num)
    with pytest.raises(UserError, match=message):
        simulate(schedule, num_ranks, num)


def test_the_chart_shows_each_rank():
    chart = simulate(Schedule.ONE_F_ONE_B, 2, 2).chart(width=9)
    assert chart.splitlines() == ["  0 FF...BBBB", "  1 .FXXXBB.."]
    chart = simulate(Schedule.DUALPIPE_V, 1, 2).chart(width=12)
    assert chart == "  0 FfFbbXXXbbIW"
