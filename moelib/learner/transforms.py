"""Gradient transformations that optimizers are made of, in addition to those of Optax.

Each function returns an `optax.GradientTransformation`. The learner fills in parameters of its
optimizer that are annotated `ModelSpecs`, where a config leaves them None.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moelib.core import tree
from moelib.core.config import ConfigBase, FunctionConfig
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, specs_by_path
from moelib.core.precision import cast_floats
from moelib.core.tree import Nested
from moelib.learner.schedules import Schedule, as_schedule

# The model's nested dict of ParameterSpec, which the learner fills in.
ModelSpecs = Annotated[Nested | None, "The specs of the learner's model."]

# Factors of parameters: (regex of a whole path "a/b/c", factor), first match wins; or a function of
# the ParameterSpec.
PathScales = Sequence[tuple[str, float]] | Callable[[ParameterSpec], float]


def model_specs_of(cfg: ConfigBase) -> list[str]:
    """Returns the fields of a function's config that are annotated `ModelSpecs` and None."""
    if not isinstance(cfg, FunctionConfig):
        return []
    parameters = inspect.signature(cfg.fn).parameters.values()
    names = [each.name for each in parameters if each.annotation == ModelSpecs]
    return [name for name in names if getattr(cfg, name) is None]


def chain(*args: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformations in sequence: gradients enter the first, the optimizer is last.

    Raises:
        UserError: If there are none, or one of them is something else.
    """
    if not args:
        raise UserError("chain: args is empty; list the transformations, the optimizer last.")
    for i, arg in enumerate(args):
        if not isinstance(arg, optax.GradientTransformation):
            raise UserError(
                f"chain: args[{i}] is {arg!r}; set it to a gradient transformation, or to the "
                "config of a function that returns one."
            )
    return optax.chain(*args)


def global_norm(gradients: Any) -> jax.Array:
    """Returns the root of the sum of all squares, float32; not finite if an element is not."""
    return optax.tree.norm(cast_floats(gradients, jnp.float32))


def clip_by_global_norm(max_norm: float, *, eps: float = 0.0) -> optax.GradientTransformation:
    """Returns gradients scaled down to a global norm of at most `max_norm`.

    The norm is over the parameters of this optimizer: with update rules, those of its own rule. The
    learner reports the norm before clipping as `gradient_norm`. `eps` is added to the norm that
    gradients are divided by (1e-6 in PyTorch and Megatron).

    Raises:
        UserError: If `max_norm` is not positive.

    Source: Pascanu et al., arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise UserError(f"clip_by_global_norm: max_norm is {max_norm}; set it above 0.")

    def update(updates: Any, _: Any) -> Any:
        norm = global_norm(updates)
        scale = jnp.where(norm > max_norm, max_norm / (norm + eps), 1.0)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)

    return optax.stateless(update)


class LearningRateState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    count: jax.Array  # Number of updates so far, int32 scalar.
    learning_rate: jax.Array  # Rate of the last update, 0 before the first, float32 scalar.


def scale_by_learning_rate(
    learning_rate: float | Schedule, *, reported_scale: float = 1.0
) -> optax.GradientTransformation:
    """Returns updates times minus the learning rate; the first update is step 1 of a schedule.

    The state holds the rate times `reported_scale`, for optimizers that have already multiplied
    the update by a constant rate.
    """
    schedule = as_schedule(learning_rate)

    def init(_: Any) -> LearningRateState:
        return LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates: Any, state: LearningRateState, _: Any = None) -> Any:
        count = optax.safe_increment(state.count)
        rate = jnp.asarray(schedule(count), jnp.float32)
        updates = jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates)
        return updates, LearningRateState(count, rate * reported_scale)

    return optax.GradientTransformation(init, update)


