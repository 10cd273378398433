"""Estimates of pipelines equal the papers' formulas, the trainer's errors and compiled steps."""

import dataclasses

import pytest

from moelib.core.errors import UserError
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.planning.compiled.examine import shares_of_branches
from moelib.planning.estimate import pipeline as pipeline_lib
from moelib.planning.estimate.activations import FULL, NONE
from moelib.planning.estimate.candidates import candidates, current_candidate, rules_of
from moelib.planning.estimate.estimate import Estimator
from moelib.planning.estimate.pipeline import pipeline_of
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from moelib.planning.hlo import program as hlo
from moelib.planning.plan import Plan, plan
from moelib.planning.report.collectives import collectives_by_axes
from tests.planning import tiny_moe
from tests.tiny import stacked

EIGHT = describe("h100:1x8")


def deep(num_layers=8):
    """Returns the tiny config with more layers."""
    cfg = tiny_moe.config().clone()
    cfg.model.decoder = stacked(cfg.model.decoder.block[0], num_layers=num_layers)
    cfg.input.global_batch_size = 32
    return cfg.set(num_microbatches=8)


@pytest.fixture(scope="module")
def work():
    return tiny_moe.workload_of(deep())


def without_head(work):
    """Returns a workload whose passes have no costs but those of the blocks' weights."""
    return dataclasses.replace(work, forward_flops=work.decoder_flops, attention_flops=0.0)


@pytest.mark.parametrize("num", [8, 64])
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_the_idle_share_of_1f1b_is_that_of_the_papers(work, schedule, num):
    idle, _ = pipeline_of(without_head(work), schedule, 4, num).idle
    assert idle == pytest.approx(3 / (num + 3))
    assert pipeline_of(work, schedule, 4, num).idle[0] > idle  # The last rank has the head.


def test_frozen_weights_take_no_pass_for_their_gradients(work):
    matrices = work.forward_flops - work.attention_flops
    frozen = dataclasses.replace(work, untrained_flops=matrices)
    sizes = (2, 2, 2, 2)
    before, after = (pipeline_lib._costs(each, sizes, 1) for each in (work, frozen))
    total = lambda costs: sum(x.forward + x.input + x.weight for x in costs)
    assert [x.weight for x in after] == [0.0] * 4
    # Three products with each matrix become two; scores take as long as before.
    assert total(before) - total(after) == pytest.approx(matrices)


@pytest.mark.parametrize("schedule", Schedule)
def test_many_micro_batches_need_no_simulation(work, schedule, monkeypatch):
    found = pipeline_of(work, schedule, 2, 16)
    monkeypatch.setattr(pipeline_lib, "_SIMULATED", 8)
    want = pipeline_of(work, schedule, 2, 16)
    assert found.idle == pytest.approx(want.idle)
    sizes = lambda x: (x.num_sent, x.num_kept, x.num_deferred)
    assert sizes(found) == sizes(want)


def test_a_rank_sends_in_every_tick_both_ways(work):
    ticks = ticks_of(Schedule.ONE_F_ONE_B, 4, 8)
    assert pipeline_of(work, Schedule.ONE_F_ONE_B, 4, 8).num_sent == 2 * len(ticks.slots)


def test_schedules_are_candidates_of_a_sweep(work):
    cfg = deep()
    found = [*candidates(cfg, work, EIGHT, mesh="pipeline=4,fsdp=2")]
    assert {each.schedule for each in found} == set(Schedule)
    assert all(each.num_microbatches >= 8 for each in found if each.schedule is Schedule.DUALPIPE_V)
    each = next(x for x in found if x.schedule is Schedule.DUALPIPE_V)
    assert each.apply(cfg).pipeline_schedule is Schedule.DUALPIPE_V
    assert {x.schedule for x in candidates(cfg, work, EIGHT, mesh="fsdp=8")} == {None}
    estimates = list(map(Estimator(work, rules_of(cfg), {}), found))
    assert all(0 < e.idle[0] <= e.idle[1] < 1 and e.pipeline_bytes > 0 for e in estimates)


def test_the_table_has_schedule_idle_share_and_bytes():
    table = plan(deep(), "h100:1x8", mesh="pipeline=2,fsdp=4").table(max_rows=1)
    assert table.rows[0][2].startswith("pipeline=2,fsdp=4; ")
    assert any("A rank of the pipeline idles" in each for each in table.footnotes)


