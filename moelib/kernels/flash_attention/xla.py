"""Attention in blocks of queries: memory linear in the sequence, in plain XLA.

Each block holds its scores [B, H, block, S] only while it is computed, and computes them again in
the backward pass (Rabe and Staats, arXiv:2112.05682). Blocks behind the diagonal are cut off
statically, so causal attention does about half of the work.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention.reference import attend, attention_mask


def xla(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    scale: float,
    block: int = 512,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences, `block` queries at a time."""
    seq_len = q.shape[1]

    def one(start: int, q_block: Array, k: Array, v: Array, segments: Array | None) -> Array:
        stop = start + q_block.shape[1]
        q_segments = None if segments is None else segments[:, start:stop]
        mask = attention_mask(
            jnp.arange(start, stop), jnp.arange(k.shape[1]), q_segments, segments, causal=causal
        )
        return attend(q_block, k, v, mask, scale=scale)

    blocks = []
    for start in range(0, seq_len, block):
        stop = min(start + block, seq_len)
        last = stop if causal else seq_len
        segments = None if segment_ids is None else segment_ids[:, :last]
        run = functools.partial(one, start)
        run = jax.checkpoint(run) if seq_len > block else run
        blocks.append(run(q[:, start:stop], k[:, :last], v[:, :last], segments))
    return jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
