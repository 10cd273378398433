"""The learner: from gradients to new parameters.

    learner = cfg.instantiate(parent=None, param_specs=specs)
    state = learner.init(params)
    params, state, metrics = learner.update(
        gradients=gradients, state=state, params=params, loss=loss)

Parameters and their specs are nested dicts of one structure, with paths "a/b/c". All methods are
pure, and can be traced by `jax.jit` and `jax.eval_shape`.
"""

import dataclasses
import enum
import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

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
from moelib.core.config_text import sub_configs
from moelib.core.errors import UserError
from moelib.core.jaxpr import abstract_parameters
from moelib.core.module import Module
from moelib.core.param import is_spec, specs_by_path
from moelib.core.precision import cast_floats
from moelib.core.tree import Nested
from moelib.learner import offload, transforms
from moelib.learner.ema import EmaState, param_ema
from moelib.learner.moments import MomentFormat, apply_updates, moments_in, stored_as
from moelib.learner.norms import group_paths, norms_of
from moelib.learner.state_specs import state_specs
from moelib.learner.streamed_update import streamed_update

logger = logging.getLogger(__name__)

# Labels of parameters, in addition to "rule<i>" of an update rule with an optimizer.
_MAIN = "main"  # Updated by `optimizer`.
_UNTRAINED = "untrained"  # Not trainable: changed by layers only.
_FROZEN = "frozen"  # Changed by nothing.


class UpdateType(enum.Enum):
    """Effect of an update rule without an optimizer of its own."""

    NO_UPDATE = "no_update"  # Frozen: neither gradients nor layers change it; it has no state.
    OPTIMIZERS = "optimizers"  # Updated by the learner's `optimizer`, as without a rule.


class LearnerState(NamedTuple):
    """State of the learner between steps."""

    optimizer: dict[str, Any]  # States by label: "main", and "rule<i>" of rules with one.
    ema: EmaState | None  # Average of the updated parameters.
    skipped_steps: jax.Array  # Number of skipped steps, int32 scalar.


class LearnerUpdate(NamedTuple):
    """Result of `Learner.update`."""

    params: Nested
    state: LearnerState
    metrics: dict[str, jax.Array]  # Scalars to log, by name.


