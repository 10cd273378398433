"""Attention on a mesh: heads and rows of the batch split, and the sequence as a ring of devices.

The kernels see the part of one device. Along `seq` each device keeps its queries, and the keys and
values travel round the ring, so that no device ever holds a whole row (Liu et al., Ring Attention,
arXiv:2310.01889). In the backward pass they travel again, with their gradients.

Under a causal mask the first device would have nothing to do and the last one everything: so of 2 n
equal pieces of a row device i gets the pieces i and 2 n - 1 - i while attention is computed.

Shapes: n devices of the ring, s = S / n tokens of one device.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary, varying_axes
from moelib.kernels.flash_attention import (
    CONTEXT,
    EMPTY,
    MaskSpec,
    Positions,
    flash_attention,
    shards,
)
from moelib.parallel import sharding


def attend(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    *,
    spec: MaskSpec,
) -> Float[Array, "B S H Dh"]:
    """Returns causal attention, on whatever mesh is set.

    Args:
        q: Queries.
        k: Keys; the mesh axes that split heads must divide G.
        v: Values.
        segment_ids: Tokens attend only inside their segment; None for one segment a row.
        sinks: One more score for each head, which has no value.
        spec: Scale of the scores, window and cap.

    Raises:
        ValueError: As `flash_attention`; or if the mesh does not divide batch, sequence or heads.
    """
    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return flash_attention(q, k, v, spec, segment_ids=segment_ids, sinks=sinks)
    shape = dict(mesh.shape)
    axes = ("batch", "sequence", "activation_heads", None)
    split = sharding.partition_spec(axes, shape, shape=k.shape, array="attention's keys")
    ring = sharding.mesh_axes("sequence", shape)
    pieces = 2 * math.prod(shape[axis] for axis in ring)
    if ring and q.shape[1] % pieces:
        raise sharding.SplitError(
            f"attention: the sequence of {q.shape[1]} does not divide into {pieces} pieces, two "
            f"for each device of the mesh axes {', '.join(ring)}; change its length or the mesh."
        )
    used = tuple(a for name in axes if name for a in sharding.mesh_axes(name, shape))

    def local(arrays: tuple[Any, ...]) -> Array:
        q, k, v, segments, sinks = vary(arrays, used)
        if not ring:
            return flash_attention(q, k, v, spec, segment_ids=segments, sinks=sinks)
        return _in_zigzag(ring, spec, q, k, v, segments, sinks)

    P = jax.sharding.PartitionSpec
    specs = (split, split, split, P(*split[:2]), P(split[2]))
    arrays = (q, k, v, segment_ids, sinks)
    return jax.shard_map(local, in_specs=(specs,), out_specs=split)(arrays)


def _in_zigzag(
    axes: tuple[str, ...],
    spec: MaskSpec,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
) -> Array:
    """Attends with pieces dealt out so that each device has the same to do, and deals them back."""
    n = lax.axis_size(axes)
    index = _piece_index(axes, n, q.shape[1] // 2)
    deal = functools.partial(_deal, axes=axes, n=n)
    q, k, v, segments = jax.tree.map(deal, (q, k, v, segments))  # Segments may be None.
    return _deal(_ring(axes, spec, q, k, v, sinks, index, segments), axes=axes, n=n, back=True)


def _home(piece: int, n: int) -> int:
    """Returns the device that computes a piece of 2 n."""
    return piece if piece < n else 2 * n - 1 - piece


def _deal(x: Array, *, axes: tuple[str, ...], n: int, back: bool = False) -> Array:
    """Sends a device's two pieces [B, 2, s / 2, ...] to where they are computed, or back.

    The even pieces of all devices go to different ones, and so do the odd ones.
    """
    halves = []
    for parity, half in enumerate(jnp.split(x, 2, axis=1)):
        pairs = [(i, _home(2 * i + parity, n)) for i in range(n)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        halves.append(lax.ppermute(half, axes, pairs))
    return jnp.concatenate(halves, axis=1)


def _piece_index(axes: tuple[str, ...], n: int, size: int) -> Int[Array, "s"]:
    """Returns where a device's tokens stand in the row after dealing: even piece, odd piece."""
    me = lax.axis_index(axes)
    low, high = me, 2 * n - 1 - me  # One of them is even.
    even, odd = jnp.where(me % 2 == 0, low, high), jnp.where(me % 2 == 0, high, low)
    place = jnp.arange(size, dtype=jnp.int32)
    return jnp.concatenate([even * size + place, odd * size + place]).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    axes: tuple[str, ...],
    spec: MaskSpec,
    q: Float[Array, "B s H Dh"],
    k: Float[Array, "B s G Dh"],
    v: Float[Array, "B s G Dh"],
    sinks: Float[Array, "H"] | None,
    index: Int[Array, "s"],
    segments: Int[Array, "B s"] | None,
) -> Float[Array, "B s H Dh"]:
    """Returns the attention of this device's queries to the keys of all devices of the ring."""
    return _forward(axes, spec, q, k, v, sinks, index, segments)[0]


def _rotate(tree: Any, axes: tuple[str, ...]) -> Any:
    n = lax.axis_size(axes)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def _forward(
    axes: tuple[str, ...],
    spec: MaskSpec,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    index: Array,
    segments: Array | None,
) -> tuple[Array, tuple]:
    def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        part, here = carry
        after = _rotate(here, axes)  # On its way while this shard is computed.
        k, v, k_index, k_segments = here
        positions = Positions(index, k_index, segments, k_segments)
        made = shards.attention_forward(q, k, v, positions, spec)
        return (shards.merge(part, made), after), None

    batch, size, heads, _ = q.shape
    part = jnp.zeros(q.shape, jnp.float32), jnp.full((batch, heads, size), EMPTY, jnp.float32)
    # Every array varies as the keys and the ring do.
    start = vary((part, (k, v, index, segments)), sorted(varying_axes(q)))
    (part, _), _ = lax.scan(step, start, None, length=lax.axis_size(axes))
    out, lse = part if sinks is None else shards.add_sinks(part, sinks)
    out, lse = (checkpoint_name(x, CONTEXT) for x in (out.astype(v.dtype), lse))
    return out, (q, k, v, sinks, index, segments, out, lse)


def _backward(axes: tuple[str, ...], spec: MaskSpec, residuals: tuple, grad: Array) -> tuple:
    q, k, v, sinks, index, segments, out, lse = residuals

    def step(carry: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
        grad_q, here, grads = carry
        k, v, k_index, k_segments = here
        after = _rotate(here, axes)
        positions = Positions(index, k_index, segments, k_segments)
        own, *others = shards.attention_backward(q, k, v, out, lse, grad, positions, spec)
        grads = _rotate(tuple(a + b for a, b in zip(grads, others, strict=True)), axes)
        return (grad_q + own, after, grads), None

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    start = (zeros(q), (k, v, index, segments), (zeros(k), zeros(v)))
    start = vary(start, sorted(varying_axes(q)))
    (grad_q, _, grads), _ = lax.scan(step, start, None, length=lax.axis_size(axes))
    of_sinks = None if sinks is None else shards.sinks_gradient(sinks, out, lse, grad)
    grad_k, grad_v = (g.astype(x.dtype) for g, x in zip(grads, (k, v), strict=True))
    return grad_q.astype(q.dtype), grad_k, grad_v, of_sinks, None, None


_ring.defvjp(_forward, _backward)
