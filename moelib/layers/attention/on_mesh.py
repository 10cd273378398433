"""Attention on a mesh: batch and heads sharded, and the sequence as a ring of devices.

Kernels see the part of one device. Along `seq` each device keeps its queries, and keys and values
travel round the ring, so that no device ever holds a whole sequence (Liu et al., Ring Attention,
arXiv:2310.01889). n - 1 rotations show them to all devices. In the backward pass they travel again,
followed by their gradients: those for its own keys stay on a device, and the sum of the others
visits n - 1 devices and goes home, also n - 1 rotations. The keys for a turn are sent during the
attention of the turn before it, and so are gradients.

Under a causal mask the first device of a plain split would have least work and the last one most.
So the sequence is split into 2 n equal pieces, and device i computes the pieces i and 2 n - 1 - i
(zigzag). Attention in a window of up to half the sequence keeps the plain split, in which few
devices have the keys of a query, often only the one before; only their keys are sent.

Shapes: n devices of the ring, s = S / n tokens per device.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary
from moelib.kernels.backend import kernel_backends
from moelib.kernels.flash_attention import (
    CONTEXT,
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
    n = math.prod(shape[axis] for axis in ring)
    plan = ring_plan(n, q.shape[1] // n, causal=spec.causal, window=spec.window)
    pieces = 2 * n if plan.zigzag else n
    if ring and q.shape[1] % pieces:
        raise sharding.SplitError(
            f"attention: seq_len={q.shape[1]} does not divide into {pieces} pieces, {pieces // n} "
            f"for each device of the mesh axes {', '.join(ring)}; change seq_len or the mesh."
        )
    used = tuple(a for name in axes if name for a in sharding.mesh_axes(name, shape))

    def local(arrays: tuple[Any, ...]) -> Array:
        q, k, v, segments, sinks = vary(arrays, used)
        if not ring:
            return flash_attention(q, k, v, spec, segment_ids=segments, sinks=sinks)
        attend_in = functools.partial(_ring, _Ring(ring, spec, plan))
        if not plan.zigzag:
            return attend_in(q, _Shard(k, v, segments), sinks)
        deal = functools.partial(_deal, axes=ring, n=n)
        q, k, v, segments = jax.tree.map(deal, (q, k, v, segments))  # Segments may be None.
        return deal(attend_in(q, _Shard(k, v, segments), sinks), back=True)

    P = jax.sharding.PartitionSpec
    specs = (split, split, split, P(*split[:2]), P(split[2]))
    arrays = (q, k, v, segment_ids, sinks)
    return jax.shard_map(local, in_specs=(specs,), out_specs=split)(arrays)


def attention_weights(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None,
    sinks: Float[Array, "H"] | None,
    spec: MaskSpec,
) -> Float[Array, "B S H S"]:
    """Returns the weight of each key for each query and head, by attention to one-hot values."""
    one_hot = jnp.eye(k.shape[1], dtype=jnp.float32)[None, :, None]
    values = jnp.broadcast_to(one_hot, (*k.shape[:3], k.shape[1]))
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    with kernel_backends({"flash_attention": "xla"}):
        return jax.lax.stop_gradient(attend(q, k, values, segment_ids, sinks, spec=spec))


class RingPlan(NamedTuple):
    """The split of a sequence over a ring of devices, and how far keys travel."""

    zigzag: bool  # Whether a device computes two pieces of the sequence, or one.
    rotations: int  # Number of devices that see the keys of a device, itself excluded.
    num_keys: int  # Keys of a device that travel: its last ones.


def ring_plan(n: int, size: int, *, causal: bool = True, window: int | None = None) -> RingPlan:
    """Returns the plan for n devices with `size` tokens each.

    In zigzag every device needs keys of all others if the window is more than half the sequence.
    In a plain split, the slowest device then computes up to a third more than the mean.
    """
    if window is not None and 2 * window <= n * size:
        return RingPlan(False, -(-(window - 1) // size), min(size, window))
    return RingPlan(causal, n - 1, size)


class _Ring(NamedTuple):
    """The static arguments of the attention of one device."""

    axes: tuple[str, ...]  # Mesh axes of the ring.
    spec: MaskSpec
    plan: RingPlan

    def rotate(self, tree: Any, turns: int = 1) -> Any:
        """Returns the arrays of the device `turns` before this one, of the keys that travel."""
        n = lax.axis_size(self.axes)
        pairs = [(i, (i + turns) % n) for i in range(n)]

        def send(x: Array) -> Array:
            return lax.ppermute(x[:, -self.plan.num_keys :], self.axes, pairs)

        return jax.tree.map(send, tree)

    def token_index(self, size: int, turns: Any = 0) -> Int[Array, "s"]:
        """Returns the positions of the tokens of the device `turns` before this one.

        In zigzag they are those of its even piece and of its odd piece. Before the first device is
        the last one, whose tokens a causal mask hides.
        """
        n = lax.axis_size(self.axes)
        device = (lax.axis_index(self.axes) - turns) % n
        if not self.plan.zigzag:
            return device * size + jnp.arange(size, dtype=jnp.int32)
        low, high = device, 2 * n - 1 - device  # One of them is even.
        even, odd = jnp.where(device % 2 == 0, low, high), jnp.where(device % 2 == 0, high, low)
        offset = jnp.arange(size // 2, dtype=jnp.int32)
        starts = even * (size // 2), odd * (size // 2)
        return jnp.concatenate([start + offset for start in starts]).astype(jnp.int32)


class _Shard(NamedTuple):
    """Keys and values of one device, all or its last ones, and their segments."""

    k: Float[Array, "B s G Dh"]
    v: Float[Array, "B s G Dv"]
    segments: Int[Array, "B s"] | None


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    ring: _Ring, q: Float[Array, "B s H Dh"], own: _Shard, sinks: Float[Array, "H"] | None
) -> Float[Array, "B s H Dv"]:
    """Returns the attention of this device's queries to all keys of the sequence."""
    return _forward(ring, q, own, sinks)[0]


