"""Attention on a mesh: batch and heads sharded, and the sequence as a ring of devices.

Kernels see the part of one device. Along `seq` each device keeps its queries, and keys and values
travel round the ring, so that no device ever holds a whole sequence (Liu et al., Ring Attention,
arXiv:2310.01889). In the backward pass they travel again, with their gradients.

Under a causal mask the first device of a plain split would have least work and the last one most.
So the sequence is split into 2 n equal pieces, and device i computes the pieces i and 2 n - 1 - i
(zigzag).

Shapes: n devices of the ring, s = S / n tokens per device.
"""

import functools
import math
from typing import Any, NamedTuple

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
    passes,
)
from moelib.parallel import sharding


def attend(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dv"],
    segment_ids: Int[Array, "B S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    *,
    spec: MaskSpec,
) -> Float[Array, "B S H Dv"]:
    """Returns `flash_attention`, sharded over the current mesh if there is one.

    Raises:
        ValueError: If `flash_attention` refuses the operands, or the mesh does not divide batch,
            sequence or heads; the axes that shard heads must divide G.
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
            f"attention: seq_len={q.shape[1]} does not divide into {pieces} pieces, two for each "
            f"device of the mesh axes {', '.join(ring)}; change seq_len or the mesh."
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


class _Shard(NamedTuple):
    """The keys and values of one device, their positions and their segments."""

    k: Float[Array, "B s G Dh"]
    v: Float[Array, "B s G Dv"]
    index: Int[Array, "s"]
    segments: Int[Array, "B s"] | None


def _in_zigzag(
    axes: tuple[str, ...],
    spec: MaskSpec,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
) -> Array:
    """Returns the attention of this device's tokens, computed in zigzag order."""
    n = lax.axis_size(axes)
    index = _piece_index(axes, n, q.shape[1] // 2)
    deal = functools.partial(_deal, axes=axes, n=n)
    q, k, v, segments = jax.tree.map(deal, (q, k, v, segments))  # Segments may be None.
    out = _ring(axes, spec, q, _Shard(k, v, index, segments), sinks)
    return _deal(out, axes=axes, n=n, back=True)


def _home(piece: int, n: int) -> int:
    """Returns the device that computes a piece of 2 n."""
    return piece if piece < n else 2 * n - 1 - piece


def _deal(x: Array, *, axes: tuple[str, ...], n: int, back: bool = False) -> Array:
    """Sends a device's two pieces [B, 2 s/2, ...] to the devices that compute them, or back.

    Each device receives one even and one odd piece, so that two permutations suffice.
    """
    halves = []
    for parity, half in enumerate(jnp.split(x, 2, axis=1)):
        pairs = [(i, _home(2 * i + parity, n)) for i in range(n)]
        pairs = [(b, a) for a, b in pairs] if back else pairs
        halves.append(lax.ppermute(half, axes, pairs))
    return jnp.concatenate(halves, axis=1)


def _piece_index(axes: tuple[str, ...], n: int, size: int) -> Int[Array, "s"]:
    """Returns the positions of a device's tokens in zigzag order: even piece, odd piece."""
    me = lax.axis_index(axes)
    low, high = me, 2 * n - 1 - me  # One of them is even.
    even, odd = jnp.where(me % 2 == 0, low, high), jnp.where(me % 2 == 0, high, low)
    offset = jnp.arange(size, dtype=jnp.int32)
    return jnp.concatenate([even * size + offset, odd * size + offset]).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    axes: tuple[str, ...],
    spec: MaskSpec,
    q: Float[Array, "B s H Dh"],
    shard: _Shard,
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "B s H Dv"]:
    """Returns the attention of this device's queries to the keys of all devices in the ring."""
    return _forward(axes, spec, q, shard, sinks)[0]


def _rotate(tree: Any, axes: tuple[str, ...]) -> Any:
    n = lax.axis_size(axes)
    pairs = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def _forward(
    axes: tuple[str, ...], spec: MaskSpec, q: Array, own: _Shard, sinks: Array | None
) -> tuple[Array, tuple]:
    def step(carry: tuple[Any, _Shard], _: None) -> tuple[tuple[Any, _Shard], None]:
        part, here = carry
        after = _rotate(here, axes)  # Sent while this shard is computed.
        positions = Positions(own.index, here.index, own.segments, here.segments)
        made = passes.attention_forward(q, here.k, here.v, positions, spec)
        return (passes.merge(part, made), after), None

    batch, size, heads, _ = q.shape
    out = jnp.zeros((*q.shape[:3], own.v.shape[3]), jnp.float32)
    part = out, jnp.full((batch, heads, size), EMPTY, jnp.float32)
    # Carried arrays vary over the mesh axes of the queries, the ring included.
    start = vary((part, own), sorted(varying_axes(q)))
    (part, _), _ = lax.scan(step, start, None, length=lax.axis_size(axes))
    out, lse = part if sinks is None else passes.add_sinks(part, sinks)
    out, lse = (checkpoint_name(x, CONTEXT) for x in (out.astype(own.v.dtype), lse))
    return out, (q, own, sinks, out, lse)


def _backward(axes: tuple[str, ...], spec: MaskSpec, residuals: tuple, grad: Array) -> tuple:
    q, own, sinks, out, lse = residuals

    def step(carry: tuple[Any, _Shard, Any], _: None) -> tuple[tuple[Any, _Shard, Any], None]:
        grad_q, here, grads = carry
        after = _rotate(here, axes)
        positions = Positions(own.index, here.index, own.segments, here.segments)
        made, *others = passes.attention_backward(
            q, here.k, here.v, out, lse, grad, positions, spec
        )
        grads = _rotate(tuple(a + b for a, b in zip(grads, others, strict=True)), axes)
        return (grad_q + made, after, grads), None

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    start = vary((zeros(q), own, (zeros(own.k), zeros(own.v))), sorted(varying_axes(q)))
    (grad_q, _, grads), _ = lax.scan(step, start, None, length=lax.axis_size(axes))
    grad_sinks = None
    if sinks is not None:
        delta = passes.output_times_gradient(out, grad)
        grad_sinks = passes.sinks_gradient(sinks, lse, delta)
    grad_k, grad_v = (g.astype(x.dtype) for g, x in zip(grads, own, strict=False))
    grad_own = own._replace(k=grad_k, v=grad_v, index=None, segments=None)
    return grad_q.astype(q.dtype), grad_own, grad_sinks


_ring.defvjp(_forward, _backward)
