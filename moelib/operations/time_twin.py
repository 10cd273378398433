"""The dense twin of a config whose training step takes the same time on this machine."""

import dataclasses
import logging
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from moelib.core.errors import UserError
from moelib.data.batches.synthetic import SyntheticInput
from moelib.operations.dense_twin import DenseTwin, dense_twin
from moelib.runs.metrics_file import read_metrics
from moelib.tasks.fit import fit

logger = logging.getLogger(__name__)

_INTERVALS = 5  # Intervals of a measurement; the first one, after the compilation, is not counted.
_LIMITS = (1 / 16, 16.0)  # Of the width.


@dataclasses.dataclass(frozen=True)
class TimeTwin:
    """A dense twin, and the measured times."""

    twin: DenseTwin
    moe_seconds: float  # Per step.
    dense_seconds: float  # Per step.
    measured: dict[float, float]  # {factor of the hidden sizes: seconds per step}.


def measured_step_seconds(cfg: Any, num_steps: int = 5) -> float:
    """Returns the median seconds per step of a config, trained here on a made-up language.

    Args:
        cfg: Config of a trainer of a language model; its data are not read.
        num_steps: Steps of an interval, of which there are five.
    """
    cfg = cfg.clone(evalers={}, checkpointer=None, watchers={})
    cfg.set(max_step=_INTERVALS * num_steps, log_every_n_steps=num_steps, phases={}, phase=None)
    cfg.input = SyntheticInput.default_config().set(
        seq_len=cfg.input.seq_len, global_batch_size=cfg.input.global_batch_size
    )
    with tempfile.TemporaryDirectory() as folder:
        fit(cfg, trainer_dir=folder)
        lines = read_metrics(folder, ["step_seconds"])
        seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    if len(seconds) < _INTERVALS:
        raise UserError(
            f"num_steps={num_steps}: the run has {len(seconds)} of {_INTERVALS} intervals, as it "
            "was stopped; measure again."
        )
    return statistics.median(seconds[1:])


def time_twin(
    cfg: Any,
    *,
    measure: Callable[[Any], float] = measured_step_seconds,
    tolerance: float = 0.03,
    max_measurements: int = 8,
) -> TimeTwin:
    """Returns the dense twin whose step takes as long as the MoE model's.

    The twin of equal FLOPs is made wider or narrower: its width is doubled or halved until the
    times enclose that of the MoE model, then bisected.

    Args:
        cfg: Config of a trainer of a language model.
        measure: Function from a config to its seconds per step.
        tolerance: Difference of the times that ends the search, as a part of the MoE model's.
        max_measurements: Number of twins to measure at most.

    Raises:
        UserError: If the model has no MoE layer, or no width from 1/16 to 16 encloses the time.
    """
    dense_twin(cfg)  # Raises errors of the config before minutes of measurements.
    target, measured = measure(cfg), {}
    low, high = None, None  # Widths that take too little and too much time.
    width, twins = 1.0, {}
    for _ in range(max_measurements):
        twin = dense_twin(cfg, width=width)
        if any(twin.hidden_dims == other.hidden_dims for other in twins.values()):
            break  # Widths closer than the rounding of the hidden sizes.
        twins[width] = twin
        measured[width] = seconds = measure(twin.config)
        logger.info("width %.3f: %.4g s per step, of %.4g s", width, seconds, target)
        if abs(seconds / target - 1) <= tolerance:
            break
        low, high = (width, high) if seconds < target else (low, width)
        if low is None or high is None:
            width = 2 * width if high is None else width / 2
            if not _LIMITS[0] <= width <= _LIMITS[1]:
                raise UserError(
                    f"no width from {_LIMITS[0]} to {_LIMITS[1]:g} has the {target:.4g} s per step "
                    "of the MoE model; set --twin=flops, or a larger batch."
                )
        else:
            width = (low + high) / 2
    best = min(measured, key=lambda width: abs(measured[width] / target - 1))
    return TimeTwin(
        twin=twins[best], moe_seconds=target, dense_seconds=measured[best], measured=measured
    )
