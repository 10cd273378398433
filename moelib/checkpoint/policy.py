"""Policies: the steps with a checkpoint or an evaluation, and the checkpoints that are kept."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from moelib.core.errors import UserError

Policy = Callable[..., bool]  # (*, step, summaries=None) -> whether to act after that step.


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> Policy:
    """Returns the policy that acts at every multiple of `n`, from `min_step` on.

    Raises:
        UserError: If `n` is less than 1.
    """
    if n < 1:
        raise UserError(f"every_n_steps_policy: n={n}; set 1 or more.")
    return lambda *, step, summaries=None: step >= min_step and step % n == 0


def every_n_steps_and_last_policy(
    n: int = 1, *, min_step: int = 1, max_step: int | None = None
) -> Policy:
    """Returns the policy that acts at every multiple of `n`, from `min_step` on, and at `max_step`.

    The trainer sets an unset `max_step` to the run's last step.

    Raises:
        UserError: If `n` is less than 1.
    """
    every = every_n_steps_policy(n, min_step=min_step)
    return lambda *, step, summaries=None: every(step=step) or step == max_step


def evenly_spaced_policy(num: int = 10, *, max_step: int | None = None) -> Policy:
    """Returns the policy that acts at steps max_step * i / num, i = 1 ... num, rounded up.

    The trainer sets an unset `max_step` to the run's last step.

    Raises:
        UserError: If `num` is less than 1 or `max_step` is unknown.
    """
    if num < 1 or max_step is None:
        raise UserError(
            f"evenly_spaced_policy: num={num}, max_step={max_step}; set num to 1 or more and "
            "max_step to the run's last step."
        )
    steps = {math.ceil(max_step * i / num) for i in range(1, num + 1)}
    return lambda *, step, summaries=None: step in steps


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_last_n: int | None,
    keep_every_n_steps: int | None = None,
    keep_best_n: int = 0,
    best_mode: Literal["min", "max"] = "min",
) -> Collection[int]:
    """Returns the steps whose checkpoints are kept: the newest, multiples of n, and the best.

    `metrics` holds the metric of each step with a checkpoint, or None. The newest is always kept;
    `keep_last_n=None` keeps all. The best are those with the least or the greatest metric.
    """
    steps = sorted(metrics)
    if keep_last_n is None:
        return set(steps)
    kept = set(steps[-max(keep_last_n, 1) :])
    if keep_every_n_steps:
        kept |= {step for step in steps if step % keep_every_n_steps == 0}
    return kept | set(best_steps(metrics, best_mode)[:keep_best_n])


def best_steps(metrics: Mapping[int, float | None], mode: Literal["min", "max"]) -> list[int]:
    """Returns the steps that have a metric, the least or the greatest one first; then the newest.

    NaN is no metric.
    """
    sign = 1 if mode == "min" else -1
    judged = [(sign * m, -step) for step, m in metrics.items() if m is not None and m == m]
    return [-step for _, step in sorted(judged)]
