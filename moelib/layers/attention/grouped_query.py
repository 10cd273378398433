"""Grouped-query attention: multi-head when every query head has its own keys and values."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.kernels.flash_attention import CONTEXT, MaskSpec
from moelib.layers.attention.cached import attend_to_cache, num_slots, store
from moelib.layers.attention.on_mesh import attend, attention_weights
from moelib.layers.base import BaseLayer, add_bias, bias_spec, weight_spec
from moelib.layers.exchange import Exchange
from moelib.layers.norm import BaseNorm
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation
from moelib.layers.rope import RotaryEmbedding
from moelib.layers.tracing import ATTENTION_WEIGHTS, trace
from moelib.parallel.sharding import constrain


class GroupedQueryAttention(BaseLayer):
    """Causal self-attention with H query heads that share G key and value heads.

    Source: Ainslie et al., arXiv:2305.13245. QK-norm: Dehghani et al., arXiv:2302.05442.
    """

    projections: ClassVar[tuple[str, ...]] = ("q", "kv", "gate", "output")

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        num_heads: Required[PositiveInt] = REQUIRED  # H.
        num_kv_heads: PositiveInt | None = None  # G; H if None.
        head_dim: PositiveInt | None = None  # Dh; D / H if None.
        qkv_bias: bool = False  # Whether queries, keys and values have a learned bias.
        output_bias: bool = False  # Whether the output has a learned bias.
        # Rotary embedding of queries and keys; None for no positions.
        rope: BaseLayer.Config | None = RotaryEmbedding.default_config()
        # Tokens that a token sees, itself included; None for no limit.
        window: PositiveInt | None = None
        sinks: bool = False  # Whether each head has a learned extra score without a value.
        score_scale: PositiveFloat | None = None  # Factor of the scores; Dh^-0.5 if None.
        # Scores become cap * tanh(scores / cap); None for no cap.
        logit_cap: PositiveFloat | None = None
        qk_norm: BaseNorm.Config | None = None  # Norm of queries and keys per head; None for none.
        qk_norm_joint: bool = False  # Whether qk_norm spans all heads (OLMoE, arXiv:2409.02060).
        # Norm of rotated queries and keys per head (Hunyuan); None for none.
        rotated_qk_norm: BaseNorm.Config | None = None
        qkv_clip: PositiveFloat | None = None  # Clips queries, keys and values to +-qkv_clip.
        # Whether sigmoid(x W) multiplies the heads' outputs (arXiv:2505.06708).
        output_gate: bool = False

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.head_dim is None and cfg.input_dim % cfg.num_heads:
            raise UserError(
                f"{self._title()}: input_dim={cfg.input_dim} is not a multiple of num_heads="
                f"{cfg.num_heads}; set head_dim."
            )
        self._head_dim: int = cfg.head_dim or cfg.input_dim // cfg.num_heads
        self._num_kv_heads: int = cfg.num_kv_heads or cfg.num_heads
        if cfg.num_heads % self._num_kv_heads:
            raise UserError(
                f"{self._title()}: num_heads={cfg.num_heads} is not a multiple of num_kv_heads="
                f"{self._num_kv_heads}; change one of them."
            )
        if cfg.rope is not None:
            self._add_child("rope", cfg.rope)
        if cfg.qk_norm is not None:
            for name, heads in (("q_norm", cfg.num_heads), ("k_norm", self._num_kv_heads)):
                dim = self._head_dim * (heads if cfg.qk_norm_joint else 1)
                self._add_child(name, cfg.qk_norm.clone(dim=dim))
        if cfg.rotated_qk_norm is not None:
            for name in ("rotated_q_norm", "rotated_k_norm"):
                self._add_child(name, cfg.rotated_qk_norm.clone(dim=self._head_dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: GroupedQueryAttention.Config = self.config
        heads, groups, dim = cfg.num_heads, self._num_kv_heads, self._head_dim
        specs = {
            "q": weight_spec((cfg.input_dim, heads, dim), ("embed", "heads", "head_dim")),
            "kv": weight_spec(
                (cfg.input_dim, 2, groups, dim),
                ("embed", None, "kv_heads", "head_dim"),
                stacked=(1,),
            ),
            "output": weight_spec(
                (heads, dim, cfg.input_dim),
                ("heads", "head_dim", "embed"),
                inputs=2,
                initializer=self._initializer("output_init"),
            ),
        }
        if cfg.qkv_bias:
            specs["q_bias"] = bias_spec((heads, dim), ("heads", "head_dim"))
            specs["kv_bias"] = bias_spec((2, groups, dim), (None, "kv_heads", "head_dim"))
        if cfg.output_gate:
            specs["gate"] = specs["q"]
        if cfg.output_bias:
            specs["output_bias"] = bias_spec((cfg.input_dim,), ("norm",))
        if cfg.sinks:
            specs["sinks"] = bias_spec((heads,), ("heads",))
        return specs

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        slots = num_slots(length, self.config.window)
        shape = (batch_size, self._num_kv_heads, slots, self._head_dim)
        spec = ParameterSpec(shape, ("batch", "kv_heads", None, "head_dim"))
        return {"k": spec, "v": spec}

    def forward(
        self,
        x: Float[Array, "B S D"],
        *,
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output; a token sees itself and earlier tokens of its segment.

        With a cache in the state, the tokens are stored in it: prompts (S above 1) attend among
        themselves, one new token per sequence (S = 1) to the cache (see
        moelib.layers.attention.cached).
        """
        cfg: GroupedQueryAttention.Config = self.config
        params = self.operands(self.own_parameters, x.dtype)
        q = save_activation(project(x, params["q"]), "attention_q")  # [B, S, H, Dh]
        kv = save_activation(project(x, params["kv"]), "attention_kv")  # [B, S, 2, G, Dh]
        if cfg.qkv_bias:
            q, kv = add_bias(q, params["q_bias"]), add_bias(kv, params["kv_bias"])
        k, v = kv[:, :, 0], kv[:, :, 1]  # [B, S, G, Dh]
        if cfg.qk_norm is not None:
            q, k = self._normalized(self.q_norm, q), self._normalized(self.k_norm, k)
        if cfg.qkv_clip is not None:
            q, k, v = (jnp.clip(x, -cfg.qkv_clip, cfg.qkv_clip) for x in (q, k, v))
        if cfg.rope is not None:
            q, k = self.rope(q, positions), self.rope(k, positions)
        if cfg.rotated_qk_norm is not None:
            q, k = self.rotated_q_norm(q), self.rotated_k_norm(k)
        split = ("batch", "sequence", "activation_heads", None)
        q, k, v = constrain(q, split), constrain(k, split), constrain(v, split)
        out = self._attend(q, k, v, positions, segment_ids, params.get("sinks"))
        out = save_activation(constrain(out, split), CONTEXT)
        if cfg.output_gate:
            gate = save_activation(project(x, params["gate"]), "attention_gate")
            out = out * jax.nn.sigmoid(gate)
        y = project(out, params["output"], num_inputs=2)
        y = save_activation(y, "attention_output")
        return add_bias(y, params["output_bias"]) if cfg.output_bias else y

    def _attend(
        self,
        q: Float[Array, "B S H Dh"],
        k: Float[Array, "B S G Dh"],
        v: Float[Array, "B S G Dh"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
        sinks: Float[Array, "H"] | None,
    ) -> Float[Array, "B S H Dh"]:
        """Returns the heads' outputs. Kinds of attention with the same projections override it."""
        cfg: GroupedQueryAttention.Config = self.config
        scale = cfg.score_scale or self._head_dim**-0.5
        spec = MaskSpec(scale, window=cfg.window, logit_cap=cfg.logit_cap)
        if (cached := self._store(k, v, positions, segment_ids)) is not None:
            return attend_to_cache(q, *cached, positions, sinks, spec)
        weights = functools.partial(attention_weights, q, k, segment_ids, sinks, spec)
        trace(self, ATTENTION_WEIGHTS, weights)
        return attend(q, k, v, segment_ids, sinks, spec=spec)

    def _store(
        self,
        k: Float[Array, "B S G Dh"],
        v: Float[Array, "B S G Dh"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
    ) -> tuple[Float[Array, "B G L Dh"], Float[Array, "B G L Dh"]] | None:
        """Stores the tokens in the cache, if there is one.

        Returns the cached keys and values if one new token per sequence attends to them; None for
        whole sequences, which attend among themselves.
        """
        if (cache := self.cache) is None:
            return None
        at = (positions, segment_ids, self.config.window)
        k_cache = store(cache["k"], k.swapaxes(1, 2), *at)
        v_cache = store(cache["v"], v.swapaxes(1, 2), *at)
        self.put_cache(k=k_cache, v=v_cache)
        return (k_cache, v_cache) if k.shape[1] == 1 else None

    def _normalized(self, norm: BaseNorm, x: Float[Array, "B S N Dh"]) -> Float[Array, "B S N Dh"]:
        if not self.config.qk_norm_joint:
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    def _own_exchange(self, seq_len: int) -> Exchange:
        cfg: GroupedQueryAttention.Config = self.config
        keys, queries = 2 * self._num_kv_heads, 2 * cfg.num_heads
        return Exchange(keys * self._head_dim, queries * self._head_dim, cfg.window)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: GroupedQueryAttention.Config = self.config
        projections = super()._own_forward_flops_per_token(seq_len)
        window = min(seq_len, cfg.window or seq_len)
        keys_seen = window - window * (window - 1) / 2 / seq_len  # The average.
        return projections + 2 * 2 * keys_seen * cfg.num_heads * self._head_dim
