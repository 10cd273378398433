"""Learning rates of Megatron-LM."""

import math


def megatron_lr(
    num_steps: float,
    *,
    style: str,
    max_lr: float,
    min_lr: float,
    warmup: float,
    decay: float,
    wsd_decay: float = 0,
    wsd_style: str = "",
) -> float:
    """Returns OptimizerParamScheduler.get_lr with init_lr 0, in one unit: steps or samples."""
    if warmup > 0 and num_steps <= warmup:
        return max_lr * num_steps / warmup
    if num_steps > decay:
        return min_lr
    ratio = (num_steps - warmup) / (decay - warmup)
    if style == "linear":
        coeff = 1 - ratio
    elif style == "cosine":
        coeff = 0.5 * (math.cos(math.pi * ratio) + 1)
    elif num_steps <= decay - wsd_decay:
        coeff = 1.0
    else:
        r = (num_steps - (decay - wsd_decay)) / wsd_decay
        coeff = {
            "linear": 1 - r,
            "cosine": 0.5 * (math.cos(math.pi * r) + 1),
            "exponential": 2 * 0.5**r - 1,
            "minus_sqrt": 1 - math.sqrt(r),
        }[wsd_style]
    return min_lr + coeff * (max_lr - min_lr)
