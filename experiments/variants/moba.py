"""Mixture of Block Attention: a query attends to the blocks of keys that it scores highest.

Source: Lu et al., MoBA, arXiv:2502.13189, eq. 2 to 6 and section 2.2 (causality).

Shapes: q queries of a chunk, K keys, n blocks, G key and value heads, H = G r query heads.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.layers.attention.cached import held_positions
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer

_CHUNK = 64  # Queries whose scores are held at once.


class BlockAttention(GroupedQueryAttention):
    """Attention to the tokens of `num_blocks` blocks of earlier tokens, the query's own included.

    Blocks are counted from the beginning of a document. A query's score of a block is its product
    with the mean of the block's keys, per query head; its own block is always among the best, and
    the choice has no gradient. Scores of all keys are computed and masked, chunk by chunk: the
    results of MoBA at the cost of full attention in XLA, and no speedup.
    """

    @config_class
    class Config(GroupedQueryAttention.Config):
        block_size: PositiveInt = 512  # Tokens of a block (paper, section 3.1).
        num_blocks: PositiveInt = 3  # Blocks that a query attends to, its own included.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        for name in ("window", "sinks", "logit_cap"):
            if value := getattr(self.config, name):
                raise UserError(f"{self._title()}: {name}={value}: block attention has none.")

    def _attend(
        self,
        q: Float[Array, "B S H Dh"],
        k: Float[Array, "B S G Dh"],
        v: Float[Array, "B S G Dh"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
        sinks: Float[Array, "H"] | None,
    ) -> Float[Array, "B S H Dh"]:
        del sinks
        if (cached := self._store(k, v, positions, segment_ids)) is not None:
            k, v = (x.swapaxes(1, 2) for x in cached)  # [B, L, G, Dh]
            held = held_positions(positions[:, 0], k.shape[1])
            same = (held >= 0)[:, None]  # [B, 1, L]
            num = -(-k.shape[1] // self.config.block_size)
            return self._chunk(k, v, held, num, q, positions, same)
        num = -(-q.shape[1] // self.config.block_size)
        if segment_ids is None:
            segment_ids = jnp.ones_like(positions)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def run(queries: tuple[Array, Array, Array]) -> Array:
            q, at, segments = queries
            same = segments[:, :, None] == segment_ids[:, None, :]
            return self._chunk(k, v, positions, num, q, at, same)

        size = min(_CHUNK, q.shape[1])
        queries = [_chunks(x, size) for x in (q, positions, segment_ids)]
        out = jax.lax.map(run, tuple(queries))  # [chunks, B, size, H, Dh]
        out = jnp.moveaxis(out, 0, 1).reshape(len(q), -1, *q.shape[2:])
        return out[:, : q.shape[1]]

    def _chunk(
        self,
        k: Float[Array, "B K G Dh"],
        v: Float[Array, "B K G Dh"],
        k_positions: Int[Array, "B K"],
        num: int,
        q: Float[Array, "B q H Dh"],
        q_positions: Int[Array, "B q"],
        same: Bool[Array, "B #q K"],
    ) -> Float[Array, "B q H Dh"]:
        """Returns the attention of some queries; `same` is whether a key is of their document."""
        size, (batch, length, _, dim) = self.config.block_size, q.shape
        grouped = q.reshape(batch, length, k.shape[2], -1, dim)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, k, preferred_element_type=jnp.float32)
        block, own = k_positions // size, q_positions // size
        member = (block[..., None] == jnp.arange(num)[None, None]).astype(jnp.float32)  # [B, K, n]
        same = jnp.broadcast_to(same, (batch, length, k.shape[1]))
        count = jnp.einsum("bqk,bkn->bqn", same.astype(jnp.float32), member)[:, None, None]
        of_document = jnp.where(same[:, None, None], jax.lax.stop_gradient(scores), 0.0)
        # The product with the mean key is the mean of the products.
        gate = jnp.einsum("bgrqk,bkn->bgrqn", of_document, member) / jnp.maximum(count, 1.0)
        index, own = jnp.arange(num)[None, None, None, None], own[:, None, None, :, None]
        gate = jnp.where(index == own, jnp.inf, jnp.where(index < own, gate, -jnp.inf))
        _, chosen = jax.lax.top_k(gate, min(self.config.num_blocks, num))
        picked = jnp.any(chosen[..., None] == jnp.arange(num)[(None,) * 5], -2)  # [B, G, r, q, n]
        seen = jnp.einsum("bgrqn,bkn->bgrqk", picked.astype(jnp.float32), member) > 0
        causal = k_positions[:, None] <= q_positions[..., None]
        seen = seen & (same & causal)[:, None, None]
        probs = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, -1e30), -1).astype(v.dtype)
        return jnp.einsum("bgrqk,bkgd->bqgrd", probs, v).reshape(q.shape)


def _chunks(x: Array, size: int) -> Array:
    """Returns [B, S, ...] as [chunks, B, size, ...], padded at the end."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)


class UseBlockAttention(ConfigModifier):
    """Replaces grouped-query attention in a trainer's model."""

    @config_class
    class Config(ConfigModifier.Config):
        block_size: PositiveInt = 512  # See `BlockAttention`.
        num_blocks: PositiveInt = 3

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""
        sizes = {name: getattr(self.config, name) for name in ("block_size", "num_blocks")}
        new = BlockAttention.default_config().set(**sizes)
        replace_layer_config_recursively(cfg.model, GroupedQueryAttention, new)
        return cfg
