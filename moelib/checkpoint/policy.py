"""When a checkpoint is written or an evaluation run, and which checkpoints are kept."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

Policy = Callable[..., bool]  # (*, step, summaries=None) -> whether to act after that step.


def every_n_steps_policy(n: int = 1, *, min_step: int = 1) -> Policy:
    """Returns the policy that acts at every multiple of `n`, from `min_step` on.

    Raises:
        ValueError: If `n` is less than 1.
    """
    if n < 1:
        raise ValueError(f"every_n_steps_policy: n is {n}; set it to 1 or more.")

    def policy(*, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        del summaries
        return step >= min_step and step % n == 0

    return policy


def every_n_steps_and_last_policy(
    n: int = 1, *, min_step: int = 1, max_step: int | None = None
) -> Policy:
    """Returns the policy that acts at every multiple of `n`, and at `max_step`.

    Args:
        n: Steps between.
        min_step: No step before it.
        max_step: The run's last step; a trainer sets its own where it is None.

    Raises:
        ValueError: If `n` is less than 1.
    """
    every = every_n_steps_policy(n, min_step=min_step)

    def policy(*, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        return every(step=step, summaries=summaries) or step == max_step

    return policy


def evenly_spaced_policy(num: int = 10, *, max_step: int | None = None) -> Policy:
    """Returns the policy that acts `num` times, evenly spaced, the last time at `max_step`.

    Steps are max_step * i / num, i = 1 ... num, rounded up.

    Args:
        num: How many times.
        max_step: The run's last step; a trainer sets its own where it is None.

    Raises:
        ValueError: If `num` is less than 1 or `max_step` is not known.
    """
    if num < 1 or max_step is None:
        raise ValueError(
            f"evenly_spaced_policy: num is {num} and max_step {max_step}; set num to 1 or more and "
            "max_step to the run's last step."
        )
    steps = {math.ceil(max_step * i / num) for i in range(1, num + 1)}

    def policy(*, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        del summaries
        return step in steps

    return policy


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_last_n: int | None,
    keep_every_n_steps: int | None = None,
    keep_best_n: int = 0,
    best_mode: Literal["min", "max"] = "min",
) -> Collection[int]:
    """Returns the steps whose checkpoints stay; always the newest.

    Args:
        metrics: For each step with a checkpoint the number to judge it by, or None.
        keep_last_n: How many of the newest stay; None keeps all.
        keep_every_n_steps: Multiples of it stay for ever.
        keep_best_n: How many of the best stay, of those that have a number.
        best_mode: Whether the least or the greatest number is best.
    """
    steps = sorted(metrics)
    if keep_last_n is None:
        return set(steps)
    kept = set(steps[-max(keep_last_n, 1) :])
    if keep_every_n_steps:
        kept |= {step for step in steps if step % keep_every_n_steps == 0}
    sign = 1 if best_mode == "min" else -1
    judged = [(sign * m, -step) for step, m in metrics.items() if m is not None and m == m]
    return kept | {-step for _, step in sorted(judged)[:keep_best_n]}
