"""The training step and the evaluation step: pure functions of state and batch.

Their results are those of the global batch: means are weighted by tokens, over devices and
micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core import precision, tree
from moelib.core.errors import UserError
from moelib.core.metrics import MaxScalar, reading, weighted
from moelib.core.module import functional
from moelib.core.param import specs_by_path
from moelib.core.tree import Batch, Nested
from moelib.kernels.backend import current_device
from moelib.layers.quantization import quantized_weights
from moelib.learner.accumulation import Accumulated, accumulate
from moelib.learner.learner import Learner, LearnerUpdate
from moelib.models.model import Model
from moelib.parallel import sharding
from moelib.train.metrics import NON_FINITE, PackedMetrics, as_metric, collect, pack
from moelib.train.no_gradient import tag_gradients
from moelib.train.pipeline import PipelineConfig, accumulate_in_pipeline
from moelib.train.state import TrainerState, updated
from moelib.train.watchers import gradient_noise

TrainStep = Callable[[TrainerState, Batch], tuple[TrainerState, PackedMetrics]]
EvalStep = Callable[[Nested, Batch], PackedMetrics]


def make_train_step(
    model: Model,
    learner: Learner,
    *,
    train_dtype: str | None = None,
    num_microbatches: int = 1,
    pipeline: PipelineConfig | None = None,
    log_gradient_noise: bool = False,
    sum_by_layer: bool = False,
) -> TrainStep:
    """Returns the function (state, batch) -> (state after the step, metrics of the step).

    The objective is the loss plus the auxiliary losses. Parameters without optimizer take the state
    updates of their layers, unless they are frozen; a step that the learner skips changes nothing.
    The step casts trainable parameters to `train_dtype` for both passes; None casts none.

    With `sum_by_layer`, the gradients of weights that layers cast are added to the sums over
    micro-batches layer by layer, so that those of one are never held for all layers.

    Metrics: those of the model (see `SpmdTrainer`), its layers and the learner; `num_tokens`, the
    tokens of the loss; `objective`, nats per token; `non_finite`, 1 if the new parameters are not
    finite, or the loss is not and the step was taken; with `log_gradient_noise`, those of
    `gradient_noise.estimates`.

    Raises:
        UserError: If `log_gradient_noise` is set in a pipeline, or without micro-batches; or if
            gradients would be float16.
    """
    precision.check_gradients(model.create_parameter_specs_recursively(), train_dtype)
    if pipeline is None:
        run = functools.partial(_accumulate, log_gradient_noise, sum_by_layer)
    else:
        run = functools.partial(accumulate_in_pipeline, pipeline)
    gradient_noise.check(log_gradient_noise, num_microbatches, in_pipeline=pipeline is not None)

    def train_step(state: TrainerState, batch: Batch) -> tuple[TrainerState, PackedMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.prng_key), state.step)
        done = run(model, learner, state.model, train_dtype, batch, key, num_microbatches)
        with jax.named_scope("learner"):
            update = learner.update(
                gradients=done.gradients,
                state=state.learner,
                params=state.model,
                loss=done.objective,
                key=jax.random.fold_in(key, num_microbatches),
            )
        num_tokens = done.metrics["loss"].weight
        noise = {}
        if log_gradient_noise:
            noise = gradient_noise.estimates(done.metrics, update.metrics["gradient_norm"])
        metrics = {name: reading(value) for name, value in done.metrics.items()}
        metrics |= {**update.metrics, "num_tokens": num_tokens, "objective": done.objective}
        metrics |= noise
        params = tree.merge(update.params, done.state)
        return _end_step(model, learner, state, params, update.state, metrics)

    return train_step


def _accumulate(
    log_gradient_noise: bool,
    sum_by_layer: bool,
    model: Model,
    learner: Learner,
    params: Nested,
    train_dtype: str | None,
    batch: Batch,
    key: jax.Array,
    num_microbatches: int,
) -> Accumulated:
    """Returns the results of all micro-batches; their state has the parameters not trained."""
    trained, fixed = tree.split(params, learner.is_updated)
    specs = specs_by_path(model.create_parameter_specs_recursively())
    values: dict[str, Any] = {
        path: precision.CastAtUse(x, None, train_dtype)
        for path, x in tree.by_path(trained).items()
        if specs[path].axes[:1] == ("layers",) and precision.is_cast(specs[path], train_dtype)
    }
    values |= quantized_weights(params, specs, train_dtype)  # Once for all micro-batches.
    counts = model.token_counts(batch)
    summed: dict[str, Any] = {}
    if sum_by_layer and num_microbatches > 1 and counts is not None and not log_gradient_noise:
        # The weights of micro-batches are 1 then.
        late = {k: x for k, x in values.items() if isinstance(x, precision.CastAtUse)}
        values |= {path: dataclasses.replace(x, is_summed=True) for path, x in late.items()}
        zeros = {k: jnp.zeros(x.value.shape, jnp.float32) for k, x in late.items()}
        summed = {k: sharding.constrain(x, specs[k].axes) for k, x in zeros.items()}

    def micro_step(batch: Batch, carry: Any, sums: Mapping[str, Any] | None) -> Any:
        fixed, index = carry
        shares = _shares(model.token_counts(batch), counts, num_microbatches)

        def objective(at: Nested) -> Any:
            params = tree.merge(fixed, at)
            params = precision.read_parameters(params, specs, train_dtype, values)
            micro_key = jax.random.fold_in(key, index)
            loss, aux_loss, rest = _forward(model, params, micro_key, batch, is_training=True)
            return loss * shares[0] + aux_loss * shares[1], rest

        def start(path: str, x: jax.Array) -> jax.Array:
            dtype = precision.gradient_dtype(specs[path], train_dtype)
            if path not in values:
                return x.astype(dtype)
            dtype = "float32" if path in summed else dtype
            return sharding.constrain(jnp.zeros(x.shape, dtype), specs[path].axes)

        at = tree.map_by_path(start, trained)
        value, pull, (metrics, updates) = jax.vjp(objective, at, has_aux=True)
        gradients = _pull_back(pull, value, at, sums or {})
        new_fixed = updated(fixed, updates, trained, learner)
        weight = metrics["loss"].weight if counts is None else jnp.ones(())
        if log_gradient_noise:
            num_tokens = metrics["loss"].weight
            metrics |= gradient_noise.of_microbatch(gradients, num_tokens, shares[0])
        return value, weight, tag_gradients(gradients), metrics, (new_fixed, index + 1)

    carry = (fixed, jnp.zeros((), jnp.int32))
    done = accumulate(
        micro_step, batch, num_microbatches=num_microbatches, state=carry, sums=summed
    )
    sums = tag_gradients(tree.unflatten(done.sums or {}))
    return done._replace(state=done.state[0], gradients=tree.merge(done.gradients, sums))


def _pull_back(pull: Any, value: jax.Array, at: Nested, sums: Mapping[str, Any]) -> Nested:
    """Adds the gradients of a `jax.vjp` at some arrays to the refs; returns those without one."""
    targets = tree.map_by_path(lambda path, _: sums.get(path, jax.ad.GradValue()), at)
    (gradients,) = pull.with_refs(targets)(jnp.ones_like(value))
    return tree.select(gradients, lambda path: path not in sums)


def make_own_train_step(model: Model, learner: Learner) -> TrainStep:
    """Returns the function of `make_train_step` for a model with a training step of its own.

    Parameters that `model.own_step` changes without a gradient keep these values.
    """

    def train_step(state: TrainerState, batch: Batch) -> tuple[TrainerState, PackedMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.prng_key), state.step)
        updates: list[LearnerUpdate] = []

        def apply_gradients(params: Nested, gradients: Nested) -> Nested:
            if updates:
                raise UserError(
                    "train_step calls apply_gradients twice; call it once, with the gradients of "
                    "all parameters in one tree."
                )
            updates.append(
                learner.update(gradients=gradients, state=state.learner, params=params, key=key)
            )
            return updates[0].params

        (params, loss, metrics), _ = functional(
            model, key, state.model, (batch, apply_gradients), is_training=True, method="own_step"
        )
        found = {name: reading(value) for name, value in metrics.items()}
        found |= {"loss": loss.mean, "num_tokens": loss.weight, "objective": loss.mean}
        learner_state = state.learner
        if updates:
            learner_state, found = updates[0].state, found | updates[0].metrics
        return _end_step(model, learner, state, params, learner_state, found)

    return train_step


def make_eval_step(model: Model, *, train_dtype: str | None = None) -> EvalStep:
    """Returns the function (parameters, batch) -> sums that an evaluation accumulates.

    They are `num_tokens`; `total/<name>`, a mean times its weight, and `weight/<name>`; and
    `max/<name>` of metrics that are maxima.
    """

    def eval_step(params: Nested, batch: Batch) -> PackedMetrics:
        specs = model.create_parameter_specs_recursively()
        params = precision.cast_parameters(params, specs, train_dtype)
        _, _, (metrics, _) = _forward(model, params, None, batch, is_training=False)
        totals: dict[str, Any] = {"num_tokens": metrics["loss"].weight}
        for name, value in metrics.items():
            if isinstance(value, MaxScalar):
                totals[f"max/{name}"] = value.value
                continue
            # A mean over no tokens may be NaN; its total is 0.
            total = jnp.where(value.weight > 0, value.mean * value.weight, 0.0)
            totals[f"total/{name}"], totals[f"weight/{name}"] = total, value.weight
        return pack(totals)

    return eval_step


def _forward(
    model: Model, params: Nested, key: jax.Array | None, batch: Batch, *, is_training: bool
) -> Any:
    """Returns (loss, auxiliary losses, (metrics, state updates))."""
    outputs, collection = functional(model, key, params, (batch,), is_training=is_training)
    loss, metrics = outputs
    loss = as_metric(loss)
    counts = model.token_counts(batch)
    num_tokens = None if counts is None else counts[1]
    total = collection.total_aux_loss(num_tokens)
    aux_loss = weighted(total, loss.weight if num_tokens is None else num_tokens)
    found = collect(loss, metrics, collection, batch, aux_loss)
    return loss.mean, total, (found, collection.state_updates)


def _shares(counts: Any, of: Any, num_microbatches: int) -> Any:
    """Returns the factors of a micro-batch's loss and auxiliary losses.

    With them, the mean over micro-batches is the mean over the tokens of each of the two.
    """
    if of is None or num_microbatches == 1:
        return 1.0, 1.0
    return num_microbatches * jnp.stack(counts) / jnp.maximum(jnp.stack(of), 1.0)


def _end_step(
    model: Model,
    learner: Learner,
    before: TrainerState,
    new: Nested,
    learner_state: Any,
    found: Any,
) -> tuple[TrainerState, PackedMetrics]:
    """Returns the state after the layers' own updates at the end of the step, and the metrics.

    Frozen parameters keep their values, and all parameters do if the step is skipped.
    """
    skipped = found.get("skipped")
    new = model.end_step_recursively(new)

    def after(path: str, x: jax.Array, before: jax.Array) -> jax.Array:
        if learner.is_frozen(path):
            return before
        x = x.astype(before.dtype)
        if skipped is None or learner.is_updated(path):  # The learner skips its own updates.
            return x
        return jnp.where(skipped > 0, before, x)

    params = tree.map_by_path(after, new, before.model)
    found[NON_FINITE] = _is_non_finite(found["objective"], params, skipped)
    return TrainerState(before.step + 1, before.prng_key, params, learner_state), pack(found)


def _is_non_finite(loss: jax.Array, params: Nested, skipped: jax.Array | None) -> jax.Array:
    bad = ~jnp.isfinite(loss)
    if skipped is not None:
        bad &= skipped == 0
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    if current_device().platform != "cpu":
        return _any_non_finite(bad, leaves).astype(jnp.float32)
    # A finite sum has finite terms, and CPUs add eight times as fast as they test each element.
    total = sum((jnp.sum(x, dtype=jnp.float32) for x in leaves), jnp.zeros((), jnp.float32))
    found = jax.lax.cond(
        jnp.isfinite(total), lambda bad: bad, lambda bad: _any_non_finite(bad, leaves), bad
    )
    return found.astype(jnp.float32)


def _any_non_finite(bad: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns whether `bad` is True or a leaf has an element that is not finite."""
    for leaf in leaves:
        bad |= ~jnp.all(jnp.isfinite(leaf))
    return bad
