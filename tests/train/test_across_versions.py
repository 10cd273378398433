"""Runs of an earlier version of the code, resumed by a later one."""

import importlib
import json
import os
import sys

import jax
import numpy as np
import pytest

from moelib.checkpoint import contents
from moelib.core import moved_names
from moelib.train.identity import TrainerDirConflictError
from moelib.train.run_log import read_events
from tests import tiny

MODEL = """
from moelib.core.config import config_class
from tests.tiny import TinyModel

class {name}(TinyModel):
    @config_class
    class Config(TinyModel.Config):
        {fields}

    def forward(self, batch):
        loss, metrics = super().forward(batch)
        return loss._replace(mean=loss.mean * {factor}), metrics
"""
EARLIER = {"name": "Model", "fields": "gain: float = 2.0; unused: int = 3; rate: float = 0.1"}
LATER = {"name": "Renamed", "fields": "factor: float = 2.0; rate: float = 0.1; new: float = 1.0"}


@pytest.fixture
def version(tmp_path, monkeypatch):
    """Returns a function that imports the class of a version, the only one that then exists."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(module, factor, name, fields):
        for other in ("earlier_models", "later_models"):
            sys.modules.pop(other, None)
            (tmp_path / f"{other}.py").unlink(missing_ok=True)
        fields = "\n        ".join(fields.split("; "))
        text = MODEL.format(name=name, fields=fields, factor=factor)
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        return getattr(importlib.import_module(module), name)

    yield write
    sys.modules.pop("later_models", None)


def run(directory, model, **fields):
    cfg = tiny.trainer_config(directory, model=model, evaler=False, **fields)
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    return trainer


def as_earlier_record(path):
    """Removes what records of earlier versions did not have."""
    file = os.path.join(path, "record", "metadata")
    with open(file) as f:
        values = json.load(f)
    del values["digest"], values["origin"]
    with open(file, "w") as f:
        json.dump(values | {"digest": contents._digest(values)}, f)


def test_a_run_resumes_with_a_class_moved_and_fields_added_renamed_and_removed(
    tmp_path, version, monkeypatch, caplog
):
    earlier = version("earlier_models", "self.config.gain", **EARLIER)
    folder = str(tmp_path / "run")
    run(folder, earlier.default_config().set(gain=1.5, rate=0.2), max_step=4)
    as_earlier_record(os.path.join(folder, "checkpoints", "step_00000004"))
    with open(os.path.join(folder, "config.txt")) as file:
        written = file.read().splitlines()
    for line in ("model.klass: earlier_models:Model", "model.gain: 1.5", "model.unused: 3"):
        assert line in written

    later = version("later_models", "self.config.factor * self.config.new", **LATER)
    cfg = later.default_config().set(factor=1.5, rate=0.2)
    with pytest.raises(TrainerDirConflictError):  # Nothing says that it is the same class.
        run(folder, cfg)
    monkeypatch.setitem(moved_names.MOVED, "earlier_models:Model", "later_models:Renamed")
    owner = "later_models:Renamed"
    monkeypatch.setitem(moved_names.MOVED_FIELDS, (owner, "gain"), "factor")
    monkeypatch.setitem(moved_names.MOVED_FIELDS, (owner, "unused"), None)
    with pytest.raises(TrainerDirConflictError, match=r"model\.factor is 1\.5 .* and 2\.0 in"):
        run(folder, later.default_config().set(rate=0.2))
    with pytest.raises(TrainerDirConflictError, match=r"model\.new is 1\.0 .* and 0\.5 in"):
        run(folder, cfg.clone(new=0.5))
    caplog.clear()
    resumed = run(folder, cfg)
    unbroken = run(str(tmp_path / "unbroken"), cfg)
    leaves = (jax.tree.leaves(each.trainer_state) for each in (resumed, unbroken))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(x, y)
    assert tiny.losses(folder) == tiny.losses(str(tmp_path / "unbroken"))
    changed = [e["path"] for e in read_events(folder) if e["event"] == "changed"]
    assert changed == ["max_step"]
