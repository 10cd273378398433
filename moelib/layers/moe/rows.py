"""Rows of experts: tokens are copied to rows, one per assignment, and summed back.

A `RowMap` maps rows to assignments and assignments to rows. With both directions known, every copy
and every sum, forward and backward, is a gather: nothing is scattered, and no token is repeated in
memory before it is copied. Rows without an assignment, and their gradients, may hold any values:
nothing reads them.

Shapes: T tokens, K assignments per token, R rows, D model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.backend import current_device
from moelib.kernels.gmm import gmm_weight_gradient
from moelib.kernels.operands import keep_where
from moelib.layers.remat import save_routing

# Name scope of grouped matmuls that sum rows, by which reports of compiled programs recognize them.
SUM_ROWS = "sum_rows"
_TILE = 128  # Tokens whose rows one product sums.


class RowMap(NamedTuple):
    """The assignment of each row, and the row of each assignment."""

    assignments: Int[Array, "R"]  # token * K + k of each row; T * K or more for an empty row.
    # The row of each assignment; R or more for an assignment without a row.
    rows: Int[Array, "T K"]

    @property
    def tokens(self) -> Int[Array, "R"]:
        """The token of each row; T or more for an empty row."""
        return self.assignments // self.rows.shape[1]


def sort_assignments(
    keys: Int[Array, "T K"], num_groups: int, num_rows: int
) -> tuple[RowMap, Int[Array, "g"]]:
    """Returns the map to rows sorted by group, tokens in order within one, and the group sizes.

    The key of an assignment is its group, `num_groups` for one without a row. The number of rows is
    at least that of the assignments with a group, and at most T K.
    """
    flat = keys.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    rank = jnp.argsort(order).astype(jnp.int32).reshape(keys.shape)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_groups)[None], 0, dtype=jnp.int32)
    assignments = jnp.where(jnp.arange(num_rows) < jnp.sum(sizes), order[:num_rows], flat.size)
    rows = jnp.where(keys < num_groups, rank, num_rows)
    return save_routing((RowMap(assignments, rows), sizes))


@jax.custom_vjp
def take_rows(x: Float[Array, "T D"], row_map: RowMap) -> Float[Array, "R D"]:
    """Returns the token of each row; an arbitrary token for an empty row."""
    return x.at[row_map.tokens].get(mode="clip")


@jax.custom_vjp
def take_weights(weights: Float[Array, "T K"], row_map: RowMap) -> Float[Array, "R"]:
    """Returns the combine weight of each row; 0 for an empty row."""
    return weights.reshape(-1).at[row_map.assignments].get(mode="fill", fill_value=0)


take_weights.defvjp(
    lambda weights, row_map: (take_weights(weights, row_map), row_map),
    lambda row_map, grad: (grad.at[row_map.rows].get(mode="fill", fill_value=0), None),
)


@jax.custom_vjp
def sum_rows(rows: Float[Array, "R D"], row_map: RowMap) -> Float[Array, "T D"]:
    """Returns the sum of each token's rows, computed in float32; 0 for a token without rows."""
    few = 2 * rows.shape[0] <= row_map.rows.size and rows.dtype.itemsize == 2
    if few and current_device().platform == "tpu":
        return sum_in_token_order(rows, row_map)
    return _sum(rows, row_map.rows, None)


def sum_in_token_order(rows: Float[Array, "R D"], row_map: RowMap) -> Float[Array, "T D"]:
    """Returns what `sum_rows` does, faster on TPUs where most assignments have no row.

    A gather per assignment reads K rows for each token. Here each row is read once: a grouped
    matmul multiplies rows in the order of their tokens by zeros and ones. Its groups are tiles of
    tokens, over all of which a row that is not finite spreads.
    """
    num_tokens, dim = row_map.rows.shape[0], rows.shape[1]
    num_tiles = -(-num_tokens // _TILE)
    order = jnp.argsort(row_map.assignments)  # Empty rows last.
    tokens = row_map.tokens[order]
    tiles = jnp.where(tokens < num_tokens, tokens // _TILE, num_tiles)
    sizes = jnp.sum(tiles[:, None] == jnp.arange(num_tiles)[None], 0, dtype=jnp.int32)
    ones = tokens[:, None] % _TILE == jnp.arange(_TILE)[None]  # [R, _TILE]
    with jax.named_scope(SUM_ROWS):
        sums = gmm_weight_gradient(ones.astype(rows.dtype), rows[order], sizes)
    return sums.reshape(-1, dim)[:num_tokens]


def _sum(
    rows: Float[Array, "R D"], index: Int[Array, "T K"], weights: Float[Array, "T K"] | None
) -> Float[Array, "T D"]:
    """Returns the (weighted) sum of each token's rows, without an intermediate [T, K, D]."""
    total = jnp.zeros((), jnp.float32)
    for k in range(index.shape[1]):
        row = rows.at[index[:, k]].get(mode="clip").astype(jnp.float32)  # [T, D]
        if weights is not None:
            row = row * weights[:, k, None]
        total = total + keep_where(index[:, k, None] < rows.shape[0], row)
    return total.astype(rows.dtype)


take_rows.defvjp(
    lambda x, row_map: (take_rows(x, row_map), row_map),
    lambda row_map, grad: (sum_rows(grad, row_map), None),
)
sum_rows.defvjp(
    lambda rows, row_map: (sum_rows(rows, row_map), row_map),
    lambda row_map, grad: (take_rows(grad, row_map), None),
)


@jax.custom_vjp
def combine_rows(
    rows: Float[Array, "R D"], weights: Float[Array, "T K"], row_map: RowMap
) -> Float[Array, "T D"]:
    """Returns the weighted sum of each token's rows, computed in float32.

    The weight of an assignment without a row has no effect.
    """
    return _sum(rows, row_map.rows, weights)


def _combine_forward(rows: Array, weights: Array, row_map: RowMap) -> tuple[Array, tuple]:
    return combine_rows(rows, weights, row_map), (rows, weights, row_map)


def _combine_backward(
    residuals: tuple[Array, Array, RowMap], grad: Array
) -> tuple[Array, Array, None]:
    rows, weights, row_map = residuals
    grad_rows = take_rows(grad, row_map).astype(jnp.float32)  # [R, D]
    weight = take_weights(weights, row_map)  # [R]
    held = (row_map.assignments < weights.size)[:, None]
    # An empty row may hold NaN, so it is masked, not multiplied by 0.
    products = jnp.sum(jnp.where(held, grad_rows * rows.astype(jnp.float32), 0.0), -1)  # [R]
    grad_weights = products.at[row_map.rows].get(mode="fill", fill_value=0)
    return (grad_rows * weight[:, None]).astype(rows.dtype), grad_weights, None


combine_rows.defvjp(_combine_forward, _combine_backward)
