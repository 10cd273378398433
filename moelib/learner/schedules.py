"""Schedules: the learning rate, or a multiplier of it, as a function of the step.

The first update is step 1. With a linear warmup of W steps the rate at step s <= W is peak * s / W:
the first update has peak / W, not 0, and step W is the first at the peak. At `max_step`, the last
update of a run, a decaying schedule reaches `end_lr`, and stays there.

    learning_rate=config_for_function(schedules.wsd).set(
        peak_lr=3e-4, end_lr=3e-5, max_step=2121, warmup_steps=21.21, decay_steps=212)

Optax counts updates from 0, as does Megatron, whose first step has a rate of 0: optimizers of Optax
itself take schedules of Optax.

Shared arguments:
    peak_lr: Rate at the end of the warmup.
    warmup_steps: Length of the warmup, 0 for none; may be fractional.
    max_step: Step at which `end_lr` is reached; in a learner's config, by default the run's.
    end_lr: Rate at and after `max_step`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config import did_you_mean
from moelib.core.errors import UserError

Schedule = Callable[[Any], jax.Array]  # Step, an int or an integer scalar -> float32 scalar.

# Fraction of the way from end_lr to peak_lr, as a function of the fraction of the decay, 0 to 1.
_DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (1.0 + jnp.cos(math.pi * r)),
    "exponential": lambda r: 2.0 * jnp.exp2(-r) - 1.0,
    "minus_sqrt": lambda r: 1.0 - jnp.sqrt(r),
}


def as_schedule(value: float | Schedule) -> Schedule:
    """Returns a schedule unchanged, and a number as a constant schedule.

    Raises:
        UserError: If `value` is negative or not a number, or a function that cannot be called with
            a step alone.
    """
    if not callable(value):
        if isinstance(value, int | float) and not value >= 0:  # False for nan, too.
            raise UserError(f"learning_rate is {value}; set it to 0 or more.")
        return constant(value)
    try:
        inspect.signature(value).bind(1)
    except TypeError as error:
        name = getattr(value, "__qualname__", repr(value))
        raise UserError(
            f"{name} is not a schedule, which is called with the step alone: {error}; if it makes "
            f"one, set config_for_function({name}) and its fields."
        ) from None
    except ValueError:  # Some built-in callables have no signature.
        pass
    return value


def constant(peak_lr: float = 1.0, *, warmup_steps: float = 0) -> Schedule:
    """Returns a schedule that stays at `peak_lr` after the warmup."""
    _check_lengths("constant", None, peak_lr=peak_lr, warmup_steps=warmup_steps)
    return lambda step: peak_lr * _warmup(_float(step), warmup_steps)


def linear(
    peak_lr: float = 1.0, *, max_step: int, warmup_steps: float = 0, end_lr: float = 0.0
) -> Schedule:
    """Returns a schedule that falls linearly from the end of the warmup to `max_step`.

    Raises:
        UserError: If the warmup is negative or not shorter than `max_step`.
    """
    return _decaying("linear", peak_lr, end_lr, warmup_steps, warmup_steps, max_step)


def cosine(
    peak_lr: float = 1.0, *, max_step: int, warmup_steps: float = 0, end_lr: float = 0.0
) -> Schedule:
    """Returns a schedule that falls as half a cosine wave, otherwise like `linear`.

    Source: SGDR, arXiv:1608.03983, eq. 5, without restarts.
    """
    return _decaying("cosine", peak_lr, end_lr, warmup_steps, warmup_steps, max_step)


def wsd(
    peak_lr: float = 1.0,
    *,
    max_step: int,
    decay_steps: int,
    warmup_steps: float = 0,
    end_lr: float = 0.0,
    decay: str = "linear",
) -> Schedule:
    """Returns warmup, stable, decay: the peak is held until the last `decay_steps` steps.

    With r = (step - (max_step - decay_steps)) / decay_steps from 0 to 1, the rate of the decay is
    end_lr + c(r) * (peak_lr - end_lr), where c falls from 1 to 0: for `decay` "linear" 1 - r,
    "cosine" (1 + cos(pi r)) / 2, "exponential" 2 * 0.5^r - 1, "minus_sqrt" 1 - sqrt(r).

    Raises:
        UserError: If a length is negative, warmup and decay overlap, or the decay is unknown.

    Source: MiniCPM, arXiv:2404.06395, section 4.2; the forms are those of Megatron-LM's
    `--lr-decay-style WSD`; "minus_sqrt": Hägele et al., arXiv:2405.18392, eq. 3.
    """
    if decay not in _DECAYS:
        raise UserError(f"wsd: decay is {decay!r}; {did_you_mean(decay, _DECAYS)}")
    _check_lengths("wsd", max_step, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if decay_steps < 1:
        raise UserError(
            f"wsd: decay_steps is {decay_steps}; set it to 1 or more, or use schedules.constant."
        )
    return _decaying(decay, peak_lr, end_lr, warmup_steps, max_step - decay_steps, max_step)


def _decaying(
    form: str, peak_lr: float, end_lr: float, warmup_steps: float, start: float, max_step: int
) -> Schedule:
    """Returns a schedule that decays from step `start` to `max_step`."""
    _check_rates(form, peak_lr, end_lr)
    _check_lengths(form, max_step, warmup_steps=warmup_steps)
    if start >= max_step:
        raise UserError(
            f"{form}: warmup_steps is {warmup_steps} and max_step is {max_step}: no steps are left "
            "for the decay; set fewer warmup steps, or use schedules.constant."
        )

    def schedule(step: Any) -> jax.Array:
        step = _float(step)
        ratio = jnp.clip((step - start) / (max_step - start), 0.0, 1.0)
        return _warmup(step, warmup_steps) * (end_lr + _DECAYS[form](ratio) * (peak_lr - end_lr))

    return schedule


def _float(step: Any) -> jax.Array:
    return jnp.asarray(step, jnp.float32)


def _warmup(step: jax.Array, warmup_steps: float) -> jax.Array:
    """Returns step / warmup_steps, at most 1."""
    if warmup_steps == 0:
        return jnp.ones((), jnp.float32)
    return jnp.minimum(step / warmup_steps, 1.0)


def _check_rates(name: str, peak_lr: float, end_lr: float) -> None:
    """Raises UserError if a rate is negative, or the last one above the peak."""
    if not 0 <= end_lr <= peak_lr:
        raise UserError(
            f"{name}: peak_lr is {peak_lr} and end_lr is {end_lr}; set 0 <= end_lr <= peak_lr."
        )


def _check_lengths(name: str, max_step: int | None, **lengths: float) -> None:
    """Raises UserError if a length is negative, or their sum is longer than the run."""
    for field, length in lengths.items():
        if not length >= 0:  # NaN, too.
            raise UserError(f"{name}: {field} is {length}; set it to 0 or more.")
    if max_step is not None and sum(lengths.values()) > max_step:
        parts = " and ".join(f"{field} {length}" for field, length in lengths.items())
        raise UserError(
            f"{name}: {parts} are more than max_step {max_step}; shorten them, or train for longer."
        )
