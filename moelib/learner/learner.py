"""The learner: from gradients to new parameters.

    learner = cfg.instantiate(parent=None, param_specs=specs)
    state = learner.init(params)
    params, state, metrics = learner.update(
        gradients=gradients, state=state, params=params, loss=loss)

Parameters and their specs are nested dicts of one structure; paths are written "a/b/c". All
methods are pure, and can be traced by `jax.jit` and `jax.eval_shape`.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    ConfigOr,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from moelib.core.module import Module, nowrap
from moelib.core.param import is_spec, specs_by_path
from moelib.core.tree import Nested
from moelib.learner import offload, transforms
from moelib.learner.ema import EmaState, param_ema
from moelib.learner.state_specs import state_specs
from moelib.learner.streamed_update import streamed_update

_MAIN = "main"  # Label of the parameters that `optimizer` updates.
_FROZEN = "frozen"  # Label of those that are not updated.


class UpdateType(enum.Enum):
    """What an update rule does, if it names no optimizer of its own."""

    NO_UPDATE = "no_update"  # Frozen: no gradient is applied and no state is kept.
    OPTIMIZERS = "optimizers"  # Updated by the learner's `optimizer`, as without a rule.


class LearnerState(NamedTuple):
    """What the learner keeps between steps.

    Attributes:
        optimizer: State of the optimizers: "main", and "rule<i>" for update rules with their own.
        ema: The average of the parameters that are updated, or None.
        skipped_steps: int32 scalar, number of steps that were not taken.
    """

    optimizer: dict[str, Any]
    ema: EmaState | None
    skipped_steps: jax.Array


class LearnerUpdate(NamedTuple):
    """What `Learner.update` returns.

    Attributes:
        params: The new parameters.
        state: The new state.
        metrics: Scalars by name, to be logged.
    """

    params: Nested
    state: LearnerState
    metrics: dict[str, jax.Array]


class Learner(Module):
    """Updates parameters with an optimizer, or with different ones by path."""

    @config_class
    class Config(Module.Config):
        # Of moelib.learner.optimizers, or any of Optax: config_for_function(optax.adamw).
        optimizer: Required[ConfigOr[optax.GradientTransformation]] = REQUIRED
        # (regex for a whole path, what is done there); the first that matches wins.
        update_rules: Sequence[tuple[str, UpdateType | ConfigOr[optax.GradientTransformation]]] = ()
        ema: InstantiableConfig = config_for_function(param_ema)  # Off until `ema.decay` is set.
        # Returns a transforms.SkipPolicy, for example config_for_function(skip_bad_steps). None
        # takes every step, whatever the gradients are.
        skip: InstantiableConfig | None = None
        # Whether moments and averages wait in the host's memory between steps. A device then holds
        # them during the update only, for their way there and back in every step.
        offload_state: bool = False

    def __init__(self, cfg: Any, *, parent: Module | None, param_specs: Nested) -> None:
        """Builds the optimizers.

        Args:
            cfg: A `Learner.Config`.
            parent: The module that holds the learner, or None.
            param_specs: The model's nested dict of ParameterSpecs. Those that are not trainable
                are never updated, whatever the rules say.

        Raises:
            ValueError: If a rule matches no path or nothing that is trainable, or an optimizer
                config does not build a gradient transformation.
        """
        super().__init__(cfg, parent=parent)
        cfg = self.config
        self._param_specs = param_specs
        self._labels = self._label_parameters()
        optimizers = {_MAIN: self._build("optimizer", cfg.optimizer)}
        for i, (_, rule) in enumerate(cfg.update_rules):
            if not isinstance(rule, UpdateType):
                optimizers[f"rule{i}"] = self._build(f"update_rules[{i}][1]", rule)
        self._optimizer = transforms.split(optimizers, self._labels)
        self._ema = cfg.ema.instantiate()
        self._take_step = maybe_instantiate(cfg.skip)

    def _label_parameters(self) -> dict[str, str]:
        """Returns, by path, which optimizer updates a parameter."""
        labels = {UpdateType.NO_UPDATE: _FROZEN, UpdateType.OPTIMIZERS: _MAIN}
        rules = [
            (pattern, labels[rule] if isinstance(rule, UpdateType) else f"rule{i}")
            for i, (pattern, rule) in enumerate(self.config.update_rules)
        ]
        chosen = tree.match_rules(
            self._param_specs,
            rules,
            default=_MAIN,
            place=self._place("update_rules"),
            is_leaf=is_spec,
        )
        specs = specs_by_path(self._param_specs)
        chosen = {
            path: label if specs[path].trainable else _FROZEN
            for path, label in tree.by_path(chosen).items()
        }
        for pattern, label in rules:
            if label not in (_FROZEN, _MAIN) and label not in chosen.values():
                raise ValueError(
                    f"{self._place('update_rules')}: the rule {pattern!r} has an optimizer, but "
                    "matches only parameters that are not trainable; take it out."
                )
        return chosen

    def _place(self, field: str) -> str:
        return f"{self.path() or self.name}.{field}"

    def _build(self, field: str, cfg: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a config, which is told what the parameters are."""
        bare = lambda spec: dataclasses.replace(spec, initializer=None)
        specs = jax.tree.map(bare, self._param_specs, is_leaf=is_spec)
        optimizer = maybe_instantiate(_with_param_specs(_maybe_clone(cfg), specs))
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ValueError(
                f"{self._place(field)} builds {optimizer!r}; set it to the config of a function "
                "that returns an optax.GradientTransformation."
            )
        return optimizer

    @nowrap
    def is_updated(self, path: str) -> bool:
        """Returns whether the learner updates the parameter at "a/b/c", or leaves it as it is."""
        return self._labels[path] != _FROZEN

    @nowrap
    def init(self, params: Nested) -> LearnerState:
        """Returns the state before the first step. Parameters that are not updated have none.

        Raises:
            ValueError: If the parameters are not those of the specs.
        """
        known, given = set(self._labels), set(tree.by_path(params))
        for path in sorted(known ^ given):
            lacks, has = ("param_specs", "params") if path in given else ("params", "param_specs")
            raise ValueError(
                f"{self._place('init')}: {has} has {path!r} and {lacks} has not; build the learner "
                "with the specs of the model that the parameters are for."
            )
        updated = tree.select(params, self.is_updated)
        ema = None if self._ema is None else self._ema.init(updated)
        state = LearnerState(self._optimizer.init(updated), ema, jnp.zeros((), jnp.int32))
        return offload.to_host(state) if self.config.offload_state else state

    @nowrap
    def state_specs(self, param_specs: Nested | None = None) -> LearnerState:
        """Returns the tree of `init` with a ParameterSpec in place of each array; allocates none.

        Args:
            param_specs: Specs whose logical axes the state takes; None for the learner's own.
        """
        specs = self._param_specs if param_specs is None else param_specs
        shapes = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)),
            specs,
            is_leaf=is_spec,
        )
        return state_specs(jax.eval_shape(self.init, shapes), specs)

    @nowrap
    def state_shardings(self, specs: LearnerState, shardings: LearnerState) -> LearnerState:
        """Returns where the state's arrays lie between steps.

        Args:
            specs: The state with a ParameterSpec in place of each array, as of `state_specs`.
            shardings: Where each would lie on the devices, as NamedShardings.

        Raises:
            ValueError: If `offload_state` is set, and the devices reach no memory of the host.
        """
        if not self.config.offload_state:
            return shardings
        return offload.host_shardings(specs, shardings, self._place("offload_state"))

    @nowrap
    def update(
        self,
        *,
        gradients: Nested,
        state: LearnerState,
        params: Nested,
        loss: jax.Array | None = None,
    ) -> LearnerUpdate:
        """Returns the parameters and the state after one step, and metrics.

        Metrics, float32: `gradient_norm` before clipping, over all parameters that are updated;
        `learning_rate` of the main optimizer and `learning_rate/rule<i>` where they are known (for
        those of this library, and Optax's under `inject_hyperparams`); with a skip policy
        `skipped`, 1 if this step is not taken, and `skipped_steps`, the number of them so far.

        A step that is not taken changes no bit of the parameters and of the state, except the
        count of skipped steps: schedules do not advance either.

        Args:
            gradients: Nested like `params`. Where a parameter is not updated (not trainable, or
                frozen by a rule) anything may stand: zeros, None, or no entry.
            state: The state.
            params: The parameters.
            loss: Scalar, for the skip policy, and as `value` for optimizers of Optax that ask for
                it, or None.

        Raises:
            ValueError: If the gradient of a parameter that is updated is missing.
        """
        updated = tree.select(params, self.is_updated)
        gradients = self._gradients_of(updated, gradients)
        norm = transforms.global_norm(gradients)
        metrics = {"gradient_norm": norm}
        take = None if self._take_step is None else self._take_step(loss, norm)
        step = functools.partial(self._step, take=take, loss=loss)
        run = streamed_update if self.config.offload_state else _at_once
        new, new_state, rates = run(step, updated, gradients, state)
        if take is not None:
            metrics["skipped"] = 1.0 - take.astype(jnp.float32)
            metrics["skipped_steps"] = new_state.skipped_steps.astype(jnp.float32)
        return LearnerUpdate(tree.merge(params, new), new_state, metrics | rates)

    def _step(
        self,
        params: Nested,
        gradients: Nested,
        state: LearnerState,
        *,
        take: jax.Array | None,
        loss: jax.Array | None,
    ) -> tuple[Nested, LearnerState, dict[str, jax.Array]]:
        """Returns the parameters, the state and the learning rates after a step, if it is taken."""
        gradients = tree.cast_floats(gradients, jnp.float32)

        def step() -> tuple[Nested, LearnerState, dict[str, jax.Array]]:
            extra = {} if loss is None else {"value": loss}
            updates, optimizer = self._optimizer.update(gradients, state.optimizer, params, **extra)
            new = optax.apply_updates(params, updates)
            ema = None if self._ema is None else self._ema.update(new, state.ema)
            new_state = LearnerState(optimizer, ema, state.skipped_steps)
            return new, new_state, _learning_rates(optimizer)

        if take is None:
            return step()
        rest = state._replace(skipped_steps=state.skipped_steps + 1)
        untaken = params, rest, _learning_rates(state.optimizer)
        if self.config.offload_state:  # Array by array: a branch would need all at once.
            return jax.tree.map(functools.partial(jnp.where, take), step(), untaken)
        # A branch, not a choice between two results: both would have to be kept in memory.
        return jax.lax.cond(take, step, lambda: untaken)

    def _gradients_of(self, updated: Nested, gradients: Nested) -> Nested:
        """Returns the gradients of the parameters that are updated."""
        given = tree.by_path(gradients)

        def gradient(path: str, param: jax.Array) -> jax.Array:
            if path not in given or given[path].shape != param.shape:
                what = f"has shape {given[path].shape}" if path in given else "is missing"
                raise ValueError(
                    f"{self._place('update')}: the gradient of {path!r}, shape {param.shape}, "
                    f"{what}; freeze the parameter with an update rule if it has none."
                )
            return given[path]

        return tree.map_by_path(gradient, updated)

    @nowrap
    def eval_params(self, state: LearnerState, params: Nested) -> Nested:
        """Returns the parameters to evaluate: the average if there is one, else `params`.

        Averages have the dtypes of `params`; parameters that are not updated are as they are.
        """
        if state.ema is None:
            return params
        updated = tree.select(params, self.is_updated)
        averages = state.ema.params
        if self.config.offload_state:
            averages = offload.to_device(averages)
        average = jax.tree.map(lambda a, p: a.astype(p.dtype), averages, updated)
        return tree.merge(params, average)


