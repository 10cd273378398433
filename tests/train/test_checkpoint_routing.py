"""Logs of finished checkpoints: the steps that need one, and the evaler that they read."""

import jax
import pytest

from moelib.checkpoint.contents import RECORD_FILE
from moelib.checkpoint.policy import every_n_steps_policy
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.transformer import LoopStack
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.runs.folder import RunFolder
from moelib.runs.routing_file import RoutingLog, list_logs, log_folder
from moelib.train.checkpoint_routing import expected_steps, write_missing_logs
from moelib.train.routing_log import RoutingEvaler
from tests import tiny


def config(folder, **fields):
    decoder = tiny.stacked(tiny.transformer_layer(tiny.plain_moe()), stack=LoopStack)
    cfg = tiny.trainer_config(folder, model=tiny.model_config(decoder), save_every=2, max_step=6)
    return cfg.set(**fields)


def test_expected_steps_are_those_of_the_log_or_of_checkpoints_that_are_all_kept(tmp_path):
    cfg = config(tmp_path)
    RunFolder(tmp_path).write_config(cfg)
    assert expected_steps(str(tmp_path), "val", 5) == []  # Older checkpoints are deleted.
    cfg.checkpointer.keep_last_n = None
    RunFolder(tmp_path).write_config(cfg)
    assert expected_steps(str(tmp_path), "val", 5) == [2, 4]
    policy = config_for_function(every_n_steps_policy).set(n=3)
    log = RoutingEvaler.default_config().set(evaler="val", eval_policy=policy)
    cfg.watchers["log"] = log
    RunFolder(tmp_path).write_config(cfg)
    assert expected_steps(str(tmp_path), "val", 6) == [3, 6]
    assert expected_steps(str(tmp_path), "other", 6) == [2, 4, 6]


def test_a_checkpoint_that_cannot_be_read_is_named_and_the_others_are_logged(tmp_path):
    cfg = config(tmp_path, max_step=2)
    cfg.checkpointer.set(keep_last_n=None).save_policy.n = 1
    cfg.mesh_shape = mesh_shape_from_axes(expert=2)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:2])
    trainer.init()
    for step in (1, 2):
        trainer.step = step
        trainer.save_checkpoint()
        trainer.checkpointer.wait()
    RunFolder(tmp_path).write_config(cfg)
    (tmp_path / "checkpoints/step_00000001" / RECORD_FILE).write_text("{")
    with pytest.raises(UserError, match="nothing"):
        write_missing_logs(str(tmp_path), [2], evaler="nothing")
    name, missing = write_missing_logs(str(tmp_path), [1, 2])
    assert name == "val"  # The only one.
    assert list(missing) == [1]
    assert list_logs(str(tmp_path), "val") == {2: True}
    header = RoutingLog(log_folder(str(tmp_path), "val", 2)).header
    assert header.mesh == {"data": 1, "expert": 2, "fsdp": 1}  # Read on one device.
