"""The indexer of DeepSeek Sparse Attention: few small heads that choose the keys of each query.

Shapes: J heads, i entries of a head, R of them rotated.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import NonNegativeFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.module import in_context
from moelib.core.param import ParameterSpec
from moelib.layers.attention.cached import store
from moelib.layers.attention.sparse import Index
from moelib.layers.base import FLOAT32, BaseLayer, weight_spec
from moelib.layers.norm import BaseNorm, LayerNorm
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation


class Indexer(BaseLayer):
    """Scores pairs of tokens; queries attend to the `num_chosen` keys of the highest scores.

    It is trained by the divergence of the attention from the softmax of its scores only: neither
    does the loss of the model reach it, nor its own loss the layers before it.

    Training has two stages. With `sparse=False`, and with all other parameters frozen, it learns
    from attention to all keys; then the whole model is trained with sparse attention.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.
    """

    projections: ClassVar[tuple[str, ...]] = ("q", "k")
    trains_itself: ClassVar[bool] = True

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[PositiveInt] = REQUIRED  # D.
        query_dim: Required[PositiveInt] = REQUIRED  # Size of the queries' latent.
        num_heads: Required[PositiveInt] = REQUIRED  # J.
        index_dim: Required[PositiveInt] = REQUIRED  # i.
        num_chosen: Required[PositiveInt] = REQUIRED  # Keys that a query attends to, at most.
        # Whether attention is sparse; False for attention to all keys, which only trains the
        # indexer.
        sparse: bool = True
        rotary_dim: Required[PositiveInt] = REQUIRED  # R: the first entries of a head.
        rope: BaseLayer.Config | None = None  # Rotary embedding of these entries; None for none.
        norm: BaseNorm.Config = LayerNorm.default_config().set(eps=1e-6)  # Norm of the keys.
        # Multiplies the divergence in the objective; 0 computes none, for trained indexers.
        loss_weight: NonNegativeFloat = 1.0

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.rotary_dim > cfg.index_dim:
            raise UserError(
                f"{self._title()}: index_dim={cfg.index_dim} is below the {cfg.rotary_dim} rotated "
                "entries (rope_head_dim); set it to that or more."
            )
        if cfg.rope is not None:
            self._add_child("rope", cfg.rope)
        self._add_child("norm", cfg.norm.clone(dim=cfg.index_dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Indexer.Config = self.config
        heads, width = (cfg.num_heads, cfg.index_dim), ("embed", None)
        # The heads are few: every device computes all of them.
        return {
            "q": weight_spec((cfg.query_dim, *heads), (*width, None)),
            "k": weight_spec((cfg.input_dim, cfg.index_dim), width),
            "head_weights": weight_spec((cfg.input_dim, cfg.num_heads), width, **FLOAT32),
        }

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        shape = (batch_size, length, self.config.index_dim)
        return {"keys": ParameterSpec(shape, ("batch", None, None))}

    def forward(
        self,
        x: Float[Array, "B S D"],
        latent: Float[Array, "B S Q"],
        *,
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Index:
        """Returns the index of the tokens; for one new token per sequence, with all cached keys.

        Args:
            x: Input of the attention.
            latent: Latent of its queries.
            positions: Position of each token in its document.
            segment_ids: Number of each token's document; None for one document per sequence.
        """
        cfg: Indexer.Config = self.config
        x, latent = jax.lax.stop_gradient((x, latent))
        params = self.operands(self.own_parameters, x.dtype)
        q = save_activation(project(latent, params["q"]), "attention_index")  # [B, S, J, i]
        k = self.norm(save_activation(project(x, params["k"]), "attention_index"))
        q, k = self._rotated(q, positions), self._rotated(k[:, :, None], positions)[:, :, 0]
        weights = project(x.astype(jnp.float32), params["head_weights"])  # [B, S, J]
        weights = save_activation(weights, "attention_index")
        weights = weights * (cfg.num_heads * cfg.index_dim) ** -0.5
        if (cache := self.cache) is not None:
            held = store(cache["keys"], k, positions, segment_ids)
            self.put_cache(keys=held)
            k = held if k.shape[1] == 1 else k
        return Index(q, weights, k)

    def chooses_among(self, num_keys: int) -> bool:
        """Returns whether a query may attend to fewer keys than it sees."""
        return self.config.sparse and num_keys > self.config.num_chosen

    @in_context
    def add_loss(
        self, divergence: Float32[Array, "B S"], segment_ids: Int[Array, "B S"] | None
    ) -> None:
        """Adds the mean divergence of the tokens that are not padding to the objective."""
        mask = jnp.ones(divergence.shape, bool) if segment_ids is None else segment_ids > 0
        num_tokens = jnp.sum(mask, dtype=jnp.float32)
        mean = jnp.sum(jnp.where(mask, divergence, 0.0)) / jnp.maximum(num_tokens, 1.0)
        weight = self.config.loss_weight
        self.add_aux_loss("indexer_loss", mean, weight=weight, num_tokens=num_tokens)

    def _rotated(
        self, x: Float[Array, "B S J i"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S J i"]:
        cfg: Indexer.Config = self.config
        if cfg.rope is None:
            return x
        first, others = jnp.split(x, [cfg.rotary_dim], axis=-1)
        return jnp.concatenate([self.rope(first, positions), others], axis=-1)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        cfg: Indexer.Config = self.config
        keys_seen = (seq_len + 1) / 2  # The average.
        projections = super()._own_forward_flops_per_token(seq_len)
        return projections + 2 * keys_seen * cfg.num_heads * cfg.index_dim
