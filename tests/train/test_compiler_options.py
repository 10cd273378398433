"""Options of the compiler: the deterministic ones, and those that contradict them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.train.compiler_options import compile_with, deterministic_options, spelled
from tests import tiny


def test_only_gpus_need_options_to_be_deterministic():
    assert deterministic_options("TPU v5p") == deterministic_options("cpu") == {}
    assert deterministic_options("NVIDIA H100")["xla_gpu_deterministic_ops"] == "True"


def test_the_compiler_knows_the_deterministic_options():
    lowered = jax.jit(jnp.sum).lower(np.ones(4, np.float32))
    assert compile_with(lowered, deterministic_options("NVIDIA H100"))(np.ones(4, np.float32)) == 4


def test_an_option_that_contradicts_determinism_is_refused(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path).set(deterministic=True)
    cfg.compiler_options = {"xla_gpu_autotune_level": "4", "xla_gpu_deterministic_ops": "true"}
    trainer = cfg.instantiate(parent=None)
    gpu = np.array([SimpleNamespace(device_kind="NVIDIA H100")])
    monkeypatch.setattr(type(trainer), "mesh", lambda self: SimpleNamespace(devices=gpu))
    with pytest.raises(ValueError, match=r"xla_gpu_autotune_level=4.*deterministic=True"):
        trainer.compiler_options()
    del trainer.config.compiler_options["xla_gpu_autotune_level"]
    assert trainer.compiler_options().items() >= spelled(deterministic_options("NVIDIA")).items()