class Learner(Module):
    """Updates parameters with one optimizer, or with different ones by path."""

    @config_class
    class Config(Module.Config):
        # A function of moelib.learner.optimizers, or of Optax: config_for_function(optax.adamw),
        # whose learning rate is logged only inside optax.inject_hyperparams.
        optimizer: Required[ConfigOr[optax.GradientTransformation]] = REQUIRED
        # (regex of a whole path, update there); the first match wins, `optimizer` if none does.
        update_rules: Sequence[tuple[str, UpdateType | ConfigOr[optax.GradientTransformation]]] = ()
        # Average of the parameters, which evaluations use; off until `ema.decay` is set.
        ema: InstantiableConfig = config_for_function(param_ema)
        # Builds a transforms.SkipPolicy, for example config_for_function(skip_bad_steps). None
        # takes every step, whatever its gradients are.
        skip: InstantiableConfig | None = None
        # Groups of updated parameters whose norms of gradient, parameter and update are metrics:
        # {name: regex of whole paths}, where the first match wins and the rest is "other"; or
        # regexes, one group per path or per text of the capture groups, so that ["([^/]+)/.*"] has
        # one per top-level layer. None by default.
        norms_of: Sequence[str] | dict[str, str] = ()
        # Storage of optimizers' means of gradients. A parameter takes 2 bytes in BFLOAT16 and 1 in
        # EIGHT_BIT, instead of 4. All other state is stored as the optimizer returns it, and so are
        # arrays of fewer than 4,096 elements and, in EIGHT_BIT, of rows of fewer than 32.
        first_moment: MomentFormat = MomentFormat.FLOAT32
        # Storage of optimizers' means of squared gradients.
        second_moment: MomentFormat = MomentFormat.FLOAT32
        # Whether moments in fewer bits, and parameters in bfloat16, are rounded at random to one of
        # the two nearest values, so that small changes add up. False rounds to the nearest.
        stochastic_rounding: bool = False
        # Whether moments and averages stay in host memory between steps. A device then holds them
        # only while their parameters are updated; every step transfers them both ways.
        offload_state: bool = False

    def __init__(self, cfg: Any, *, parent: Module | None, param_specs: Nested) -> None:
        """Builds the optimizers.

        Args:
            cfg: A `Learner.Config`.
            parent: Module that holds the learner, or None.
            param_specs: Nested ParameterSpecs of the model. Parameters that are not trainable are
                never updated, whatever the rules.

        Raises:
            ValueError: If a rule matches no path or nothing that is trainable, or an optimizer
                config does not build a gradient transformation.
        """
        super().__init__(cfg, parent=parent)
        cfg = self.config
        without_initializer = functools.partial(dataclasses.replace, initializer=None)
        self._param_specs = jax.tree.map(without_initializer, param_specs, is_leaf=is_spec)
        self._labels = self._label_parameters()
        updated = [path for path in self._labels if self.is_updated(path)]
        self._norm_groups = group_paths(updated, cfg.norms_of, self._field("norms_of"))
        optimizers = {_MAIN: self._build("optimizer", cfg.optimizer)}
        for i, (_, rule) in enumerate(cfg.update_rules):
            if not isinstance(rule, UpdateType):
                optimizers[f"rule{i}"] = self._build(f"update_rules[{i}][1]", rule)
        self._optimizer = transforms.split(optimizers, self._labels)
        self._ema = cfg.ema.instantiate()
        self._has_warned = False  # Whether a warning named state that stays in float32.
        self._take_step = maybe_instantiate(cfg.skip)

    def _label_parameters(self) -> dict[str, str]:
        """Returns the label of each parameter, by path."""
        labels = {UpdateType.NO_UPDATE: _FROZEN, UpdateType.OPTIMIZERS: _MAIN}
        rules = [
            (pattern, labels[rule] if isinstance(rule, UpdateType) else f"rule{i}")
            for i, (pattern, rule) in enumerate(self.config.update_rules)
        ]
        specs, field = specs_by_path(self._param_specs), self._field("update_rules")
        chosen = {
            path: label if specs[path].trainable or label == _FROZEN else _UNTRAINED
            for path, label in tree.match_rules(specs, rules, default=_MAIN, field=field).items()
        }
        for pattern, label in rules:
            if label not in (_FROZEN, _MAIN) and label not in chosen.values():
                raise UserError(
                    f"{field}: the rule {pattern!r} has an optimizer, but matches only parameters "
                    "that are not trainable; remove it."
                )
        return chosen

    def _field(self, name: str) -> str:
        return f"{self._title()}.{name}"

    def _build(self, field: str, cfg: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a config, with every unset `ModelSpecs` in it filled in."""
        if isinstance(cfg, ConfigBase):
            cfg = cfg.clone()
            for inside in (cfg, *(each for _, each in sub_configs(cfg))):
                for name in transforms.model_specs_of(inside):
                    inside.set(**{name: self._param_specs})
        optimizer = maybe_instantiate(cfg)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise UserError(
                f"{self._field(field)} builds {optimizer!r}; set it to the config of a function "
                "that returns an optax.GradientTransformation."
            )
        if not self._has_low_moments():
            return optimizer
        return stored_as(optimizer, self.config.first_moment, self.config.second_moment)

    def is_updated(self, path: str) -> bool:
        """Returns whether an optimizer updates the parameter at "a/b/c"."""
        return self._labels[path] not in (_UNTRAINED, _FROZEN)

    def is_frozen(self, path: str) -> bool:
        """Returns whether a rule forbids any change of the parameter at "a/b/c", by layers too."""
        return self._labels[path] == _FROZEN

    def init(self, params: Nested) -> LearnerState:
        """Returns the state before the first step. Parameters that are not updated have none.

        Raises:
            UserError: If a moment is to be stored in fewer bits, and no optimizer has it; if
                `stochastic_rounding` is set, and nothing is stored in fewer bits; if
                `offload_state` is set, and there is none.
            ValueError: If the parameters are not those of the specs.
        """
        known, given = set(self._labels), set(tree.by_path(params))
        for path in sorted(known ^ given):
            lacks, has = ("param_specs", "params") if path in given else ("params", "param_specs")
            raise ValueError(
                f"{self._field('init')}: {path!r} is in {has} but not in {lacks}; build the "
                "learner with the specs of the model that the parameters belong to."
            )
        updated = tree.select(params, self.is_updated)
        ema = None if self._ema is None else self._ema.init(updated)
        optimizer = self._optimizer.init(cast_floats(updated, jnp.float32))
        state = LearnerState(optimizer, ema, jnp.zeros((), jnp.int32))
        fields = ("first_moment", "second_moment")
        *moments, others = moments_in(state.optimizer)
        if others and self._has_low_moments() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %s are no moments of a known optimizer, and stay in float32.",
                self._field("optimizer"),
                f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}",
            )
        for field, found in zip(fields, moments, strict=True):
            format_ = getattr(self.config, field)
            if updated and format_ is not MomentFormat.FLOAT32 and not found:
                means = "gradients" if field == "first_moment" else "squared gradients"
                raise UserError(
                    f"{self._field(field)} is {format_}, but the state of the optimizer has no "
                    f"means of {means} that can be stored so; set it to MomentFormat.FLOAT32."
                )
        if self.config.stochastic_rounding and updated and not self._rounds(updated):
            raise UserError(
                f"{self._field('stochastic_rounding')} is True, but moments and parameters are "
                "stored in float32, which is not rounded; set first_moment, second_moment or the "
                "model's dtype to fewer bits, or stochastic_rounding to False."
            )
        if not self.config.offload_state:
            return state
        if updated and not any(map(offload.is_offloaded, jax.tree.leaves(state))):
            raise UserError(
                f"{self._field('offload_state')} is True, but the optimizer keeps no array between "
                "steps; set it to False."
            )
        return offload.to_host(state)

    def _rounds(self, updated: Nested) -> bool:
        """Returns whether moments, or some of the parameters, are stored in fewer bits."""
        low = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(updated))
        return low or self._has_low_moments()

    def _has_low_moments(self) -> bool:
        formats = self.config.first_moment, self.config.second_moment
        return set(formats) != {MomentFormat.FLOAT32}

    def state_specs(self) -> LearnerState:
        """Returns the tree of `init` with a ParameterSpec for each array; allocates none.

        Logs a warning if the config of an optimizer builds one without a learning rate to report.
        """
        state = jax.eval_shape(self.init, abstract_parameters(self._param_specs))
        known = _learning_rates(state.optimizer)
        rules = {f"rule{i}": rule for i, (_, rule) in enumerate(self.config.update_rules)}
        for label, given in ({_MAIN: self.config.optimizer} | rules).items():
            # One that is given built is the user's own choice, and no setting changes it.
            if _rate_name(label) not in known and isinstance(given, ConfigBase):
                logger.warning(
                    "%s: the learning rate of optimizer %r is not logged, because its state does "
                    "not hold it; set it to config_for_function(optax.inject_hyperparams("
                    "optax.adam)).set(learning_rate=...), for example.",
                    self._title(),
                    label,
                )
        return state_specs(state, self._param_specs)

    def state_shardings(self, specs: LearnerState, shardings: LearnerState) -> LearnerState:
        """Returns the shardings of the state between steps, from those in device memory.

        Raises:
            ValueError: If `offload_state` is set, and the devices cannot address host memory.
        """
        field = self._field("offload_state")
        return (
            offload.host_shardings(specs, shardings, field)
            if self.config.offload_state
            else shardings
        )

    def update(
        self,
        *,
        gradients: Nested,
        state: LearnerState,
        params: Nested,
        loss: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> LearnerUpdate:
        """Returns the parameters and the state after one step, and metrics.

        Metrics, float32 scalars: `gradient_norm` before clipping, over all updated parameters;
        `learning_rate` of the main optimizer and `learning_rate/rule<i>` where the state holds
        them; with a skip policy `skipped`, 1 if this step is skipped, and `skipped_steps`, their
        number so far; with `norms_of`, those of `moelib.learner.norms.norms_of`, before clipping.

        A skipped step changes no bit of the parameters and of the state, except the count of
        skipped steps: schedules do not advance either.

        Args:
            gradients: Nested like `params`. For a parameter that is not updated any value will do:
                zeros, None, or no entry.
            state: State before the step.
            params: Parameters before the step.
            loss: Scalar for the skip policy and, as `value`, for optimizers of Optax that use it.
            key: Random key of the step, for stochastic rounding.

        Raises:
            UserError: If `stochastic_rounding` is set, and there is no key.
            ValueError: If the gradient of an updated parameter is missing.
        """
        updated = tree.select(params, self.is_updated)
        gradients = self._gradients_of(updated, gradients)
        norm = transforms.global_norm(gradients)
        metrics = {"gradient_norm": norm}
        take = None if self._take_step is None else self._take_step(loss, norm)
        if self.config.stochastic_rounding and key is None:
            raise UserError(
                f"{self._field('stochastic_rounding')} is True, but `update` is called without a "
                "key; pass key=, or set it to False."
            )
        key = key if self.config.stochastic_rounding else None
        step = functools.partial(self._step, take=take, loss=loss, key=key)
        if self.config.offload_state:
            new, new_state, rates = streamed_update(step, updated, gradients, state)
        else:
            new, new_state, rates = step(updated, gradients, state)
        if take is not None:
            metrics["skipped"] = 1.0 - take.astype(jnp.float32)
            metrics["skipped_steps"] = new_state.skipped_steps.astype(jnp.float32)
        if self._norm_groups:
            metrics |= norms_of(self._norm_groups, gradients, updated, new)
        metrics |= cast_floats(rates, jnp.float32)
        return LearnerUpdate(tree.merge(params, new), new_state, metrics)

    def _step(
        self,
        params: Nested,
        gradients: Nested,
        state: LearnerState,
        *,
        take: jax.Array | None,
        loss: jax.Array | None,
        key: jax.Array | None = None,
    ) -> tuple[Nested, LearnerState, dict[str, jax.Array]]:
        """Returns parameters, state and learning rates after the step, or as they were."""

        def step() -> tuple[Nested, LearnerState, dict[str, jax.Array]]:
            grads, exact = cast_floats((gradients, params), jnp.float32)
            extra = {"value": loss, "rounding_key": key}
            extra = {name: x for name, x in extra.items() if x is not None}
            updates, optimizer = self._optimizer.update(grads, state.optimizer, exact, **extra)
            new = apply_updates(params, updates, key)
            ema = None if self._ema is None else self._ema.update(new, state.ema)
            new_state = LearnerState(optimizer, ema, state.skipped_steps)
            return new, new_state, _learning_rates(optimizer)

        if take is None:
            return step()
        rest = state._replace(skipped_steps=state.skipped_steps + 1)
        skipped = params, rest, _learning_rates(state.optimizer)
        if self.config.offload_state:  # Array by array: a branch would need all at once.
            return jax.tree.map(functools.partial(jnp.where, take), step(), skipped)
        # A branch, not a selection between two results: both would be kept in memory.
        return jax.lax.cond(take, step, lambda: skipped)

    def _gradients_of(self, updated: Nested, gradients: Nested) -> Nested:
        """Returns the gradients of the updated parameters."""
        given = tree.by_path(gradients)

        def gradient(path: str, param: jax.Array) -> jax.Array:
            if path not in given or given[path].shape != param.shape:
                what = f"has shape {given[path].shape}" if path in given else "is missing"
                raise ValueError(
                    f"{self._field('update')}: the gradient of {path!r}, shape {param.shape}, "
                    f"{what}; freeze the parameter with an update rule if it has none."
                )
            return given[path]

        return tree.map_by_path(gradient, updated)

    def eval_params(self, state: LearnerState, params: Nested) -> Nested:
        """Returns the parameters to evaluate, with the dtypes of `params`.

        These are their average if the learner keeps one, else the evaluation point of optimizers
        that have one (`optax.contrib.schedule_free`), else `params`.
        """
        on_device = offload.to_device if self.config.offload_state else lambda x: x
        if state.ema is not None:
            found = on_device(state.ema.params)
        else:
            found = {}
            for inner in jax.tree.leaves(state.optimizer, is_leaf=_is_schedule_free):
                if _is_schedule_free(inner):
                    inner = inner._replace(z=on_device(inner.z))
                    found = tree.merge(found, _schedule_free_params(inner, params))
        if not found:
            return params
        updated = tree.select(params, tree.by_path(found).__contains__)
        return tree.merge(params, jax.tree.map(lambda x, p: x.astype(p.dtype), found, updated))


def _is_schedule_free(state: Any) -> bool:
    return isinstance(state, optax.contrib.ScheduleFreeState)


def _schedule_free_params(state: Any, params: Nested) -> Nested:
    """Returns the evaluation points of the parameters that an optimizer updates."""
    base = tree.by_path(state.z)
    own = {path: x for path, x in tree.by_path(params).items() if path in base}
    return tree.unflatten(optax.contrib.schedule_free_eval_params(state._replace(z=base), own))


def _rate_name(label: str) -> str:
    return "learning_rate" if label == _MAIN else f"learning_rate/{label}"


def _learning_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the learning rates in the states of the optimizers, by the name of their metric."""
    rates = {}
    for label, inner in state.items():
        found = optax.tree.get_all_with_path(inner, "learning_rate")
        scalars = [value for _, value in found if getattr(value, "shape", None) == ()]
        if scalars:
            rates[_rate_name(label)] = scalars[0]
    return rates
