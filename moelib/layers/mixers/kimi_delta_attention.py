"""Kimi Delta Attention: the delta rule with a decay per key channel, and a sigmoid gate."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.core.config import config_class
from moelib.core.config_types import PositiveInt
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers.base import weight_spec
from moelib.layers.mixers.delta_net import DeltaNet
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation


class KimiDeltaAttention(DeltaNet):
    """A `DeltaNet` whose key channels forget at different rates; decays and gate are low-rank.

    Source: Kimi Linear, arXiv:2510.26692, section 3.
    """

    projections: ClassVar[tuple[str, ...]] = (*DeltaNet.projections, "gate_up")

    @config_class
    class Config(DeltaNet.Config):
        # Size between the two matrices of the decays, and of the gate; V if None.
        low_rank_dim: PositiveInt | None = None

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: KimiDeltaAttention.Config = self.config
        rank = cfg.low_rank_dim or cfg.value_head_dim
        down = weight_spec((cfg.input_dim, rank), ("embed", None))

        def up(dim: int) -> ParameterSpec:
            shape = (rank, cfg.num_value_heads, dim)
            return weight_spec(shape, ("embed", "heads", "head_dim"))

        return {
            **super()._create_layer_parameter_specs(),
            "decay_down": down,
            "decay_up": up(cfg.key_head_dim),
            "gate_down": down,
            "gate_up": up(cfg.value_head_dim),
        }

    def _decays(self) -> tuple[int, ...]:
        return self.config.num_value_heads, self.config.key_head_dim

    def _decay_input(self, x: Float[Array, "B S D"], params: Nested) -> Float[Array, "B S H K"]:
        return self._low_rank(x, params, "decay")

    def _gate(self, x: Float[Array, "B S D"], params: Nested) -> Float32[Array, "B S H V"]:
        gate = save_activation(self._low_rank(x, params, "gate"), "mixer_gate")
        return jax.nn.sigmoid(gate.astype(jnp.float32))

    def _low_rank(self, x: Float[Array, "B S D"], params: Nested, name: str) -> Any:
        return project(project(x, params[f"{name}_down"]), params[f"{name}_up"])
