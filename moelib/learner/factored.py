"""Parts of Adafactor: second moments as a row and a column, and sizes relative to parameters.

Optax has these for single matrices. Here stacked weights (layers of a scan, experts) are many
matrices, each with statistics of its own, so that a scan and a loop over layers agree.
Source: Shazeer and Stern, arXiv:1804.04235.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moelib.core import tree
from moelib.core.param import specs_by_path
from moelib.core.tree import Nested


class FactoredState(NamedTuple):
    """State of `scale_by_factored_rms`: `row` and `col` of factored parameters, `full` of others.

    Attributes:
        count: Number of updates so far, int32 scalar.
        row: Mean squares over the larger of the two factored dimensions.
        col: Mean squares over the smaller one.
        full: Squares of the parameters that are not factored.
    """

    count: jax.Array
    row: Nested
    col: Nested
    full: Nested


def scale_by_factored_rms(
    *,
    decay_exponent: float = 0.8,
    min_dim_size_to_factor: int = 128,
    eps: float = 1e-30,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns gradients divided by the root of a factored running mean of their squares.

    Args:
        decay_exponent: Exponent of the decay rate 1 - t^-decay_exponent at step t.
        min_dim_size_to_factor: Smallest dimension of a matrix that is factored.
        eps: Term added to the squares.
        param_specs: Specs that tell which dimensions are stacked; without them, none is.
    """
    batch_of = {path: s.batch_axes for path, s in specs_by_path(param_specs).items()}

    def axes_of(params: Nested) -> dict[str, tuple[int, int]]:
        """Returns {path: (smaller, larger)}, the two dimensions of each factored parameter."""
        axes = {
            path: _factored_axes(x.shape, batch_of.get(path, ()), min_dim_size_to_factor)
            for path, x in tree.by_path(params).items()
        }
        return {path: pair for path, pair in axes.items() if pair is not None}

    def init(params: Nested) -> FactoredState:
        axes = axes_of(params)
        factored = tree.select(params, lambda path: path in axes)
        whole = tree.select(params, lambda path: path not in axes)
        row = tree.map_by_path(lambda path, x: jnp.zeros_like(x.sum(axes[path][1])), factored)
        col = tree.map_by_path(lambda path, x: jnp.zeros_like(x.sum(axes[path][0])), factored)
        full = jax.tree.map(jnp.zeros_like, whole)
        return FactoredState(jnp.zeros((), jnp.int32), row, col, full)

    def update(updates: Nested, state: FactoredState, params: Any = None) -> Any:
        del params
        axes = axes_of(updates)
        count = optax.safe_increment(state.count)
        decay = 1.0 - count.astype(jnp.float32) ** -decay_exponent
        blend = lambda old, new: decay * old + (1.0 - decay) * new
        squares = jax.tree.map(lambda g: jnp.square(g) + eps, updates)
        factored = tree.select(squares, lambda path: path in axes)
        whole = tree.select(squares, lambda path: path not in axes)
        row = tree.map_by_path(lambda path, sq: sq.mean(axes[path][1]), factored)
        col = tree.map_by_path(lambda path, sq: sq.mean(axes[path][0]), factored)
        row = jax.tree.map(blend, state.row, row)
        col = jax.tree.map(blend, state.col, col)
        full = jax.tree.map(blend, state.full, whole)
        rows, cols, fulls = tree.by_path(row), tree.by_path(col), tree.by_path(full)

        def scale(path: str, g: jax.Array) -> jax.Array:
            if path not in axes:
                return g * jax.lax.rsqrt(fulls[path])
            smaller, larger = axes[path]
            in_row = smaller - 1 if smaller > larger else smaller
            mean = jnp.mean(rows[path], axis=in_row, keepdims=True)
            row_factor = jnp.expand_dims(jax.lax.rsqrt(rows[path] / mean), larger)
            return g * row_factor * jnp.expand_dims(jax.lax.rsqrt(cols[path]), smaller)

        return tree.map_by_path(scale, updates), FactoredState(count, row, col, full)

    return optax.GradientTransformation(init, update)


def _factored_axes(
    shape: tuple[int, ...], batch: tuple[int, ...], min_size: int
) -> tuple[int, int] | None:
    """Returns the two largest dimensions that are not stacked, or None if one is too small."""
    axes = [axis for axis in range(len(shape)) if axis not in batch]
    axes.sort(key=lambda axis: shape[axis])
    if len(axes) < 2 or shape[axes[-2]] < min_size:
        return None
    return axes[-2], axes[-1]


def clip_by_rms(
    threshold: float, *, param_specs: Nested | None = None
) -> optax.GradientTransformation:
    """Returns updates scaled down to a root mean square of at most `threshold` per matrix."""
    rms = _rms(param_specs)

    def update(updates: Nested, params: Any = None) -> Nested:
        del params
        return tree.map_by_path(
            lambda path, u: u / jnp.maximum(1.0, rms(path, u) / threshold), updates
        )

    return optax.stateless(update)


def scale_by_param_rms(
    *, min_scale: float = 1e-3, param_specs: Nested | None = None
) -> optax.GradientTransformation:
    """Returns updates times the root mean square of their parameter, at least `min_scale`."""
    rms = _rms(param_specs)

    def update(updates: Nested, params: Any) -> Nested:
        return tree.map_by_path(
            lambda path, u, p: u * jnp.maximum(rms(path, p), min_scale), updates, params
        )

    return optax.stateless(update)


def _rms(param_specs: Nested | None) -> Any:
    """Returns the function (path, x) -> root mean square per stacked matrix, dimensions kept."""
    batch_of = {path: s.batch_axes for path, s in specs_by_path(param_specs).items()}

    def rms(path: str, x: jax.Array) -> jax.Array:
        axes = tuple(axis for axis in range(x.ndim) if axis not in batch_of.get(path, ()))
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))

    return rms
