"""Sparse latent attention: each query attends to the keys that an index scores highest.

Queries are computed in chunks, of which the backward pass recomputes one at a time, so that no
array of all pairs of tokens is in memory. The chosen latents are gathered: they are keys and values
of all heads ("absorbed", see moelib.layers.attention.latent). The alternative, a mask over keys and
values of all tokens, multiplies all pairs. For the forward and backward pass of a layer of
DeepSeek-V3.2 over 32,768 tokens (128 heads, 2,048 chosen keys, bfloat16, chunks of 64), XLA for TPU
v6e counts 3.5 TB of memory traffic, 85 TFLOPs and 0.9 GB of temporary arrays with the gather and
the divergence, and 13 TB, 290 TFLOPs and 3.6 GB with the mask and without the divergence. With 16
heads per device both have about the same traffic.

Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

Shapes: H heads, q and v entries of their queries and values, L keys, n entries of a latent and the
rotated key next to it, J heads of the index, i entries of each, K keys that a query attends to, c
queries of a chunk.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import xlogy
from jaxtyping import Array, Float, Float32, Int

from moelib.core.varying import vary
from moelib.parallel import collectives, sharding

_CHUNK = 64  # Most queries of a chunk.


class Index(NamedTuple):
    """Projections of tokens, of which the score of a query and a key is sum_j w_j ReLU(q_j . k)."""

    queries: Float[Array, "B S J i"]
    weights: Float32[Array, "B S J"]  # Weights of the heads.
    keys: Float[Array, "B L i"]


class Queries(NamedTuple):
    """Queries, and what decides which keys they see."""

    q: Float[Array, "B S H q"]
    index_queries: Float[Array, "B S J i"]
    index_weights: Float32[Array, "B S J"]
    own_key: Int[Array, "B S"]  # Number of the query's own key: it sees this one and earlier ones.
    segment_ids: Int[Array, "B S"] | None  # It sees keys of its segment; None for all.


class Keys(NamedTuple):
    """Keys and values of all heads, as the latents of which they are projections."""

    latents: Float[Array, "B L n"]  # Latents, each followed by its rotated key.
    up: Float[Array, "latent H kv"]  # The projection: entries of keys, then those of values.
    index_keys: Float[Array, "B L i"]
    segment_ids: Int[Array, "B L"] | None

    def in_float32(self) -> "Keys":
        """Returns the keys with float32 arrays: their gradients are sums over chunks."""
        floats = jax.tree.map(lambda x: x.astype(jnp.float32), self._replace(segment_ids=None))
        return floats._replace(segment_ids=self.segment_ids)


Results = tuple[Float[Array, "B S H v"], Float32[Array, "B S"]]


def attend_to_chosen(
    queries: Queries, keys: Keys, *, scale: float, num_chosen: int | None
) -> Results:
    """Returns (outputs of the heads, divergence of their attention from the index).

    A query attends to the `num_chosen` keys of the highest scores among those that it sees, of
    equal ones to the earlier. The divergence is KL(p || softmax of the scores) over the keys that
    it attends to, p being the mean attention of the heads, as a constant (eq. 4 of the source). No
    other gradient goes through the scores.

    Args:
        queries: The queries.
        keys: Keys and values.
        scale: Factor of the products of queries and keys.
        num_chosen: K, below L; None for all keys.

    Raises:
        SplitError: If the mesh does not divide the batch, the sequences or the heads.
    """
    attend = functools.partial(_in_chunks, scale=scale, num_chosen=num_chosen)
    are_new = queries.q.shape[1] > 1  # The keys, which are those of the queries' own tokens.
    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return attend(queries, keys.in_float32() if are_new else keys)
    shape = dict(mesh.shape)
    axes = ("batch", "sequence" if are_new else None, "activation_heads", None)
    split = sharding.partition_spec(axes, shape, shape=queries.q.shape, array="sparse attention")
    of_batch, of_tokens, of_heads = (
        sharding.mesh_axes(name, shape) if name else () for name in axes[:3]
    )
    P = jax.sharding.PartitionSpec
    rows = P(*split[:2])

    def whole(x: Any) -> Any:
        """Returns the array of all keys of the sequences, or None for none."""
        return jax.tree.map(lambda x: collectives.gather(x, rows, keep=of_batch), x)

    def local(queries: Queries, keys: Keys) -> Results:
        latents, index_keys = whole(keys.latents), whole(keys.index_keys)
        keys = Keys(latents, keys.up, index_keys, whole(keys.segment_ids))
        if are_new:
            keys = keys.in_float32()
        # All devices of the same queries compute the same index, whose gradients are not summed.
        queries = queries._replace(q=vary(queries.q, of_heads))
        latents, up = vary(keys.latents, of_heads), vary(keys.up, (*of_batch, *of_tokens))
        return attend(queries, keys._replace(latents=latents, up=up), head_axes=of_heads)

    of_queries = Queries._make([split, *[rows] * 4])
    of_keys = Keys._make([rows, P(None, split[2]), rows, rows])
    run = jax.shard_map(local, in_specs=(of_queries, of_keys), out_specs=(split, rows))
    return run(queries, keys)


def _in_chunks(
    queries: Queries,
    keys: Keys,
    *,
    scale: float,
    num_chosen: int | None,
    head_axes: tuple[str, ...] = (),
) -> Results:
    """Returns the results of one device, whose heads are split over these mesh axes."""
    batch, length = queries.own_key.shape
    num_chunks = -(-length // _CHUNK)
    size = -(-length // num_chunks)
    attend = functools.partial(
        _attend, keys=keys, scale=scale, num_chosen=num_chosen, head_axes=head_axes
    )
    if num_chunks == 1:
        return attend(queries)

    def chunks(x: Array) -> Array:
        last = [(0, 0), (0, num_chunks * size - length), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, last, mode="edge")
        return x.reshape(batch, num_chunks, size, *x.shape[2:]).swapaxes(0, 1)

    results = lax.map(jax.checkpoint(attend, prevent_cse=False), jax.tree.map(chunks, queries))
    join = lambda x: x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :length]
    return jax.tree.map(join, results)


def _attend(
    queries: Queries,
    *,
    keys: Keys,
    scale: float,
    num_chosen: int | None,
    head_axes: tuple[str, ...],
) -> Results:
    """Returns the results of a chunk of queries."""
    q, dtype = queries.q, queries.q.dtype
    latents, index_keys, dims = keys.latents, keys.index_keys, "bk"
    own_segment, segments = queries.segment_ids, keys.segment_ids
    seen = jnp.arange(latents.shape[1])[None, None] <= queries.own_key[..., None]
    if own_segment is not None and segments is not None:
        seen &= own_segment[..., None] == segments[:, None]  # [B, c, L]
    if num_chosen is not None:
        scores = _scores(*lax.stop_gradient((queries, index_keys)), dims)
        best, ids = lax.top_k(jnp.where(seen, scores, -jnp.inf), num_chosen)  # [B, c, K]
        gather = jax.vmap(lambda x, ids: x.at[ids].get(mode="promise_in_bounds"))
        latents, index_keys = gather(latents, ids), gather(index_keys, ids)
        seen, dims = best > -jnp.inf, "bck"
    # Of chosen pairs again: their scores alone have a gradient.
    scores = jnp.where(seen, _scores(queries, index_keys, dims), -jnp.inf)
    latents, up = latents.astype(dtype), keys.up.astype(dtype)
    rank, nope = up.shape[0], q.shape[-1] - (latents.shape[-1] - up.shape[0])
    absorbed = jnp.einsum("bchk,dhk->bchd", q[..., :nope], up[..., :nope])
    absorbed = jnp.concatenate([absorbed, q[..., nope:]], axis=-1)  # [B, c, H, n]
    products = jnp.einsum(
        f"bchn,{dims}n->bchk", absorbed, latents, preferred_element_type=jnp.float32
    )
    products = jnp.where(seen[:, :, None], products * scale, -jnp.inf)
    probs = jax.nn.softmax(products, axis=-1)  # [B, c, H, K]
    out = jnp.einsum(f"bchk,{dims}n->bchn", probs.astype(dtype), latents)[..., :rank]
    out = jnp.einsum("bchd,dhk->bchk", out, up[..., nope:])
    return out, _divergence(lax.stop_gradient(probs), scores, seen, head_axes)


def _scores(
    queries: Queries, index_keys: Float[Array, "B ... i"], dims: str
) -> Float32[Array, "B c K"]:
    """Returns eq. 1 for queries and keys, which are "bk" or, of each query, "bck"."""
    q, k = queries.index_queries, index_keys.astype(queries.index_queries.dtype)
    products = jnp.einsum(f"bcji,{dims}i->bcjk", q, k, preferred_element_type=jnp.float32)
    return jnp.sum(jax.nn.relu(products) * queries.index_weights[..., None], axis=2)


def _divergence(
    probs: Float32[Array, "B c H K"],
    scores: Float32[Array, "B c K"],
    seen: Array,
    head_axes: tuple[str, ...],
) -> Float32[Array, "B c"]:
    """Returns KL(mean of probs over the heads || softmax of the scores) over the keys seen."""
    total = jnp.sum(probs, axis=2)
    if head_axes:
        total = lax.psum(total, head_axes)
    target = total / jnp.sum(total, axis=-1, keepdims=True)
    terms = xlogy(target, target) - target * jax.nn.log_softmax(scores, axis=-1)
    return jnp.sum(jnp.where(seen, terms, 0.0), axis=-1)
