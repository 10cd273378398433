"""Dispatchers: how tokens reach their experts and come back as one sum.

Every dispatcher gives the same output and gradients where it drops nothing. They see the tokens
of one device: T tokens, K experts a token, R = T K rows.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import Configurable
from moelib.core.context import Nested
from moelib.layers.moe.experts import FeedForwardExperts


class Dispatcher(Configurable):
    """Sends rows to experts and combines what comes back."""

    def __call__(
        self,
        experts: FeedForwardExperts,
        params: Nested,
        x: Float[Array, "T D"],
        expert_ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        mask: Bool[Array, "T"],
    ) -> Float[Array, "T D"]:
        """Returns, for each token, the weighted sum of its experts' outputs; 0 for padding."""
        raise NotImplementedError(f"{type(self).__qualname__} must define __call__.")


class DenseDispatcher(Dispatcher):
    """The oracle: every expert computes every token. E / K times the work; for tests."""

    def __call__(
        self,
        experts: FeedForwardExperts,
        params: Nested,
        x: Float[Array, "T D"],
        expert_ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        mask: Bool[Array, "T"],
    ) -> Float[Array, "T D"]:
        """Returns the weighted sums."""
        outputs = experts.all_experts(params, jnp.where(mask[:, None], x, 0.0))  # [T, E, D]
        chosen = expert_ids[..., None] == jnp.arange(outputs.shape[1])[None, None]  # [T, K, E]
        chosen = chosen & mask[:, None, None]
        dense = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), 1)
        return jnp.einsum("ted,te->td", outputs.astype(jnp.float32), dense).astype(x.dtype)


class SortedDispatcher(Dispatcher):
    """Dropless: rows sorted by expert, one grouped matmul for all experts, rows put back.

    Dispatch and combine are gathers in both directions: no scatter, no copy of tokens K times.
    """

    def __call__(
        self,
        experts: FeedForwardExperts,
        params: Nested,
        x: Float[Array, "T D"],
        expert_ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        mask: Bool[Array, "T"],
    ) -> Float[Array, "T D"]:
        """Returns the weighted sums."""
        num_experts = params["up"].shape[0]
        ids = jnp.where(mask[:, None], expert_ids, num_experts).reshape(-1)  # Padding goes last.
        order = jnp.argsort(ids, stable=True)  # [R]: the row of (token, k) that stands here.
        inverse = jnp.argsort(order)
        ends = jnp.searchsorted(ids[order], jnp.arange(num_experts + 1), side="left")
        group_sizes = jnp.diff(ends).astype(jnp.int32)  # [E]
        rows = dispatch_rows(x, order, inverse, expert_ids.shape[1])
        outputs = experts.grouped(params, rows, group_sizes)
        weights = jnp.where(mask[:, None], weights, 0.0)
        return combine_rows(outputs, weights, order, inverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch_rows(
    x: Float[Array, "T D"], order: Int[Array, "R"], inverse: Int[Array, "R"], num_choices: int
) -> Float[Array, "R D"]:
    """Returns the token of row order[i], for each i; a token has `num_choices` rows."""
    del inverse
    return x[order // num_choices]


def _dispatch_fwd(x: Array, order: Array, inverse: Array, num_choices: int) -> tuple[Array, Array]:
    return dispatch_rows(x, order, inverse, num_choices), inverse


def _dispatch_bwd(num_choices: int, inverse: Array, grad: Array) -> tuple[Array, None, None]:
    return _sum_rows(grad, inverse.reshape(-1, num_choices)), None, None


dispatch_rows.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine_rows(
    outputs: Float[Array, "R D"],
    weights: Float[Array, "T K"],
    order: Int[Array, "R"],
    inverse: Int[Array, "R"],
) -> Float[Array, "T D"]:
    """Returns each token's weighted sum of its K rows, summed in float32."""
    del order
    return _sum_rows(outputs, inverse.reshape(weights.shape), weights)


def _sum_rows(
    rows: Float[Array, "R D"],
    places: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None = None,
) -> Float[Array, "T D"]:
    """Returns the (weighted) sum of each token's K rows, in float32; no [T, K, D] is made."""
    total = jnp.zeros((), jnp.float32)
    for k in range(places.shape[1]):
        row = rows[places[:, k]].astype(jnp.float32)  # [T, D]
        total = total + (row if weights is None else row * weights[:, k, None])
    return total.astype(rows.dtype)


def _combine_fwd(outputs: Array, weights: Array, order: Array, inverse: Array) -> tuple:
    return combine_rows(outputs, weights, order, inverse), (outputs, weights, order, inverse)


def _combine_bwd(residuals: tuple[Array, ...], grad: Array) -> tuple:
    outputs, weights, order, inverse = residuals
    num_choices = weights.shape[1]
    rows = grad[order // num_choices].astype(jnp.float32)  # [R, D]
    grad_outputs = (rows * weights.reshape(-1)[order][:, None]).astype(outputs.dtype)
    products = jnp.sum(rows * outputs.astype(jnp.float32), -1)  # [R], in the order of experts.
    return grad_outputs, products[inverse].reshape(weights.shape), None, None


combine_rows.defvjp(_combine_fwd, _combine_bwd)
