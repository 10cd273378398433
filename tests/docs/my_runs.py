"""The module of named configs that docs/write_a_config.md shows."""

from collections.abc import Callable, Mapping

from experiments import flame_moe
from moelib.layers.moe.router import Score
from moelib.train.trainer import SpmdTrainer


# --8<-- [start:module]
def sigmoid() -> SpmdTrainer.Config:
    """Returns the laptop model with the router scores of DeepSeek-V3."""
    cfg = flame_moe.tiny()
    cfg.model.decoder.block[0].feed_forward.router.set(score=Score.SIGMOID, renormalize=True)
    return cfg.set(max_step=1000)


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    return {"tiny-sigmoid": sigmoid}
    # --8<-- [end:module]
