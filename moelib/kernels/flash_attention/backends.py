"""The forms of attention that have a forward and a backward pass, and the choice of one."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.kernels.backend import check_backend, run_on_backend
from moelib.kernels.flash_attention import xla
from moelib.kernels.flash_attention.reference import Places, Rule

_FORWARD: dict[str, Callable[..., Any]] = {"xla": xla.forward}
_BACKWARD: dict[str, Callable[..., Any]] = {"xla": xla.backward}
_PLATFORMS = {"default": "xla"}


def check(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    rule: Rule,
    *,
    also: tuple[str, ...] = (),
) -> None:
    """Raises ValueError for what no backend can do, and for a backend that there is not.

    Args:
        backend: One of the forms here, or of the names in `also`, or None.
        q: Queries.
        k: Keys.
        v: Values.
        rule: How scores are made.
        also: Further backends.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: {q.shape[2]} query heads do not divide into {k.shape[2]} groups; "
            "num_heads must be a multiple of num_kv_heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"flash_attention: q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; cast them to one "
            "dtype."
        )
    if rule.window is not None and rule.window < 1:
        raise ValueError(
            f"flash_attention: window is {rule.window}; a token sees at least itself, so set 1 or "
            "more, or None for no window."
        )
    if rule.window is not None and not rule.causal:
        raise ValueError(
            f"flash_attention: window is {rule.window} with causal=False; a window looks back "
            "only, so set causal=True, or window=None."
        )
    if rule.logit_cap is not None and not rule.logit_cap > 0:
        raise ValueError(
            f"flash_attention: logit_cap is {rule.logit_cap}; set a number above 0, or None for no "
            "cap."
        )
    check_backend("flash_attention", backend, {**_FORWARD, **dict.fromkeys(also)})


def forward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    sinks: Float[Array, "H"] | None,
    places: Places,
    rule: Rule,
    *,
    in_order: bool,
) -> tuple[Float[Array, "B Q H Dh"], Float32[Array, "B H Q"]]:
    """Returns attention and the logsumexp of each query's scores, as `xla.forward` does."""
    runs = {
        name: functools.partial(run, rule=rule, in_order=in_order) for name, run in _FORWARD.items()
    }
    return run_on_backend("flash_attention", backend, runs, _PLATFORMS, q, k, v, sinks, places)


def backward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    lse: Float32[Array, "B H Q"],
    delta: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    places: Places,
    rule: Rule,
    *,
    in_order: bool,
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v, as `xla.backward` does."""
    runs = {
        name: functools.partial(run, rule=rule, in_order=in_order)
        for name, run in _BACKWARD.items()
    }
    operands = q, k, v, lse, delta, grad, places
    return run_on_backend("flash_attention", backend, runs, _PLATFORMS, *operands)


def output_times_gradient(
    out: Float[Array, "B Q H Dh"], grad: Float[Array, "B Q H Dh"]
) -> Float32[Array, "B H Q"]:
    """Returns delta, the sum over Dh of output times gradient."""
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    return jnp.sum(product, axis=-1).transpose(0, 2, 1)


def sinks_gradient(
    sinks: Float[Array, "H"], lse: Float32[Array, "B H Q"], delta: Float32[Array, "B H Q"]
) -> Float[Array, "H"]:
    """Returns the gradient in the sinks: each takes its share of a row's softmax, for no value."""
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)
