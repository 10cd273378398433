"""Attention of one shard of queries to one shard of keys: the parts of ring attention.

Each device holds a shard of the queries of a sequence and receives the shards of keys one after the
other:

    part = attention_forward(q, k, v, positions, spec)  # For the first shard of keys,
    part = merge(part, attention_forward(q, k, v, positions, spec))  # and for every other one.
    out, lse = add_sinks(part, sinks)
    ...
    grads = attention_backward(q, k, v, out, lse, grad, positions, spec)  # For every shard.

The gradients of a shard are sums over the shards that it met: those of q stay on their device,
those of k and v travel with them. Positions may come in any order, so a sequence can be split in
zigzag. All results are in float32, to be summed.

Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.kernels.backend import chosen_backend
from moelib.kernels.flash_attention import passes
from moelib.kernels.flash_attention.reference import MaskSpec, Positions

Part = tuple[Float32[Array, "B Q H Dh"], Float32[Array, "B H Q"]]  # Output and logsumexp.


def attention_forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    positions: Positions,
    spec: MaskSpec,
    *,
    backend: str | None = None,
) -> Part:
    """Returns the attention of these queries to these keys alone, and the logsumexp of the scores.

    A query that sees none of the keys gives zeros, and a logsumexp that changes no `merge`.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys.
        v: Values.
        positions: Positions and segments of queries and keys; segments of both, or of neither.
        spec: As for `flash_attention`.
        backend: As for `flash_attention`: "tpu" or "xla".

    Raises:
        ValueError: As for `flash_attention`; and if only one side has segments.
    """
    _check(q, k, v, positions, spec)
    backend = chosen_backend("flash_attention", backend)
    return passes.forward(backend, q, k, v, None, positions, spec, in_order=False)


def merge(a: Part, b: Part) -> Part:
    """Returns the attention of the same queries to the keys of both parts, which share none."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * _weight(lse_a - lse) + out_b * _weight(lse_b - lse), lse


def add_sinks(part: Part, sinks: Float[Array, "H"]) -> Part:
    """Returns the part with one more score per head in its softmax, which has no value.

    To be called once, after all keys.
    """
    out, lse = part
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, :, None])
    return out * _weight(lse - total), total


def attention_backward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    out: Float[Array, "B Q H Dh"],
    lse: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    positions: Positions,
    spec: MaskSpec,
    *,
    backend: str | None = None,
) -> tuple[Float32[Array, "B Q H Dh"], Float32[Array, "B K G Dh"], Float32[Array, "B K G Dh"]]:
    """Returns the contribution of these queries and keys to the gradients in q, k and v.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        out: The whole attention of the queries, to the keys of all shards, sinks included.
        lse: Its logsumexp.
        grad: The gradient of `out`.
        positions: As for `attention_forward`.
        spec: As for `flash_attention`.
        backend: As for `attention_forward`.

    Raises:
        ValueError: As for `attention_forward`.
    """
    _check(q, k, v, positions, spec)
    backend = chosen_backend("flash_attention", backend)
    grad, delta = grad.astype(q.dtype), passes.output_times_gradient(out, grad)
    return passes.backward(backend, q, k, v, lse, delta, grad, positions, spec, in_order=False)


def sinks_gradient(
    sinks: Float[Array, "H"],
    out: Float[Array, "B Q H Dh"],
    lse: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
) -> Float[Array, "H"]:
    """Returns the contribution of these queries to the sinks' gradient; see the backward pass."""
    return passes.sinks_gradient(sinks, lse, passes.output_times_gradient(out, grad))


def _weight(log: Float32[Array, "B H Q"]) -> Float32[Array, "B Q H 1"]:
    return jnp.exp(log).transpose(0, 2, 1)[..., None]


def _check(q: Array, k: Array, v: Array, positions: Positions, spec: MaskSpec) -> None:
    passes.check(q, k, v, positions, spec, whole=False)
    if (positions.q_segments is None) != (positions.k_segments is None):
        with_segments = "keys" if positions.q_segments is None else "queries"
        raise ValueError(
            f"flash_attention: only the {with_segments} have segments; give both, or neither."
        )
