"""Open models at their published sizes: Llama, Qwen, Mixtral, OLMoE, DeepSeek and others."""

from collections.abc import Callable, Mapping

from moelib.train.trainer import SpmdTrainer

from . import deepseek, glm, granite, kimi, llama, minimax, mixtral, nemotron, olmoe, qwen, solar

FAMILIES = (llama, qwen, mixtral, olmoe, deepseek, kimi, glm, minimax, solar, granite, nemotron)


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return {
        name: make for family in FAMILIES for name, make in family.named_trainer_configs().items()
    }
