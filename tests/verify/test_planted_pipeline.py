"""Bugs of a pipeline are found on the meshes that have one."""

import tempfile

import jax
import jax.numpy as jnp
import pytest

from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.parallel.pipeline import engine
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.train import pipeline
from moelib.verify import run
from moelib.verify.outcome import Outcome, Status
from tests.tiny import model_config, plain_moe, stacked, trainer_config, transformer_layer

AXES = {"pipeline": 2, "fsdp": 2}


def config(schedule: Schedule):
    balance = LoadBalanceLoss.default_config().set(weight=0.3)
    layer = transformer_layer(plain_moe(load_balance_loss=balance))
    cfg = trainer_config("unused", max_step=4, evaler=False)
    cfg.set(
        model=model_config(stacked(layer, num_layers=4)),
        num_microbatches=4,
        pipeline_schedule=schedule,
    )
    cfg.learner.optimizer.set(learning_rate=1e-2, weight_decay=0.1)
    return cfg


def stale_residual_slot(patch) -> None:
    """Saved values of two micro-batches in flight share a place."""

    def short(*args, **options):
        ticks = ticks_of(*args, **options)
        return ticks._replace(saved={key: max(i - 1, 0) for key, i in ticks.saved.items()})

    patch(engine, "ticks_of", short)


def lost_auxiliary_loss_of_one_stage(patch) -> None:
    """The layers of the second stage have no auxiliary losses."""
    block = pipeline._Cut._block

    def without(self, key, side_inputs, num_tokens, x, params, fixed, own):
        (x, loss), *rest = block(self, key, side_inputs, num_tokens, x, params, fixed, own)
        return (x, jnp.where(own[0] == 1, 0.0, loss)), *rest

    patch(pipeline._Cut, "_block", without)


def weight_gradient_of_the_wrong_microbatch(patch) -> None:
    """A deferred weight gradient takes what another micro-batch left."""
    weights = engine._Run._weights

    def other(self, state, task):
        return weights(self, state, task.at[3].set((task[3] + 1) % self.ticks.num_deferred))

    patch(engine._Run, "_weights", other)


def loss_of_the_last_stage_twice(patch) -> None:
    """The objective of the last stage counts twice."""
    last = pipeline._Cut.last

    def twice(self, *args):
        objective, outputs = last(self, *args)
        return 2 * objective, outputs

    patch(pipeline._Cut, "last", twice)


BUGS = {
    stale_residual_slot: "decoder/layer",
    lost_auxiliary_loss_of_one_stage: "decoder/layer1",
    weight_gradient_of_the_wrong_microbatch: "decoder/layer",
    loss_of_the_last_stage_twice: "head",
}


def on_mesh(schedule: Schedule = Schedule.DUALPIPE_V) -> list[Outcome]:
    """Returns the outcomes on the mesh; those of one device have tests of their own."""
    without = [*run.SINGLE_DEVICE_CHECKS, *run.EARLY_CHECKS, "bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        found = run.run_checks(config(schedule), [AXES], jax.devices()[:4], folder, without=without)
        return [each for each in found if each.status is not Status.SKIPPED]


@pytest.mark.slow
def test_a_pipeline_without_bugs_passes():
    found = on_mesh()
    assert {each.status for each in found} == {Status.PASSED}, found
    assert len(found) > 8


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_a_pipeline_is_found(bug, monkeypatch):
    jax.clear_caches()
    bug(monkeypatch.setattr)
    many_deferred = bug is weight_gradient_of_the_wrong_microbatch
    found = on_mesh(Schedule.ZB_H1 if many_deferred else Schedule.DUALPIPE_V)[-1]
    assert found.status is Status.FAILED, found
    assert (found.mesh, found.check) == ("pipeline=2,fsdp=2", "gradients"), found
    assert BUGS[bug] in found.detail, found
    jax.clear_caches()