def _at_once(step: Callable[..., Any], *args: Any) -> Any:
    return step(*args)


def _maybe_clone(cfg: Any) -> Any:
    """Returns an unfrozen copy of a config, and anything else as it is."""
    return cfg.clone() if isinstance(cfg, ConfigBase) else cfg


def _with_param_specs(value: Any, param_specs: Nested) -> Any:
    """Sets each field `param_specs` that is None, at any depth of a config, and returns it."""
    if isinstance(value, ConfigBase):
        for name, inside in value.items():
            if name == "param_specs" and inside is None:
                value.set(param_specs=param_specs)
            else:
                _with_param_specs(inside, param_specs)
    elif isinstance(value, list | tuple):
        for inside in value:
            _with_param_specs(inside, param_specs)
    elif isinstance(value, dict):
        for inside in value.values():
            _with_param_specs(inside, param_specs)
    return value


def _learning_rates(state: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns the rates that optimizers keep in their state, by the name of their metric."""
    rates = {}
    for label, inner in state.items():
        found = optax.tree.get_all_with_path(inner, "learning_rate")
        scalars = [value for _, value in found if getattr(value, "shape", None) == ()]
        if scalars:
            name = "learning_rate" if label == _MAIN else f"learning_rate/{label}"
            rates[name] = scalars[0].astype(jnp.float32)
    return rates
