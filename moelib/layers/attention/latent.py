"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

A cache holds that latent and a shared key only: kv_lora_rank + rope_head_dim numbers per token. A
new token is computed without keys and values of the earlier ones: the projections of the latent are
multiplied into its query and its output ("absorbed").
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.module import in_context
from moelib.core.param import FanAxes, ParameterSpec
from moelib.kernels.flash_attention import CONTEXT, MaskSpec
from moelib.layers.adapter import AdaptedWeight, adapter_names
from moelib.layers.attention.cached import attend_to_cache, store
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.on_mesh import attend, attention_weights
from moelib.layers.attention.sparse import Index, Keys, Queries, attend_to_chosen
from moelib.layers.attention.temperature import AttentionTemperature
from moelib.layers.base import BaseLayer, weight_spec
from moelib.layers.exchange import Exchange
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.quantization import QuantizedWeight, project
from moelib.layers.remat import save_activation
from moelib.layers.rope import RotaryEmbedding
from moelib.layers.tracing import ATTENTION_WEIGHTS, trace
from moelib.parallel.sharding import constrain


class LatentAttention(BaseLayer):
    """Causal self-attention whose keys and values are projections of a normalized latent.

    Positions enter a part of each query, and one key that all heads share in addition to their own.

    Source: DeepSeek-V2, arXiv:2405.04434, eq. 9 to 19, with the norms of section 3.1.2.
    """

    projections: ClassVar[tuple[str, ...]] = (
        *("q", "q_down", "q_up", "kv_down", "k_rope", "kv_up", "output"),
    )

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        num_heads: Required[PositiveInt] = REQUIRED  # H.
        # Size of the queries' latent; None for one full matrix.
        q_lora_rank: PositiveInt | None = None
        kv_lora_rank: Required[PositiveInt] = REQUIRED  # Size of the latent of keys and values.
        # Entries of a query or key without position.
        nope_head_dim: Required[PositiveInt] = REQUIRED
        rope_head_dim: Required[PositiveInt] = REQUIRED  # Rotated entries that follow them; even.
        v_head_dim: Required[PositiveInt] = REQUIRED  # Entries of a value.
        # Rotary embedding of queries and the shared key; None for no positions.
        rope: BaseLayer.Config | None = RotaryEmbedding.default_config()
        norm: BaseNorm.Config = RMSNorm.default_config()  # Norm of the latents.
        # Multiplies scores, which are divided by sqrt(nope + rope dims).
        score_factor: PositiveFloat = 1.0
        # Multiplies queries by a factor that grows with their position; None for none.
        temperature: AttentionTemperature.Config | None = None
        # Chooses the keys that a query attends to, by the queries' latent; None for all keys.
        indexer: Indexer.Config | None = None

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.rope_head_dim % 2:
            raise UserError(
                f"{self._title()}: rope_head_dim={cfg.rope_head_dim}; entries are rotated in "
                "pairs, so set an even number."
            )
        self._qk_head_dim: int = cfg.nope_head_dim + cfg.rope_head_dim
        if cfg.rope is not None:
            self._add_child("rope", cfg.rope)
        if cfg.q_lora_rank is not None:
            self._add_child("q_norm", cfg.norm.clone(dim=cfg.q_lora_rank))
        self._add_child("kv_norm", cfg.norm.clone(dim=cfg.kv_lora_rank))
        if cfg.temperature is not None:
            self._add_child("temperature", cfg.temperature)
        if cfg.indexer is not None:
            if cfg.q_lora_rank is None:
                raise UserError(
                    f"{self._title()}: q_lora_rank=None, but the indexer reads the queries' latent;"
                    " set q_lora_rank, or indexer=None."
                )
            sizes = {"input_dim": cfg.input_dim, "query_dim": cfg.q_lora_rank}
            rotated = {"rope": cfg.rope, "rotary_dim": cfg.rope_head_dim}
            self._add_child("indexer", cfg.indexer.clone(**sizes, **rotated))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: LatentAttention.Config = self.config
        heads, kv_dim = cfg.num_heads, cfg.nope_head_dim + cfg.v_head_dim
        down, up = ("embed", None), ("embed", "heads", "head_dim")
        specs = {
            "kv_down": weight_spec((cfg.input_dim, cfg.kv_lora_rank), down),
            "k_rope": weight_spec((cfg.input_dim, cfg.rope_head_dim), down),
            "kv_up": weight_spec((cfg.kv_lora_rank, heads, kv_dim), up),
            "output": weight_spec(
                (heads, cfg.v_head_dim, cfg.input_dim),
                ("heads", "head_dim", "embed"),
                inputs=2,
                initializer=self._initializer("output_init"),
            ),
        }
        if cfg.q_lora_rank is None:
            return specs | {"q": weight_spec((cfg.input_dim, heads, self._qk_head_dim), up)}
        return specs | {
            "q_down": weight_spec((cfg.input_dim, cfg.q_lora_rank), down),
            "q_up": weight_spec((cfg.q_lora_rank, heads, self._qk_head_dim), up),
        }

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        cfg: LatentAttention.Config = self.config
        shape = (batch_size, length, cfg.kv_lora_rank + cfg.rope_head_dim)
        return {"latent": ParameterSpec(shape, ("batch", None, None))}

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
        cfg: LatentAttention.Config = self.config
        reduced, index = x, None
        if cfg.q_lora_rank is not None:
            reduced = self.q_norm(self._projected(x, "q_down", "attention_q"))
        if cfg.indexer is not None:
            index = self.indexer(x, reduced, positions=positions, segment_ids=segment_ids)
        q = self._queries(reduced, positions)
        out = self._attend(q, *self.latents(x, positions), positions, segment_ids, index)
        y = project(out, self._weight("output", x), num_inputs=2)
        return save_activation(y, "attention_output")

    def _attend(
        self,
        q: Float[Array, "B S H qk"],
        latent: Float[Array, "B S latent"],
        key: Float[Array, "B S rope"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
        index: Index | None,
    ) -> Float[Array, "B S H v"]:
        cfg: LatentAttention.Config = self.config
        spec = MaskSpec(cfg.score_factor * self._qk_head_dim**-0.5)
        cache = self.cache
        if cache is not None:
            new = jnp.concatenate([latent, key], axis=-1)
            held = store(cache["latent"], new, positions, segment_ids)
            self.put_cache(latent=held)
            if q.shape[1] == 1:
                if index is not None and self.indexer.chooses_among(held.shape[1]):
                    return self._attend_to_chosen(q, held, index, positions, None, spec)
                return self._attend_to_latents(q, held, positions, spec)
        split = ("batch", "sequence", "activation_heads", None)
        q = constrain(q, split)
        is_sparse = index is not None and self.indexer.chooses_among(q.shape[1])
        if index is not None and (is_sparse or self._trains_indexer):
            both = jnp.concatenate([latent, key], axis=-1)
            own_key = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
            out = self._attend_to_chosen(q, both, index, own_key, segment_ids, spec)
            if is_sparse:
                return save_activation(constrain(out, split), CONTEXT)
        k, v = self.keys_and_values(latent, key)
        k, v = constrain(k, split), constrain(v, split)
        weights = functools.partial(attention_weights, q, k, segment_ids, None, spec)
        trace(self, ATTENTION_WEIGHTS, weights)
        return save_activation(constrain(attend(q, k, v, segment_ids, spec=spec), split), CONTEXT)

    @property
    def _trains_indexer(self) -> bool:
        """Whether this call computes the indexer's loss."""
        return self.indexer.config.loss_weight > 0 and self.cache is None

    def _attend_to_chosen(
        self,
        q: Float[Array, "B S H qk"],
        latents: Float[Array, "B L both"],
        index: Index,
        own_key: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
        spec: MaskSpec,
    ) -> Float[Array, "B S H v"]:
        """Returns the attention to the keys that the indexer chooses, and adds the indexer's loss.

        If it chooses all keys, the result is for the loss only, and has no gradient.
        """
        is_sparse = self.indexer.chooses_among(latents.shape[1])
        up = self._absorbed_up(q)
        if not is_sparse:
            q, latents, up = jax.lax.stop_gradient((q, latents, up))
        if not self._trains_indexer:
            index = jax.lax.stop_gradient(index)
        queries = Queries(q, index.queries, index.weights, own_key, segment_ids)
        out, divergence = attend_to_chosen(
            queries,
            Keys(latents, up, index.keys, segment_ids),
            scale=spec.scale,
            num_chosen=self.indexer.config.num_chosen if is_sparse else None,
        )
        if self._trains_indexer:
            self.indexer.add_loss(divergence, segment_ids)
        return out

    def _attend_to_latents(
        self,
        q: Float[Array, "B 1 H qk"],
        held: Float[Array, "B L both"],
        positions: Int[Array, "B 1"],
        spec: MaskSpec,
    ) -> Float[Array, "B 1 H v"]:
        """Returns the attention to the cache: one key for all heads, which is also their value.

        Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 (the absorbed matrices).
        """
        nope, rank = self.config.nope_head_dim, self.config.kv_lora_rank
        up = self._absorbed_up(q)
        q_latent = jnp.einsum("bshk,dhk->bshd", q[..., :nope], up[..., :nope])
        q = jnp.concatenate([q_latent, q[..., nope:]], axis=-1)
        # Rotated keys are summed with the latents and cut off: cheaper than a copy without them.
        out = attend_to_cache(q, held[:, None], held[:, None], positions, None, spec)
        return jnp.einsum("bshd,dhk->bshk", out[..., :rank], up[..., nope:])

    def _absorbed_up(self, q: Float[Array, "B S H qk"]) -> Float[Array, "latent H kv"]:
        """Returns the projection of latents to keys and values, in the dtype of q."""
        up = self._weight("kv_up", q)
        if isinstance(up, AdaptedWeight):
            whole = dataclasses.replace(up, weight=self._as_array(up.frozen, q))
            return whole.merged(FanAxes((0,), (1, 2)))
        return self._as_array(up, q)

    def _as_array(
        self, up: Array | QuantizedWeight, q: Float[Array, "B S H qk"]
    ) -> Float[Array, "latent H kv"]:
        if not isinstance(up, QuantizedWeight):
            return up
        values = up.dequantized(q.dtype, num_inputs=1)
        if not self.is_training:
            return values
        return values + (up.gradient_of - jax.lax.stop_gradient(up.gradient_of))

    @in_context
    def latents(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S latent"], Float[Array, "B S rope"]]:
        """Returns each token's normalized latent and rotated shared key, which a cache holds."""
        latent = self.kv_norm(self._projected(x, "kv_down", "attention_kv"))
        key = self._projected(x, "k_rope", "attention_kv")
        return latent, self._rotated(key[:, :, None], positions)[:, :, 0]

    @in_context
    def keys_and_values(
        self, latent: Float[Array, "B S latent"], key: Float[Array, "B S rope"]
    ) -> tuple[Float[Array, "B S H qk"], Float[Array, "B S H v"]]:
        """Returns all heads' keys and values from the results of `latents`."""
        nope, heads = self.config.nope_head_dim, self.config.num_heads
        kv = save_activation(project(latent, self._weight("kv_up", latent)), "attention_kv")
        shared = jnp.broadcast_to(key[:, :, None], (*key.shape[:2], heads, key.shape[-1]))
        return jnp.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]

    def _queries(
        self, x: Float[Array, "B S n"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H qk"]:
        """Returns the queries of inputs, or of their latents if queries have latents."""
        cfg: LatentAttention.Config = self.config
        up = "q" if cfg.q_lora_rank is None else "q_up"
        q = save_activation(project(x, self._weight(up, x)), "attention_q")
        nope, rope = jnp.split(q, [cfg.nope_head_dim], axis=-1)
        q = jnp.concatenate([nope, self._rotated(rope, positions)], -1)
        return q if cfg.temperature is None else self.temperature(q, positions)

    def _projected(self, x: Float[Array, "B S D"], name: str, point: str) -> Float[Array, "B S n"]:
        return save_activation(project(x, self._weight(name, x)), point)

    def _rotated(
        self, x: Float[Array, "B S H rope"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H rope"]:
        return x if self.config.rope is None else self.rope(x, positions)

    def _weight(self, name: str, x: Float[Array, "..."]) -> Any:
        params = self.own_parameters
        used = {each: params[each] for each in (name, *adapter_names(name)) if each in params}
        return self.operands(used, x.dtype)[name]

    def _own_exchange(self, seq_len: int) -> Exchange:
        cfg: LatentAttention.Config = self.config
        gathered = 0
        is_sparse = cfg.indexer is not None and self.indexer.chooses_among(seq_len)
        if is_sparse or (cfg.indexer is not None and self.indexer.config.loss_weight > 0):
            gathered = cfg.kv_lora_rank + cfg.rope_head_dim + self.indexer.config.index_dim
        if is_sparse:
            return Exchange(gathered=gathered)
        heads = cfg.num_heads * (self._qk_head_dim + cfg.v_head_dim)
        return Exchange(heads, heads, gathered=gathered)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: LatentAttention.Config = self.config
        projections = super()._own_forward_flops_per_token(seq_len)
        most = seq_len  # Keys that a token attends to.
        head = self._qk_head_dim + cfg.v_head_dim  # Dimensions of a score and of a sum of values.
        if cfg.indexer is not None and self.indexer.chooses_among(seq_len):
            most = cfg.indexer.num_chosen
            head = 2 * cfg.kv_lora_rank + cfg.rope_head_dim  # The keys and values are latents.
        attended = most - most * (most - 1) / 2 / seq_len  # The average.
        return projections + 2 * attended * cfg.num_heads * head
