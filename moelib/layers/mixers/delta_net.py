"""DeltaNet: the base of layers that mix tokens by the delta rule."""

import math
from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers import initializers
from moelib.layers.base import BaseLayer, bias_spec, weight_spec
from moelib.layers.exchange import Exchange
from moelib.layers.mixers.convolution import CausalConvolution
from moelib.layers.mixers.delta_rule import Tokens, delta_rule, split_axes, whole_sequences
from moelib.layers.mixers.documents import documents_of
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation
from moelib.parallel.sharding import constrain

_EPS = 1e-6  # Added to the squared length of queries and keys.


class DeltaNet(BaseLayer):
    """H heads, each with a matrix of K x V as its state; G key heads share queries and keys.

    Queries, keys and values are convolved projections of x, queries and keys of length 1. Outputs
    are normalized per head, multiplied by a gate, and projected. Kinds of layers differ in their
    decays and gates: they define `_log_decay`, `_gate`, and the parameters of both, next to
    `log_decay_rate` and `decay_bias`.
    """

    projections: ClassVar[tuple[str, ...]] = ("qk", "v", "output")

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        num_value_heads: Required[PositiveInt] = REQUIRED  # H.
        num_key_heads: PositiveInt | None = None  # G; H if None.
        key_head_dim: Required[PositiveInt] = REQUIRED  # K.
        value_head_dim: Required[PositiveInt] = REQUIRED  # V.
        conv_width: PositiveInt = 4  # Tokens that a convolution sees, the newest included.
        norm: BaseNorm.Config = RMSNorm.default_config()  # Norm of each head's output.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        self._num_key_heads: int = cfg.num_key_heads or cfg.num_value_heads
        if cfg.num_value_heads % self._num_key_heads:
            raise UserError(
                f"{self._title()}: num_value_heads={cfg.num_value_heads} is not a multiple of "
                f"num_key_heads={self._num_key_heads}; change one of them."
            )
        conv = CausalConvolution.default_config().set(width=cfg.conv_width)
        axes = "heads", "head_dim"
        qk, v = (
            (2, self._num_key_heads, cfg.key_head_dim),
            (cfg.num_value_heads, cfg.value_head_dim),
        )
        self._add_child("qk_conv", conv.clone(channels=qk, axes=(None, *axes)))
        self._add_child("v_conv", conv.clone(channels=v, axes=axes))
        self._add_child("norm", cfg.norm.clone(dim=cfg.value_head_dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: DeltaNet.Config = self.config
        heads, axes = (cfg.num_value_heads, cfg.value_head_dim), ("heads", "head_dim")
        qk = (cfg.input_dim, 2, self._num_key_heads, cfg.key_head_dim)
        decays = self._decays()
        return {
            "qk": weight_spec(qk, ("embed", None, *axes), stacked=(1,)),
            "v": weight_spec((cfg.input_dim, *heads), ("embed", *axes)),
            "beta": weight_spec((cfg.input_dim, cfg.num_value_heads), ("embed", "heads")),
            "output": weight_spec(
                (*heads, cfg.input_dim),
                (*axes, "embed"),
                inputs=2,
                initializer=self._initializer("output_init"),
            ),
            "log_decay_rate": bias_spec(
                decays[:1], ("heads",), initializer=initializers.log_of_uniform(0.01, 16.0)
            ),
            "decay_bias": bias_spec(
                decays, axes[: len(decays)], initializer=initializers.inverse_softplus(1e-3, 0.1)
            ),
        }

    @abstractmethod
    def _decays(self) -> tuple[int, ...]:
        """Returns the shape of a token's decays: (H,), or (H, K) for decays per channel."""

    @abstractmethod
    def _decay_input(self, x: Float[Array, "B S D"], params: Nested) -> Float[Array, "B S *decays"]:
        """Returns the projections of x from which decays are computed."""

    @abstractmethod
    def _gate(self, x: Float[Array, "B S D"], params: Nested) -> Float[Array, "B S H V"]:
        """Returns the factors of the normalized outputs."""

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        del length
        cfg: DeltaNet.Config = self.config
        shape = (batch_size, cfg.num_value_heads, cfg.key_head_dim, cfg.value_head_dim)
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
        qk = save_activation(project(x, params["qk"]), "mixer_qk")  # [B, S, 2, G, K]
        v = save_activation(project(x, params["v"]), "mixer_v")  # [B, S, H, V]
        qk = jax.nn.silu(self.qk_conv(whole_sequences(qk), documents))
        v = jax.nn.silu(self.v_conv(whole_sequences(v), documents))
        valid = documents.valid[..., None]
        beta = constrain(project(x, params["beta"]), split[:3])
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        state = self.cache["state"] if self.cache is not None and x.shape[1] == 1 else None
        tokens = Tokens(
            *self._queries_and_keys(qk),
            v,
            jnp.where(valid[..., None], self._log_decay(x, params), 0.0),
            jnp.where(valid, beta, 0.0),
            documents.number,
        )
        out, state = delta_rule(tokens, state)
        if self.cache is not None:
            self.put_cache(state=state)
        out = save_activation(constrain(out.astype(x.dtype), split), "mixer_context")
        out = self.norm(out.astype(jnp.float32)) * self._gate(x, params)  # In float32.
        y = project(out.astype(x.dtype), params["output"], num_inputs=2)
        return save_activation(y, "mixer_output")

    def _queries_and_keys(
        self, qk: Float[Array, "B S 2 G K"]
    ) -> tuple[Float32[Array, "B S G K"], Float32[Array, "B S G K"]]:
        """Returns queries of length K^-0.5 and keys of length 1."""
        qk = qk.astype(jnp.float32)
        qk = qk * jax.lax.rsqrt(jnp.sum(jnp.square(qk), -1, keepdims=True) + _EPS)
        return qk[:, :, 0] * self.config.key_head_dim**-0.5, qk[:, :, 1]

    def _log_decay(self, x: Float[Array, "B S D"], params: Nested) -> Float32[Array, "B S H A"]:
        """Returns -rate * softplus(projection of x + bias)."""
        step = self._decay_input(x, params)  # [B, S, *decays]
        step = constrain(step, split_axes(x.shape[1])[: step.ndim]).astype(jnp.float32)
        step = step + params["decay_bias"][None, None]
        step = jax.nn.softplus(step.reshape(*x.shape[:2], self.config.num_value_heads, -1))
        return -jnp.exp(params["log_decay_rate"])[None, None, :, None] * step

    def _own_exchange(self, seq_len: int) -> Exchange:
        cfg: DeltaNet.Config = self.config
        keys = self._num_key_heads * cfg.key_head_dim
        values = cfg.num_value_heads * cfg.value_head_dim
        decays = math.prod(self._decays()) + cfg.num_value_heads  # And strengths.
        return Exchange(heads=2 * (keys + values), heads_in_float32=decays)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: DeltaNet.Config = self.config
        state = cfg.num_value_heads * cfg.key_head_dim * cfg.value_head_dim
        # A token reads the state by its key and by its query, and writes to it.
        return super()._own_forward_flops_per_token(seq_len) + 3 * 2 * state
