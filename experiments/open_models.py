"""Open models at their published sizes: Llama, Qwen, Mistral, OLMo, DeepSeek and others."""

from collections.abc import Callable, Mapping

from moelib.train.trainer import SpmdTrainer

from . import deepseek, glm, granite, kimi, llama, mixtral, nemotron, olmo, one_size, qwen

FAMILIES = (llama, qwen, mixtral, olmo, deepseek, kimi, glm, granite, nemotron, one_size)


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return {
        name: make for family in FAMILIES for name, make in family.named_trainer_configs().items()
    }
