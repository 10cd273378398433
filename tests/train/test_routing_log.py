"""The routing log of a run: the experts that the model's routers select, each sequence once."""

import math
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.moe.router import Router
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.runs.routing_file import RoutingLog, discard_after, list_logs, log_folder
from moelib.train import routing_log
from moelib.train.routing_log import RoutingEvaler, RoutingLogError
from tests import tiny

LAYERS = [f"decoder/layer{i}/feed_forward" for i in range(2)]


def config(folder, *, model=None, max_step=4, **fields):
    """Returns a trainer of two MoE layers that logs two batches every second step."""
    cfg = tiny.trainer_config(
        folder, model=model or tiny.model_config(), max_step=max_step, save_every=2
    )
    policy = config_for_function(every_n_steps_and_last_policy).set(n=2)
    cfg.watchers["routing_log"] = RoutingEvaler.default_config().set(
        evaler="val", max_batches=2, eval_policy=policy
    )
    cfg.evalers["val"].input.max_batches = None
    cfg.evalers["val"].input.source.num_documents = 10  # Two batches, the last one padded.
    return cfg.set(**fields)


def written(folder, **axes):
    """Returns a trainer with its first parameters on a mesh, after it has written their log."""
    sizes = {"devices": jax.devices()[: math.prod(axes.values())]}
    cfg = config(folder, mesh_shape=mesh_shape_from_axes(**axes))
    trainer = cfg.instantiate(parent=None, **sizes)
    trainer.init()
    with trainer.on_mesh():
        trainer.watchers["routing_log"].write(
            trainer.model_params_for_eval(), trainer.mesh(), step=4
        )
    return trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """The trainer of a log that one device has written."""
    return written(tmp_path_factory.mktemp("run"), data=1)


def read(folder, step=4):
    return RoutingLog(log_folder(str(folder), "val", step))


def arrays(log, *fields):
    """Returns {layer: arrays over all batches}."""
    return {
        name: [np.concatenate(x) for x in zip(*log.layer(name, *fields), strict=True)]
        for name in log.layers
    }


def recomputed(trainer, batch, monkeypatch):
    """Returns (ids, weights, entropy) of each layer by NumPy, from the inputs of the routers."""
    inputs, forward = [], Router.forward

    def recording(self, x, mask):
        keep = lambda x: inputs.append(np.asarray(x, np.float64))
        jax.debug.callback(keep, x, ordered=True)
        return forward(self, x, mask)

    monkeypatch.setattr(Router, "forward", recording)
    params = trainer.trainer_state.model
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    run = lambda params: functional(trainer.model, None, params, (batch,), is_training=False)[0]
    jax.block_until_ready(jax.jit(run)(params))
    jax.effects_barrier()
    matrices = params["decoder"]["repeated0"]["feed_forward"]["router"]["weight"]
    for x, weight in zip(inputs, np.asarray(matrices, np.float64), strict=True):
        logits = x @ weight
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        ids = np.argsort(-probs, -1)[..., :2]
        weights = np.take_along_axis(probs, ids, -1)
        yield ids, weights, -np.sum(probs * np.log(probs), -1)


def test_a_log_holds_the_experts_that_the_routers_select(trainer, monkeypatch):
    log = read(trainer.config.dir)
    assert log.layers == LAYERS
    assert log.sizes(LAYERS[0]) == (4, 2, tiny.DIM)
    found = arrays(log, "input_ids", "mask", "expert_ids", "weights", "entropy")
    data = trainer.config.evalers["val"].input.instantiate()
    batches = [data.batch(i) for i in range(2)]
    batch = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    expected = recomputed(trainer, batch, monkeypatch)
    for name, (ids, weights, entropy) in zip(LAYERS, expected, strict=True):
        tokens, mask, got_ids, got_weights, got_entropy = found[name]
        np.testing.assert_array_equal(tokens, batch["input_ids"])
        np.testing.assert_array_equal(mask, batch["segment_ids"] > 0)
        np.testing.assert_array_equal(got_ids[mask], ids[mask])
        assert got_ids.dtype == np.uint8
        np.testing.assert_allclose(got_weights[mask], weights[mask], rtol=2e-3)
        np.testing.assert_allclose(got_entropy[mask], entropy[mask], rtol=2e-3)
        assert not mask.all()
        assert (got_ids[~mask] == 4).all()


@pytest.mark.slow
def test_a_mesh_with_expert_parallelism_gives_the_same_ids(trainer, tmp_path):
    meshed = written(tmp_path, expert=4, fsdp=2)
    one, eight = (read(each.config.dir) for each in (trainer, meshed))
    assert (one.header.mesh["expert"], eight.header.mesh["expert"]) == (1, 4)
    fields = ("sequence", "input_ids", "expert_ids", "weights")
    for name, got in arrays(eight, *fields).items():
        for x, y in zip(got[:3], arrays(one, *fields)[name], strict=False):
            np.testing.assert_array_equal(x, y)
    assert one.header.config_hash == eight.header.config_hash


def test_logs_of_later_steps_are_discarded_and_complete_ones_kept(trainer):
    log = trainer.watchers["routing_log"]
    assert log.should_log(step=4)
    assert not log.should_log(step=3)
    assert not log.should_log(step=4, unless_complete=True)
    run = trainer.config.dir
    shutil.copytree(log.folder, os.path.join(os.path.dirname(log.folder), "other"))
    discard_after(run, 4)
    assert list_logs(run, "val") == list_logs(run, "other") == {4: True}
    discard_after(run, 3)
    assert list_logs(run, "val") == list_logs(run, "other") == {4: False}
    assert log.should_log(step=4, unless_complete=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cfg: cfg.set(model=tiny.dense_model(32)), "no MoELayer"),
        (lambda cfg: cfg.set(model=tiny.TinyModel.default_config()), "TinyModel"),
        (lambda cfg: cfg.watchers["routing_log"].set(evaler="vall"), "'vall'.*'val'"),
    ],
)
def test_a_log_that_cannot_be_written_is_refused(tmp_path, change, message):
    cfg = config(tmp_path)
    change(cfg)
    with pytest.raises(UserError, match=message):
        cfg.instantiate(parent=None)


def test_a_full_disk_is_an_error_of_the_log(trainer, monkeypatch):
    def full(*unused):
        raise OSError(28, "No space left on device", "batch_00000.process_0000.npz")

    monkeypatch.setattr(routing_log, "write_part", full)
    log = trainer.watchers["routing_log"]
    with trainer.on_mesh(), pytest.raises(RoutingLogError, match="No space left"):
        log.write(trainer.model_params_for_eval(), trainer.mesh(), step=8)
    assert list_logs(trainer.config.dir, "val")[8] is False


def test_the_training_step_is_the_same_with_and_without_logs(tmp_path):
    programs = []
    for kept in (True, False):
        cfg = config(tmp_path, mesh_shape=mesh_shape_from_axes(data=1))
        cfg.watchers = cfg.watchers if kept else {}
        made = cfg.instantiate(parent=None, devices=jax.devices()[:1])
        programs.append(made.trace_train_step().lower().as_text())
    assert programs[0] == programs[1]
