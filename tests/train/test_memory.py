"""State that does not fit into memory is refused before it is allocated."""

import dataclasses
import types

import jax
import pytest

from moelib.core.param import ParameterSpec
from moelib.learner.offload import MEMORY_KIND
from moelib.train import memory
from moelib.train.loop import TrainLoop
from moelib.train.memory import InsufficientMemoryError, check_memory
from tests import tiny

SPECS = {"a": ParameterSpec((1000, 10), (None, None), "float32")}


@dataclasses.dataclass(frozen=True, eq=False)
class Device:
    platform: str
    stats: dict | None

    def memory_stats(self):
        return self.stats


def placed(*, platform, kind="device", parts=1, limit=None, used=0):
    """Returns the sharding of an array, split by its first dimension over two devices."""
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": used}
    return {
        "a": types.SimpleNamespace(
            addressable_devices=[Device(platform, stats), Device(platform, stats)],
            memory_kind=kind,
            shard_shape=lambda shape: (shape[0] // parts, *shape[1:]),
        )
    }


def test_model_that_exceeds_host_memory_is_refused_before_it_is_built(tmp_path):
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    cfg.model.dim = 1_000_000_000_000
    with pytest.raises(InsufficientMemoryError, match=r"\d+\.\d TB .* [GT]B "):
        cfg.instantiate(parent=None).run()
    assert not (tmp_path / "config.txt").exists()


def test_devices_of_a_cpu_share_the_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(memory, "_host_memory", lambda: 79_999)
    with pytest.raises(InsufficientMemoryError, match=r"80\.0 kB"):
        check_memory(SPECS, placed(platform="cpu"))
    check_memory(SPECS, placed(platform="cpu", parts=2))


def test_each_accelerator_needs_its_shard(monkeypatch):
    check_memory(SPECS, placed(platform="gpu", parts=2, limit=50_000, used=30_000))
    check_memory(SPECS, placed(platform="gpu"))  # Its memory is unknown.
    with pytest.raises(InsufficientMemoryError, match=r"40\.0 kB.*20\.0 kB"):
        check_memory(SPECS, placed(platform="gpu", limit=50_000, used=30_000))
    monkeypatch.setattr(memory, "_host_memory", lambda: 79_999)
    with pytest.raises(InsufficientMemoryError, match="host memory"):
        check_memory(SPECS, placed(platform="gpu", kind=MEMORY_KIND, limit=1))


def test_a_full_device_is_explained_by_what_takes_less(tmp_path, monkeypatch):
    def run(self):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(TrainLoop, "run", run)
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nAt: step.py"
    with pytest.raises(
        InsufficientMemoryError, match=r"allocate 9 bytes.\).*num_microbatches above 1"
    ):
        cfg.instantiate(parent=None).run()
    of_kernel = [f"RESOURCE_EXHAUSTED: in memory space {name}" for name in ("vmem", "smem")]
    for text in ("INTERNAL: another error", *of_kernel):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            cfg.instantiate(parent=None).run()
