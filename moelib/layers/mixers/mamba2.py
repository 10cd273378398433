"""Mamba-2: a state space per head, whose decay is one number of each token."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer, bias_spec, weight_spec
from moelib.layers.exchange import Exchange
from moelib.layers.mixers.convolution import CausalConvolution
from moelib.layers.mixers.delta_rule import Tokens, delta_rule, split_axes, whole_sequences
from moelib.layers.mixers.documents import documents_of
from moelib.layers.norm import RMSNorm
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation
from moelib.parallel.sharding import constrain


class Mamba2(BaseLayer):
    """H heads, each with a state of N x P; the heads of each of G groups share B and C.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T;  y_t = C_t h_t + skip x_t

    with x, B and C convolved projections of the input, and dt = softplus(projection + bias). The
    outputs, times SiLU of a gate, are normalized in the G groups of channels, and projected.

    Source: Dao and Gu, arXiv:2405.21060, sections 6 and 7, as in Nemotron-H and Granite 4.
    """

    projections: ClassVar[tuple[str, ...]] = ("x", "gate", "bc", "output")

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        num_heads: Required[PositiveInt] = REQUIRED  # H.
        head_dim: Required[PositiveInt] = REQUIRED  # P.
        state_dim: Required[PositiveInt] = REQUIRED  # N.
        num_groups: PositiveInt = 1  # G, which divides H.
        conv_width: PositiveInt = 4  # Tokens that a convolution sees, the newest included.
        conv_bias: bool = True  # Whether the convolutions have a learned bias.
        norm: RMSNorm.Config = RMSNorm.default_config()  # Norm of the outputs of a group.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.num_heads % cfg.num_groups:
            raise UserError(
                f"{self._title()}: num_heads={cfg.num_heads} is not a multiple of num_groups="
                f"{cfg.num_groups}; change one of them."
            )
        conv = CausalConvolution.default_config().set(width=cfg.conv_width, bias=cfg.conv_bias)
        heads, states = (cfg.num_heads, cfg.head_dim), (2, cfg.num_groups, cfg.state_dim)
        self._add_child("x_conv", conv.clone(channels=heads, axes=("heads", "head_dim")))
        self._add_child("bc_conv", conv.clone(channels=states, axes=(None, None, None)))
        channels = cfg.num_heads * cfg.head_dim
        self._add_child("norm", cfg.norm.clone(dim=channels, num_groups=cfg.num_groups))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Mamba2.Config = self.config
        dim, heads, axes = cfg.input_dim, (cfg.num_heads, cfg.head_dim), ("heads", "head_dim")

        def of_heads(initializer: Any) -> ParameterSpec:
            return bias_spec((cfg.num_heads,), ("heads",), initializer=initializer)

        return {
            "x": weight_spec((dim, *heads), ("embed", *axes)),
            "gate": weight_spec((dim, *heads), ("embed", *axes)),
            "bc": weight_spec(
                (dim, 2, cfg.num_groups, cfg.state_dim), ("embed", None, None, None), stacked=(1,)
            ),
            "time_step": weight_spec((dim, cfg.num_heads), ("embed", "heads")),
            "output": weight_spec(
                (*heads, dim),
                (*axes, "embed"),
                inputs=2,
                initializer=self._initializer("output_init"),
            ),
            "log_decay_rate": of_heads(initializers.log_of_uniform(1.0, 16.0)),  # Of -A.
            "time_step_bias": of_heads(initializers.inverse_softplus(1e-3, 0.1)),
            "skip": of_heads(initializers.constant(1.0)),
        }

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        del length
        cfg: Mamba2.Config = self.config
        shape = (batch_size, cfg.num_heads, cfg.state_dim, cfg.head_dim)
        return {"state": ParameterSpec(shape, ("batch", "heads", None, None), dtype="float32")}

    def forward(
        self,
        x: Float[Array, "B S D"],
        *,
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output; a token sees itself and earlier tokens of its segment.

        The state begins at 0 in each document, and padding leaves it as it is. With a cache in the
        state, the tokens are whole prompts (S above 1), or follow those of the cached state
        (S = 1).
        """
        del positions
        documents = documents_of(segment_ids, x.shape[:2])
        params = self.operands(self.own_parameters, x.dtype)
        split = split_axes(x.shape[1])
        u = save_activation(project(x, params["x"]), "mixer_v")  # [B, S, H, P]
        bc = save_activation(project(x, params["bc"]), "mixer_qk")  # [B, S, 2, G, N]
        gate = save_activation(project(x, params["gate"]), "mixer_gate")  # [B, S, H, P]
        u = jax.nn.silu(self.x_conv(whole_sequences(u), documents))
        for axes in (split[:2], split[:1]):  # Gathered over sequences after the projection.
            bc = constrain(bc, (*axes, *[None] * (bc.ndim - len(axes))))
        bc = jax.nn.silu(self.bc_conv(bc, documents)).astype(jnp.float32)
        step = constrain(project(x, params["time_step"]), split[:3]).astype(jnp.float32)
        step = jax.nn.softplus(step + params["time_step_bias"][None, None])
        step = jnp.where(documents.valid[..., None], step, 0.0)  # [B, S, H]
        log_decay = -jnp.exp(params["log_decay_rate"])[None, None] * step
        state = self.cache["state"] if self.cache is not None and x.shape[1] == 1 else None
        tokens = Tokens(bc[:, :, 1], bc[:, :, 0], u, log_decay[..., None], step, documents.number)
        out, state = delta_rule(tokens, state, corrected=False)
        if self.cache is not None:
            self.put_cache(state=state)
        out = out + params["skip"][None, None, :, None] * u.astype(jnp.float32)
        out = save_activation(constrain(out.astype(x.dtype), split), "mixer_context")
        out = out.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        out = self.norm(out.reshape(*x.shape[:2], -1)).reshape(out.shape).astype(x.dtype)
        return save_activation(project(out, params["output"], num_inputs=2), "mixer_output")

    def _own_exchange(self, seq_len: int) -> Exchange:
        cfg: Mamba2.Config = self.config
        return Exchange(
            heads=2 * cfg.num_heads * cfg.head_dim,
            heads_in_float32=2 * cfg.num_heads,
            gathered=2 * cfg.num_groups * cfg.state_dim,
        )

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: Mamba2.Config = self.config
        state = cfg.num_heads * cfg.state_dim * cfg.head_dim
        return super()._own_forward_flops_per_token(seq_len) + 2 * 2 * state  # Written and read.
