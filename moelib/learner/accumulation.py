"""Gradient accumulation: one step over a batch in several micro-batches, weighted by tokens.

Means are accumulated with their weights, so that the result is that of the whole batch: a
micro-batch with half as many tokens counts half as much. (A plain mean over micro-batches gives
tokens in sequences with padding more weight.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.metrics import combine, empty, is_metric


class Accumulated(NamedTuple):
    """Results of a step over all micro-batches."""

    objective: jax.Array  # Mean over the batch, float32 scalar.
    weight: jax.Array  # Number of tokens that the mean is over, float32 scalar.
    gradients: Any  # Gradients of the objective: float32, or in the dtypes of one micro-batch.
    metrics: Any  # Tree of WeightedScalar and MaxScalar.
    state: Any  # State after the last micro-batch.
    sums: Any = None  # Gradients that the function adds up itself, float32, of several.


# (micro-batch, state, sums) -> (mean objective, its weight, gradients of the mean, metrics, state)
StepFn = Callable[[Any, Any, Any], tuple[jax.Array, jax.Array, Any, Any, Any]]


def accumulate(
    fn: StepFn, batch: Any, *, num_microbatches: int, state: Any = None, sums: Any = None
) -> Accumulated:
    """Returns the results of `fn` for the batch, computed one micro-batch after the other.

    One micro-batch is a call of `fn`; several are a `jax.lax.scan`, which holds one set of
    gradients and the activations of one micro-batch.

    Args:
        fn: Function (micro-batch, state, sums) -> (objective, weight, gradients, metrics, state) of
            the mean of the objective over the micro-batch's tokens; their number, 0 or more; the
            gradients of that mean; a tree of WeightedScalar and MaxScalar; and the state for the
            next micro-batch, with the shapes and dtypes of the one given. To `sums`, a tree of
            refs, it adds gradients times the weight where they arise, for example layer by layer,
            so that one micro-batch's are never held; None for one micro-batch.
        batch: Tree of arrays [B, ...], divided by `split_batch`.
        num_microbatches: Number A of micro-batches, a divisor of B.
        state: State passed from micro-batch to micro-batch, for example random keys.
        sums: Tree of the sums that `fn` adds to, float32, before the first micro-batch.

    Raises:
        UserError: If the number of micro-batches is less than 1 or does not divide the sequences,
            or a metric is neither a WeightedScalar nor a MaxScalar.
    """
    if num_microbatches == 1:
        objective, weight, gradients, metrics, state = fn(batch, state, None)
        _check_metrics(metrics)
        return Accumulated(_float(objective), _float(weight), gradients, metrics, state)
    micro_batches = split_batch(batch, num_microbatches)

    @functools.partial(jax.jit, inline=True)  # The shapes of the sums and the loop share one trace.
    def run(micro_batch: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        refs = jax.tree.map(jax.new_ref, sums)
        results = fn(micro_batch, state, refs)
        return results, jax.tree.map(jax.freeze, refs)

    def body(total: Accumulated, micro_batch: Any) -> tuple[Accumulated, None]:
        results, sums = run(micro_batch, total.state, total.sums)
        objective, weight, gradients, metrics, state = results
        weight = _float(weight)
        # XLA for TPUs fails to compile a loop that adds up casts of bfloat16 reduce-scatters, which
        # it tries to move out of the loop (RET_CHECK in while_loop_all_reduce_code_motion).
        gradients = jax.lax.optimization_barrier(gradients)
        return Accumulated(
            objective=total.objective + weight * _float(objective),
            weight=total.weight + weight,
            gradients=jax.tree.map(
                lambda sum, g: sum + weight * _float(g), total.gradients, gradients
            ),
            metrics=jax.tree.map(combine, total.metrics, metrics, is_leaf=is_metric),
            state=state,
            sums=sums,
        ), None

    total, _ = jax.lax.scan(body, _zeros(run, micro_batches, state, sums), micro_batches)
    scale = 1.0 / jnp.where(total.weight > 0, total.weight, 1.0)
    return total._replace(
        objective=total.objective * scale,
        gradients=jax.tree.map(lambda g: g * scale, total.gradients),
        sums=jax.tree.map(lambda g: g * scale, total.sums),
    )


def split_batch(batch: Any, num_microbatches: int) -> Any:
    """Returns each array [B, ...] as [A, B/A, ...]: micro-batch i has sequences i, i + A, ...

    Sequences are dealt out, not cut into A blocks, because B is sharded in contiguous blocks: if
    each device holds B/n sequences, a block of B/A is on n/A of the devices, and would have to be
    spread over all of them. [B] -> [B/A, A] splits the sequences of each device, as long as A
    divides B/n, and none moves.

    Raises:
        UserError: If A is less than 1, or the size of an array is 0 or not a multiple of A.
    """
    A = num_microbatches
    if A < 1:
        raise UserError(f"num_microbatches is {A}; set it to 1 or more.")

    def deal(path: Any, x: jax.Array) -> jax.Array:
        B = x.shape[0] if x.ndim else 0
        if B == 0 or B % A:
            raise UserError(
                f"num_microbatches is {A}, but batch[{tree.path_string(path)!r}] of shape "
                f"{x.shape} has {B} sequences; set it to a divisor of the batch size."
            )
        return jnp.moveaxis(x.reshape(B // A, A, *x.shape[1:]), 1, 0)  # [A, B/A, ...]

    return jax.tree_util.tree_map_with_path(deal, batch)


def _zeros(run: Callable[..., Any], micro_batches: Any, state: Any, sums: Any) -> Accumulated:
    """Returns the sums before the first micro-batch."""
    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    first = lambda batch, *others: run(jax.tree.map(lambda x: x[0], batch), *others)
    (_, _, gradients, metrics, _), _ = jax.eval_shape(first, micro_batches, state, sums)
    _check_metrics(metrics)
    zero = jnp.zeros((), jnp.float32)
    metrics = jax.tree.map(empty, metrics, is_leaf=is_metric)
    return Accumulated(zero, zero, jax.tree.map(zeros, gradients), metrics, state, sums)


def _check_metrics(metrics: Any) -> None:
    for path, value in tree.flatten_items(metrics, is_leaf=is_metric):
        if not is_metric(value):
            raise UserError(
                f"the metric {path!r} is {value!r}; make it metrics.weighted(mean, weight), so "
                "that micro-batches can be averaged."
            )


def _float(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
