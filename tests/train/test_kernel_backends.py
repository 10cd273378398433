"""Kernels of a run: their backends, and the check at its start."""

import dataclasses

import pytest

from moelib.core.errors import UserError
from moelib.kernels import backend
from moelib.kernels.backend import traced_backends
from moelib.launch import TrainFlags
from moelib.train import kernel_check
from tests import tiny


def test_backends_of_the_config_hold_in_the_step_or_are_reported(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(backend, "_traced", {})
    cfg = tiny.trainer_config(tmp_path, model=tiny.model_config(), evaler=False)
    used = {"gmm": "reference", "cross_entropy": "reference"}
    cfg.kernel_backends = {**used, "quantized_matmul": "reference"}
    cfg.instantiate(parent=None).compile_train_step()
    assert {**traced_backends(), **used} == traced_backends()
    (record,) = [r for r in caplog.records if "kernel_backends" in r.getMessage()]
    assert "kernel_backends['quantized_matmul'] is 'reference', but" in record.getMessage()


def test_an_unknown_backend_is_refused_before_anything_is_written(tmp_path):
    cfg = tiny.trainer_config(tmp_path / "run").set(kernel_backends={"gmm": "cuda"})
    with pytest.raises(UserError, match="'cuda'"):
        cfg.instantiate(parent=None).run()
    assert not (tmp_path / "run").exists()


def test_the_check_of_kernels_can_be_skipped(tmp_path, monkeypatch):
    flags = TrainFlags(module="experiments.flame_moe", config="flame-moe-tiny")
    assert not flags.load().skip_kernel_check
    assert dataclasses.replace(flags, skip_kernel_check=True).load().skip_kernel_check
    monkeypatch.setattr(kernel_check, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(kernel_check, "_in_processes", None)
    cfg = tiny.trainer_config(tmp_path / "run", max_step=1, evaler=False)
    assert cfg.set(skip_kernel_check=True).instantiate(parent=None).run()["step"] == 1