def add_decayed_weights(
    weight_decay: float,
    *,
    per_param_scale: PathScales = (),
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns updates plus `weight_decay` times each parameter's scale times the parameter.

    The scale is the `weight_decay_scale` of the parameter's spec (0 for biases and norms, 1 without
    specs) unless `per_param_scale` replaces it. It does not depend on the shape: a scan over layers
    stacks the scale of a norm to a matrix.

    Raises:
        UserError: If `weight_decay` is negative or a regex matches no path.

    Source: Loshchilov and Hutter, arXiv:1711.05101.
    """
    if not weight_decay >= 0:  # True for nan, too.
        raise UserError(f"weight_decay is {weight_decay}; set it to 0 or more.")
    scales_of = _scales(per_param_scale, param_specs)

    def update(updates: Any, params: Any) -> Any:
        scales = scales_of(params) if weight_decay else dict[str, float]()

        def add(path: str, update: jax.Array, param: jax.Array) -> jax.Array:
            scale = scales.get(path, 0.0) * weight_decay
            return update if scale == 0 else update + scale * param.astype(update.dtype)

        return tree.map_by_path(add, updates, params)

    return optax.stateless(update)


def _scales(
    rules: PathScales, param_specs: Nested | None
) -> Callable[[Nested], Mapping[str, float]]:
    """Returns the function parameters -> {path: factor}; with specs, checks the rules at once."""
    field = "weight_decay_per_param_scale"
    if param_specs is None:
        if callable(rules):
            raise UserError(f"{field}: a function of the spec requires param_specs; set them.")
        return lambda params: tree.match_rules(
            tree.by_path(params), rules, default=1.0, field=field
        )
    specs = specs_by_path(param_specs)
    if callable(rules):
        factors = {path: rules(spec) for path, spec in specs.items()}
    else:
        chosen = tree.match_rules(specs, rules, default=None, field=field)
        factors = {
            path: specs[path].weight_decay_scale if factor is None else factor
            for path, factor in chosen.items()
        }
    return lambda params: factors


def split(
    transforms: Mapping[str, optax.GradientTransformation], labels: Mapping[str, str]
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that updates each parameter by the transformation of its label.

    Each of them gets a nested dict of its own parameters only, where `optax.partition` masks the
    others. The state is a dict by label, without labels that no parameter has.
    """
    inner = {label: optax.with_extra_args_support(tx) for label, tx in transforms.items()}

    def part(params: Any, label: str) -> Nested:
        return tree.select(params, lambda path: labels[path] == label)

    def init(params: Nested) -> dict[str, Any]:
        parts = {label: part(params, label) for label in inner}
        return {label: inner[label].init(part) for label, part in parts.items() if part}

    def update(
        updates: Nested, state: dict[str, Any], params: Nested | None = None, **extra: Any
    ) -> tuple[Nested, dict[str, Any]]:
        done, new_state = {}, {}
        for label, old in state.items():
            own = None if params is None else part(params, label)
            out, new_state[label] = inner[label].update(part(updates, label), old, own, **extra)
            done = tree.merge(done, out)
        return done, new_state

    return optax.GradientTransformationExtraArgs(init, update)


# (loss or None, global norm of the gradients) -> whether to take the step, a bool scalar.
SkipPolicy = Callable[[jax.Array | None, jax.Array], jax.Array]


def skip_bad_steps(*, drop_norm: float | None = None) -> SkipPolicy:
    """Returns the policy that skips steps whose loss or gradients are not finite.

    Args:
        drop_norm: Global gradient norm above which a step is skipped too; None for no bound.

    Raises:
        UserError: If `drop_norm` is not positive.
    """
    if drop_norm is not None and not drop_norm > 0:
        raise UserError(f"skip_bad_steps: drop_norm is {drop_norm}; set it above 0, or to None.")

    def take_step(loss: jax.Array | None, gradient_norm: jax.Array) -> jax.Array:
        good = jnp.isfinite(gradient_norm)
        if drop_norm is not None:
            good &= gradient_norm <= drop_norm
        return good if loss is None else good & jnp.isfinite(loss)

    return take_step
