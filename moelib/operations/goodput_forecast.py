"""Goodput: the share of a run's time that adds steps, where devices fail and checkpoints cost time.

Failures are a Poisson process. Source: J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, Future Generation Computer Systems 22, 2006.
"""

import dataclasses
import math
from collections.abc import Sequence

from moelib.core.errors import UserError
from moelib.runtime.progress import format_seconds
from moelib.runtime.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a run fails, and the time that this and its checkpoints cost; in seconds."""

    mtbf: float  # Mean time between failures of the whole run.
    restart: float  # From a failure to the next step: detection, new processes, restore, compiling.
    save: float  # Time that a checkpoint stops the steps.
    write: float = 0.0  # Time that a checkpoint takes to be complete, while steps go on.

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not math.isfinite(value) or value < 0 or (name == "mtbf" and not value):
                raise UserError(f"{name}={value}: set a time of 0 s or more, for mtbf above 0.")

    def goodput(self, interval: float) -> float:
        """Returns the expected share of time that adds steps, 0 to 1.

        Daly's model, in which a failure loses the time since the last complete checkpoint and a
        restart may fail, too. A checkpoint that is complete only after `write` loses that much
        more per failure, which is a longer restart.

        Args:
            interval: Seconds of steps between checkpoints, at least `write`.
        """
        exponent = (interval + self.save) / self.mtbf
        lost = (self.restart + self.write) / self.mtbf
        if exponent + lost > 700:  # Of math.exp.
            return 0.0
        return interval / (self.mtbf * math.exp(lost) * math.expm1(exponent))

    def best_interval(self) -> float:
        """Returns the seconds between checkpoints with the highest goodput."""
        from scipy.special import lambertw

        if not self.save:
            return self.write
        # The root of the derivative: (t / mtbf - 1) exp(t / mtbf - 1) = -exp(-1 - save / mtbf).
        root = lambertw(-math.exp(-1 - self.save / self.mtbf)).real
        return max(self.mtbf * (1 + float(root)), self.write)


def goodput_table(
    num_devices: Sequence[int], device_mtbf: float, costs: Failures, interval: float | None = None
) -> Table:
    """Returns the goodput of runs on numbers of devices.

    Args:
        num_devices: Numbers of devices.
        device_mtbf: Mean time between failures of a device and its share of a host, in seconds.
        costs: The costs of a failure and of a checkpoint; its `mtbf` is not used.
        interval: Seconds between checkpoints; None for the best of each number of devices.
    """
    if interval is not None and not 0 < interval < math.inf:
        raise UserError(f"interval={interval}: set a time above 0 s.")
    if not 0 < device_mtbf < math.inf:
        raise UserError(f"device_mtbf={device_mtbf / 3600:g} h: set a finite time above 0.")
    rows = []
    for number in num_devices:
        if number < 1:
            raise UserError(f"goodput={number}: set a number of devices above 0.")
        failures = dataclasses.replace(costs, mtbf=device_mtbf / number)
        best = failures.best_interval()
        used = best if interval is None else interval
        if not used:
            raise UserError("save=0 and write=0: set one of them above 0, or an interval.")
        if used < failures.write:
            raise UserError(
                f"interval={used:.0f} s is shorter than the {failures.write:.0f} s that a "
                "checkpoint takes to be complete; set a longer one."
            )
        times = map(format_seconds, (failures.mtbf, best, used))
        rows.append([f"{number:,}", *times, f"{failures.goodput(used):.1%}"])
    columns = "devices>", "failure every>", "best interval>", "interval>", "goodput>"
    note = (
        f"A device fails every {device_mtbf / 3600:,.0f} h; a restart takes {costs.restart:.0f} s, "
        f"a checkpoint {costs.save:.1f} s of steps and {costs.write:.0f} s until it is complete."
    )
    return Table("Goodput", columns, rows, [note])
