"""Operands of grouped matmuls, and the same computed by one NumPy matmul per group."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moelib.kernels.gmm.tpu_tiles import Tiles


def operands(sizes: Any, num_rows: int, k: int = 12, n: int = 20, dtype: Any = jnp.float32) -> Any:
    """Returns lhs, rhs, bias, a gradient of the result, and the group sizes."""
    rng = np.random.default_rng(num_rows)
    g = len(sizes)
    shapes = (num_rows, k), (g, k, n), (g, n), (num_rows, n)
    made = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return *made, jnp.asarray(sizes, jnp.int32)


def by_group(arrays: Any, sizes: Any) -> Any:
    """Returns value, and gradients in lhs, rhs and bias, in float64."""
    lhs, rhs, bias, grad = (np.asarray(x, np.float64) for x in arrays)
    out, lhs_grad = np.zeros_like(grad), np.zeros_like(lhs)
    rhs_grad, bias_grad = np.zeros_like(rhs), np.zeros_like(bias)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        rows = np.s_[start:end]
        out[rows] = lhs[rows] @ rhs[group] + bias[group]
        lhs_grad[rows] = grad[rows] @ rhs[group].T
        rhs_grad[group] = lhs[rows].T @ grad[rows]
        bias_grad[group] = grad[rows].sum(0)
    return out, (lhs_grad, rhs_grad, bias_grad)


def rows_computed_over_routed(group_sizes: Any, num_rows: int, tiles: Tiles) -> float:
    """Returns the rows that a TPU kernel multiplies, over the rows of groups: 1 at best."""
    ends = np.minimum(np.cumsum(group_sizes), num_rows)
    starts = np.concatenate([[0], ends[:-1]])
    blocks = -(-ends // tiles.sub_m) - starts // tiles.sub_m
    computed = int(np.where(ends > starts, blocks, 0).sum()) * tiles.sub_m
    return computed / ends[-1]