def test_the_bytes_that_deferred_gradients_take_are_told(work):
    def footnotes(schedule, remat):
        found = [*candidates(deep(), work, EIGHT, mesh="pipeline=4,fsdp=2")]
        own = next(each for each in found if each.schedule is schedule)
        estimate = Estimator(work, rules_of(deep()), {})(dataclasses.replace(own, remat=remat))
        table = Plan(deep(), "deep", (estimate,), 1, 0, ()).table()
        return estimate.kept_over_1f1b, "\n".join(table.footnotes)

    times, text = footnotes(Schedule.ZB_H1, FULL)
    assert times > 3
    assert f"keeps {times:.1f} times as many bytes between passes as with 1f1b" in text
    assert footnotes(Schedule.ONE_F_ONE_B, FULL)[0] == 1.0
    times, text = footnotes(Schedule.ZB_H1, NONE)
    assert times < 1.5
    assert "times as many bytes" not in text


@pytest.mark.parametrize(
    ("num_microbatches", "schedule", "message"),
    [
        (4, Schedule.DUALPIPE_V, "num_microbatches=4.*'dualpipe-v'"),
        (2, Schedule.INTERLEAVED, "num_microbatches=2.*'interleaved'"),
        (8, None, "pipeline=4.*pipeline_schedule"),
    ],
)
def test_errors_are_those_of_the_trainer(work, num_microbatches, schedule, message):
    cfg = deep().set(num_microbatches=num_microbatches, pipeline_schedule=schedule)
    cfg.set(mesh_shape=mesh_shape_from_axes(pipeline=4, fsdp=2), dir="unused")
    with pytest.raises(UserError, match=message):
        current_candidate(cfg, work, EIGHT)
    with pytest.raises(UserError, match=message):
        cfg.instantiate(parent=None).trace_train_step()


def test_a_schedule_without_effect_is_reported(work, caplog):
    cfg = deep().set(mesh_shape=mesh_shape_from_axes(fsdp=8), num_microbatches=1)
    assert current_candidate(cfg.set(pipeline_schedule=Schedule.ZB_V), work, EIGHT).schedule is None
    assert "pipeline_schedule is ZB_V, but the mesh axis pipeline is 1" in caplog.text


def test_a_pipeline_has_at_most_as_many_ranks_as_blocks(work):
    with pytest.raises(UserError, match=r"pipeline=4: .* 2 blocks"):
        [
            *candidates(
                deep(), dataclasses.replace(work, num_blocks=2), EIGHT, mesh="pipeline=4,fsdp=2"
            )
        ]


def test_a_model_without_a_scan_stack_has_no_pipeline(work):
    refused = dataclasses.replace(work, pipeline_refusal="mesh axis pipeline: no stack")
    assert {each.schedule for each in candidates(deep(), refused, EIGHT)} == {None}
    with pytest.raises(UserError, match="mesh axis pipeline: no stack"):
        [*candidates(deep(), refused, EIGHT, mesh="pipeline=8")]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.DUALPIPE_V])
def test_bytes_between_ranks_are_those_of_the_compiled_step(schedule):
    cfg = deep(num_layers=4).set(mesh_shape=mesh_shape_from_axes(pipeline=2, fsdp=4))
    cfg.set(pipeline_schedule=schedule, dir="unused", train_dtype=None)
    work = read_workload(cfg)
    trainer = cfg.instantiate(parent=None)
    program = hlo.parse(trainer.compile_train_step().as_text(), shares_of_branches(trainer))
    found = collectives_by_axes(program, dict(trainer.mesh().shape))
    sent = {x.kind: x.bytes for x in found if x.axes == ("pipeline",)}
    estimate = Estimator(work, rules_of(cfg), {})(current_candidate(cfg, work, EIGHT))
    assert sent["collective-permute"] == pytest.approx(estimate.pipeline_bytes, rel=0.01)


def test_pairs_without_a_pipeline_are_planned_as_they_are_trained():
    cfg = deep().set(mesh_shape=mesh_shape_from_axes(expert=4, data=2))
    cfg.set(pipeline_schedule=Schedule.DUALPIPE_V)
    cfg.input.global_batch_size = 64
    work = read_workload(cfg)
    candidate = current_candidate(cfg, work, EIGHT)
    assert candidate.schedule is Schedule.DUALPIPE_V
    estimate = Estimator(work, rules_of(cfg), {})(candidate)
    alone = Estimator(work, rules_of(cfg), {})(dataclasses.replace(candidate, schedule=None))
    # Both passes of a pair are in memory, and no rank waits.
    assert estimate.memory["activations"] > alone.memory["activations"]
    assert estimate.idle == (0.0, 0.0)
