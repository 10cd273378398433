"""Gated DeltaNet: the delta rule with a decay per head, and a gate by SiLU."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers.base import weight_spec
from moelib.layers.mixers.delta_net import DeltaNet
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation


class GatedDeltaNet(DeltaNet):
    """A `DeltaNet` whose heads forget at a rate that depends on the token.

    Source: Yang et al., arXiv:2412.06464, section 3.4, as in Qwen3-Next.
    """

    projections: ClassVar[tuple[str, ...]] = (*DeltaNet.projections, "gate")

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        gate = (cfg.input_dim, cfg.num_value_heads, cfg.value_head_dim)
        return {
            **super()._create_layer_parameter_specs(),
            "decay": weight_spec((cfg.input_dim, cfg.num_value_heads), ("embed", "heads")),
            "gate": weight_spec(gate, ("embed", "heads", "head_dim")),
        }

    def _decays(self) -> tuple[int, ...]:
        return (self.config.num_value_heads,)

    def _decay_input(self, x: Float[Array, "B S D"], params: Nested) -> Float[Array, "B S H"]:
        return project(x, params["decay"])

    def _gate(self, x: Float[Array, "B S D"], params: Nested) -> Float32[Array, "B S H V"]:
        gate = save_activation(project(x, params["gate"]), "mixer_gate")
        return jax.nn.silu(gate.astype(jnp.float32))