def _positions(ring: _Ring, own: _Shard, here: _Shard, turns: Any) -> Positions:
    """Returns the positions of own queries and of the keys from `turns` devices before."""
    size = own.k.shape[1]
    k_index = ring.token_index(size, turns)[size - here.k.shape[1] :]
    return Positions(ring.token_index(size), k_index, own.segments, here.segments)


def _visit_all(visit: Callable[..., Any], carry: Any, first: int, last: int) -> Any:
    """Returns the carry after the turns from first to last, of which the last sends no keys."""
    if first < last:
        turns = jnp.arange(first, last, dtype=jnp.int32)
        carry, _ = lax.scan(lambda carry, turn: (visit(carry, turn), None), carry, turns)
    return visit(carry, last, is_last=True) if first <= last else carry


def _forward(ring: _Ring, q: Array, own: _Shard, sinks: Array | None) -> tuple[Array, tuple]:
    def visit(carry: tuple[Any, Any], turn: Any, *, is_last: bool = False) -> tuple[Any, Any]:
        part, here = carry
        after = None if is_last else ring.rotate(here)  # Sent while this shard is computed.
        positions = _positions(ring, own, here, turn)
        made = passes.attention_forward(q, here.k, here.v, positions, ring.spec)
        part = made if part is None else passes.merge(part, made)
        return lax.optimization_barrier((part, after))  # One turn's results at a time are held.

    last = ring.plan.rotations
    carry = visit((None, own), 0, is_last=last == 0)
    part, _ = _visit_all(visit, carry, 1, last)
    out, lse = part if sinks is None else passes.add_sinks(part, sinks)
    out, lse = (checkpoint_name(x, CONTEXT) for x in (out.astype(own.v.dtype), lse))
    return out, (q, own, sinks, out, lse)


def _backward(ring: _Ring, residuals: tuple, grad: Array) -> tuple:
    q, own, sinks, out, lse = residuals

    def add(a: Any, b: Any) -> Any:
        return b if a is None else jax.tree.map(jnp.add, a, b)

    def visit(carry: tuple[Any, ...], turn: Any, *, is_last: bool = False) -> tuple[Any, ...]:
        grad_q, here, grads = carry
        after = None if is_last else ring.rotate(here)
        arrived = ring.rotate(grads)  # Gradients of the keys that are here now.
        positions = _positions(ring, own, here, turn)
        made, *others = passes.attention_backward(
            q, here.k, here.v, out, lse, grad, positions, ring.spec
        )
        return lax.optimization_barrier((add(grad_q, made), after, add(arrived, others)))

    last = ring.plan.rotations
    grad_q, here, grads = visit((None, own, None), 0, is_last=last == 0)
    if last:
        carry = visit((grad_q, here, None), 1, is_last=last == 1)
        grad_q, _, others = _visit_all(visit, carry, 2, last)
        unsent = (0, 0), (q.shape[1] - ring.plan.num_keys, 0), (0, 0), (0, 0)
        grads = add(grads, [jnp.pad(x, unsent) for x in ring.rotate(others, -last)])
    grad_sinks = None
    if sinks is not None:
        delta = passes.output_times_gradient(out, grad)
        grad_sinks = passes.sinks_gradient(sinks, lse, delta)
    grad_k, grad_v = (g.astype(x.dtype) for g, x in zip(grads, own, strict=False))
    return grad_q.astype(q.dtype), _Shard(grad_k, grad_v, None), grad_sinks


_ring.defvjp(_forward, _backward)
