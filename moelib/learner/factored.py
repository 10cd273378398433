"""Parts of Adafactor: second moments as a row and a column, and sizes relative to parameters.

Optax has these for single matrices. Here stacked weights (layers of a scan, experts) are many
matrices, each with statistics of its own, so that a scan and a loop over layers agree. The
`param_specs` tell which dimensions are stacked; None means none.
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
    """State of `scale_by_factored_rms`."""

    count: jax.Array  # Number of updates so far, int32 scalar.
    row: Nested  # Mean squares over the larger of the two factored dimensions.
    col: Nested  # Mean squares over the smaller one.
    full: Nested  # Squares of the parameters that are not factored.


def scale_by_factored_rms(
    param_specs: Nested | None, decay_exponent: float, min_dim_size_to_factor: int, eps: float
) -> optax.GradientTransformation:
    """Returns gradients divided by the root of a factored running mean of their squares.

    At step t the mean decays by 1 - t^-decay_exponent. Matrices are factored whose two largest
    dimensions are at least `min_dim_size_to_factor`; `eps` is added to the squares.
    """
    batch_of = {path: s.batch_axes for path, s in specs_by_path(param_specs).items()}

    def factored_axes(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the two largest dimensions that are not stacked, the smaller one first."""
        axes = [axis for axis in range(len(shape)) if axis not in batch_of.get(path, ())]
        axes.sort(key=lambda axis: shape[axis])
        if len(axes) < 2 or shape[axes[-2]] < min_dim_size_to_factor:
            return None
        return axes[-2], axes[-1]

    def axes_of(params: Nested) -> dict[str, tuple[int, int]]:
        axes = {path: factored_axes(path, x.shape) for path, x in tree.by_path(params).items()}
        return {path: pair for path, pair in axes.items() if pair is not None}

    def moments(squares: Nested) -> tuple[Nested, Nested, Nested]:
        """Returns the means along rows and columns, and the squares that are not factored."""
        axes = axes_of(squares)
        factored = tree.select(squares, axes.__contains__)
        row = tree.map_by_path(lambda path, x: x.mean(axes[path][1]), factored)
        col = tree.map_by_path(lambda path, x: x.mean(axes[path][0]), factored)
        return row, col, tree.select(squares, lambda path: path not in axes)

    def init(params: Nested) -> FactoredState:
        zeros = jax.tree.map(jnp.zeros_like, moments(params))
        return FactoredState(jnp.zeros((), jnp.int32), *zeros)

    def update(updates: Nested, state: FactoredState, params: Any = None) -> Any:
        del params
        axes = axes_of(updates)
        count = optax.safe_increment(state.count)
        decay = 1.0 - count.astype(jnp.float32) ** -decay_exponent

        def blend(old: jax.Array, new: jax.Array) -> jax.Array:
            return decay * old + (1.0 - decay) * new

        squares = jax.tree.map(lambda g: jnp.square(g) + eps, updates)
        means = jax.tree.map(blend, (state.row, state.col, state.full), moments(squares))
        rows, cols, fulls = map(tree.by_path, means)

        def scale(path: str, g: jax.Array) -> jax.Array:
            if path not in axes:
                return g * jax.lax.rsqrt(fulls[path])
            smaller, larger = axes[path]
            in_row = smaller - 1 if smaller > larger else smaller
            mean = jnp.mean(rows[path], axis=in_row, keepdims=True)
            row_factor = jnp.expand_dims(jax.lax.rsqrt(rows[path] / mean), larger)
            return g * row_factor * jnp.expand_dims(jax.lax.rsqrt(cols[path]), smaller)

        return tree.map_by_path(scale, updates), FactoredState(count, *means)

    return optax.GradientTransformation(init, update)


def clip_by_rms(param_specs: Nested | None, threshold: float) -> optax.GradientTransformation:
    """Returns updates scaled down to a root mean square of at most `threshold` per matrix."""
    rms = _rms(param_specs)

    def clip(path: str, update: jax.Array) -> jax.Array:
        return update / jnp.maximum(1.0, rms(path, update) / threshold)

    return optax.stateless(lambda updates, params: tree.map_by_path(clip, updates))


def scale_by_param_rms(param_specs: Nested | None) -> optax.GradientTransformation:
    """Returns updates times the root mean square of their parameter, at least 1e-3."""
    rms = _rms(param_specs)

    def scale(path: str, update: jax.Array, param: jax.Array) -> jax.Array:
        return update * jnp.maximum(rms(path, param), 1e-3)

    return optax.stateless(lambda updates, params: tree.map_by_path(scale, updates, params))


def _rms(param_specs: Nested | None) -> Any:
    """Returns the function (path, x) -> root mean square per stacked matrix, dimensions kept."""
    batch_of = {path: s.batch_axes for path, s in specs_by_path(param_specs).items()}

    def rms(path: str, x: jax.Array) -> jax.Array:
        axes = tuple(axis for axis in range(x.ndim) if axis not in batch_of.get(path, ()))
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))

    return rms
