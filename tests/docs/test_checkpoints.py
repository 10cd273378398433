"""The examples of docs/checkpoints.md."""

import pathlib

import jax
import numpy as np

import moelib
from experiments import flame_moe
from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import RunRecord
from moelib.checkpoint.policy import evenly_spaced_policy
from moelib.core.config import config_for_function
from moelib.huggingface.pretrained import load_pretrained
from moelib.runs.folder import RunFolder
from moelib.train.trainer import SpmdTrainer

FIXTURES = pathlib.Path(__file__).parents[1] / "huggingface/fixtures"


def test_what_is_saved_and_kept():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:policy]
    cfg.checkpointer.save_policy = config_for_function(evenly_spaced_policy).set(num=20)
    cfg.checkpointer.set(
        keep_last_n=2, keep_every_n_steps=350, keep_best_n=1, best_metric="validation/bits_per_byte"
    )
    # --8<-- [end:policy]
    trainer = cfg.instantiate(parent=None)
    saved = [step for step in range(1, 701) if trainer.checkpointer.should_save(step=step)]
    assert saved == list(range(35, 701, 35))


def test_parameters_are_read(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    model = load_pretrained(str(FIXTURES / "qwen3_moe"))
    RunFolder("runs/a").write_config(SpmdTrainer.default_config().set(model=model.cfg))
    saver = Checkpointer.default_config().set(dir="runs/a/checkpoints").instantiate(parent=None)
    for step in (500, 1000):
        params = jax.tree.map(lambda x, step=step: x * step, model.params)
        saver.save({"model": params}, RunRecord(step=step))
    saver.close()
    # --8<-- [start:load]
    loaded = moelib.load_model("runs/a", mesh="fsdp=8", require_tokenizer=False)
    earlier = loaded.at_step(500)
    weights = loaded.parameters["embedding"]["weight"]  # Sharded over the mesh.
    # --8<-- [end:load]
    assert "tokenizer" in caplog.text
    assert (loaded.step, earlier.step) == (1000, 500)
    assert len(weights.sharding.device_set) == 8
    np.testing.assert_allclose(weights, 2 * earlier.parameters["embedding"]["weight"])
