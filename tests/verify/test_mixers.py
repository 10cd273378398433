"""Layers with a state, and sparse attention, pass `verify` on meshes and in a pipeline."""

import tempfile
from typing import Any

import jax
import pytest

from moelib.core.config import config_for_function
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.base import BaseLayer
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.layers.norm import RMSNorm
from moelib.layers.remat import remat
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train.trainer import SpmdTrainer
from moelib.verify import run
from moelib.verify.meshes import meshes_to_check
from moelib.verify.outcome import Status
from moelib.verify.shrink import shrink
from tests.limits import free_programs
from tests.verify.user_configs import balanced_moe, trainer

NORM = RMSNorm.default_config().set(zero_centered=True)
SIZES = {"num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 12}
INDEXER = Indexer.default_config().set(num_heads=8, index_dim=24, num_chosen=2048)
LATENT = {"kv_lora_rank": 8, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}
SPARSE = LatentAttention.default_config().set(num_heads=8, q_lora_rank=8, indexer=INDEXER, **LATENT)
# Attention and the layer before it: one with a state, or sparse attention.
MIXERS: dict[str, tuple[BaseLayer.Config, BaseLayer.Config]] = {
    "gated_delta_net": (
        GatedDeltaNet.default_config().set(num_key_heads=4, **SIZES),
        GroupedQueryAttention.default_config().set(
            num_heads=8, num_kv_heads=4, output_gate=True, qk_norm=NORM
        ),
    ),
    "kimi_delta_attention": (
        KimiDeltaAttention.default_config().set(**SIZES),
        LatentAttention.default_config().set(num_heads=8, rope=None, **LATENT),
    ),
    "sparse": (SPARSE, SPARSE.clone(indexer=INDEXER.clone(sparse=False))),
    "mamba2": (
        Mamba2.default_config().set(num_heads=8, num_groups=4, state_dim=8, head_dim=6),
        GroupedQueryAttention.default_config().set(num_heads=8, num_kv_heads=4, rope=None),
    ),
}


def trainer_of(name: str, num_layers: int) -> SpmdTrainer.Config:
    """Returns a trainer of blocks of both mixers, each with experts, which are recomputed."""
    layer = balanced_moe(num_experts=8).set(norm=NORM)
    layers = (layer.clone(self_attention=mixer) for mixer in MIXERS[name])
    return trainer(*layers, num_layers=num_layers, remat=config_for_function(remat))


def failures(cfg: Any, meshes: str) -> list[str]:
    """Returns what is found in a config made small, on one device and on these meshes."""
    small, _ = shrink(cfg, 8)
    axes = meshes_to_check(small, 8, meshes)
    with tempfile.TemporaryDirectory() as folder:
        found = list(run.run_checks(small, axes, jax.devices(), folder, without=["interrupted"]))
    free_programs()
    tried = {each.mesh for each in found if each.status is Status.PASSED}
    assert len(tried) == 1 + len(axes), found
    return [str(each) for each in found if each.status is Status.FAILED]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_compute_the_same_on_meshes(name):
    cfg = trainer_of(name, num_layers=4).set(num_microbatches=2)
    assert failures(cfg, "expert=2,fsdp=2,model=2;data=8") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_net", "sparse"])
def test_mixers_compute_the_same_in_a_pipeline(name):
    cfg = trainer_of(name, num_layers=4)
    cfg.set(num_microbatches=4, pipeline_schedule=Schedule.ZB_H1)
    assert failures(cfg, "pipeline=2,fsdp=2,model=2") == []


@pytest.mark.slow
def test_layers_of_one_part_compute_the_same_in_a_pipeline():
    mixer = balanced_moe(num_experts=8).set(self_attention=MIXERS["mamba2"][0], feed_forward=None)
    experts = balanced_moe(num_experts=8, latent_dim=12).set(self_attention=None)
    cfg = trainer(mixer, experts, num_layers=4, remat=config_for_function(remat))
    cfg.set(num_microbatches=4, pipeline_schedule=Schedule.ZB_H1)
    assert failures(cfg, "pipeline=2,expert=2,model=2") == []
