"""Variants of attention and of Mixture-of-Experts layers from papers, swapped into flame-moe-tiny.

    moelib train --module=experiments.variants --config=flame-moe-tiny-moba --data_dir=$DATA ...

A modifier changes any trainer config: `UseBlockAttention.default_config().instantiate()(cfg)`, or
as a mesh rule, `mesh_rules=[("tpu-.*", UseBlockAttention.default_config())]`.
"""

import functools
from collections.abc import Callable, Mapping

from moelib.core.config_modifier import ConfigModifier
from moelib.train.trainer import SpmdTrainer

from ..flame_moe import tiny
from .differential_attention import UseDifferentialAttention
from .dynamic_moe import TopAnyRouter, UseDynamicMoE
from .expert_choice import UseExpertChoice
from .moba import UseBlockAttention
from .moe_plus_plus import UseMoEPlusPlus

# By name of the variant, at sizes for flame-moe-tiny: its sequences have 128 tokens.
MODIFIERS: Mapping[str, ConfigModifier.Config] = {
    "differential-attention": UseDifferentialAttention.default_config(),
    "dynamic-moe": UseDynamicMoE.default_config().set(
        router=TopAnyRouter.default_config().set(num_initial_experts=8, window_steps=50)
    ),
    "moba": UseBlockAttention.default_config().set(block_size=16),
    "moe-plus-plus": UseMoEPlusPlus.default_config(),
    "expert-choice": UseExpertChoice.default_config(),
}


def _tiny(modifier: ConfigModifier.Config) -> SpmdTrainer.Config:
    return modifier.instantiate()(tiny())


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return {
        f"flame-moe-tiny-{name}": functools.partial(_tiny, modifier)
        for name, modifier in MODIFIERS.items()
    }
