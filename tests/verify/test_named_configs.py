"""Every named config of experiments/ passes `verify`; those that are equal when small run once."""

import functools
import re
import tempfile
from collections.abc import Sequence

import jax
import pytest

from experiments import flame_moe, gpt_oss, open_models
from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core import config_text
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import ScanStack
from moelib.parallel.mesh import describe_mesh
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train.adapters import add_adapters
from moelib.verify import run
from moelib.verify.meshes import Axes, meshes_to_check
from moelib.verify.outcome import Outcome, Status
from moelib.verify.shrink import shrink
from tests.verify.tiny import outcomes

CONFIGS = {
    **flame_moe.named_trainer_configs(),
    **gpt_oss.named_trainer_configs(),
    **open_models.named_trainer_configs(),
}


PIPELINES = "pipeline=4,fsdp=2;pipeline=2,expert=2,model=2"
WITH_ADAPTERS = "expert=2,fsdp=2,model=2;data=2,fsdp=2,seq=2"
IN_FP8 = "expert=2,fsdp=2,model=2;fsdp=4,seq=2"
OF_ONE_DEVICE = [*run.SINGLE_DEVICE_CHECKS, *run.EARLY_CHECKS, "bfloat16"]


# The reason for which a small config may skip some meshes, such as two heads over model=8.
CANNOT_SPLIT = "is not divisible by"


def faults(found: list[Outcome], axes: Sequence[Axes]) -> list[str]:
    """Returns what is found, and the meshes of which nothing is known."""
    refused = {each.mesh for each in found if re.search(CANNOT_SPLIT, each.detail)}
    assert 2 * len(refused) <= len(axes), refused
    tried = {each.mesh for each in found if each.status is Status.PASSED}
    to_try = {describe_mesh(each) for each in axes} - refused - tried
    unknown = [each for each in found if each.mesh in to_try]
    return [str(each) for each in found if each.status is Status.FAILED or each in unknown]


@functools.cache
def failures(text: str) -> list[str]:
    """Returns what is found in a small config, given as text."""
    cfg = config_text.parse(text)
    axes = meshes_to_check(cfg, 8)
    found = outcomes(cfg, *axes, num_devices=8)
    jax.clear_caches()  # Else each config leaves some 700 MiB of traces and programs.
    return faults(found, axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_named_config_computes_the_same_on_every_mesh(name):
    small, _ = shrink(CONFIGS[name](), 8)
    small.set(checkpointer=Checkpointer.default_config())  # When to save is all that differs.
    assert failures(config_text.to_text(small)) == []


@functools.cache
def failures_on(meshes: str, text: str) -> list[str]:
    """Returns what is found in a small config, given as text, on some meshes."""
    cfg = config_text.parse(text)
    axes = meshes_to_check(cfg, 8, meshes)
    with tempfile.TemporaryDirectory() as folder:
        found = list(run.run_checks(cfg, axes, jax.devices(), folder, without=OF_ONE_DEVICE))
    jax.clear_caches()
    return faults(found, axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_named_config_computes_the_same_in_a_pipeline(name):
    cfg = CONFIGS[name]()
    if cfg.model.decoder.klass is not ScanStack:
        pytest.skip("its layers are no ScanStack")
    small, _ = shrink(cfg.set(pipeline_schedule=Schedule.DUALPIPE_V), 8)
    small.set(checkpointer=Checkpointer.default_config())
    assert failures_on(PIPELINES, config_text.to_text(small)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_named_config_computes_the_same_in_fp8(name):
    cfg = CONFIGS[name]()
    cfg.model.quantization = Quantization.FP8_BLOCK
    small, _ = shrink(cfg, 8)
    small.set(checkpointer=Checkpointer.default_config())
    assert failures_on(IN_FP8, config_text.to_text(small)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"]
)
def test_adapters_of_a_named_config_compute_the_same(name):
    small, _ = shrink(add_adapters(CONFIGS[name](), rank=4), 8)
    small.set(checkpointer=Checkpointer.default_config())
    assert failures_on(WITH_ADAPTERS, config_text.to_text(small)) == []
