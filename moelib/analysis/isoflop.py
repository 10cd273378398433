"""IsoFLOP analysis: the grid of runs, a parabola per budget, and the law of their minima.

Letters: N parameters, D tokens, C FLOPs. Source: Hoffmann et al., arXiv:2203.15556, sec. 3.2.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moelib.core.errors import UserError

MIN_RUNS = 4  # Points of a fit: with fewer, a parabola has no residuals.
_SAME_BUDGET = 1.25  # Largest ratio of the FLOPs of neighboring runs of a budget, and of all.

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]  # From the 2.5th to the 97.5th percentile of the bootstrap.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridRun:
    """A run of a grid."""

    size: str  # Name of the model's config.
    budget: float  # FLOPs.
    steps: int
    tokens: int


def isoflop_grid(
    flops_per_token: Mapping[str, float], budgets: Sequence[float], *, tokens_per_step: int
) -> list[GridRun]:
    """Returns the runs of every size at every budget, steps rounded up.

    Args:
        flops_per_token: FLOPs per training token of each size: `train_flops_per_token` of
            `moelib.models.cost.model_cost`, or 6 times the parameters that a paper counts.
        budgets: FLOPs of a run.
        tokens_per_step: Tokens of a batch.

    Raises:
        UserError: If a number is not positive.
    """
    for name, value in {**flops_per_token, "tokens_per_step": tokens_per_step}.items():
        if not value > 0:
            raise UserError(f"{name}={value}: set it above 0.")
    if bad := [budget for budget in budgets if not 0 < budget < math.inf]:
        raise UserError(f"budgets has {bad[0]}; set FLOPs above 0.")
    found = []
    for budget in budgets:
        for size, flops in flops_per_token.items():
            steps = math.ceil(budget / flops / tokens_per_step)
            found.append(
                GridRun(size=size, budget=budget, steps=steps, tokens=steps * tokens_per_step)
            )
    return found


def group_by_budget(flops: Floats) -> list[npt.NDArray[np.int64]]:
    """Returns the indices of the runs of each budget, smallest budget first.

    A budget ends where the next larger FLOPs are over 1.25 times as many.
    """
    order = np.argsort(flops, kind="stable")
    gaps = np.flatnonzero(np.diff(np.log(flops[order])) > math.log(_SAME_BUDGET)) + 1
    return np.split(order, gaps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parabola:
    """The loss over log N at one budget."""

    budget: float  # Geometric mean of the runs' FLOPs.
    num_runs: int
    coefficients: tuple[float, float, float] | None  # Of (log N)^2, log N and 1.
    parameters: float | None  # N at the minimum; None if it is not used.
    loss: float | None  # At the minimum.
    problem: str = ""  # Reason why the minimum is not used.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """y = coefficient * C^exponent."""

    exponent: float
    log_coefficient: float
    interval: Interval | None = None  # Of the exponent.

    def __call__(self, c: float) -> float:
        """Returns y at C."""
        return math.exp(self.log_coefficient + self.exponent * math.log(c))


def fit_power_law(c: Sequence[float] | Floats, y: Sequence[float] | Floats) -> PowerLaw:
    """Returns the least-squares line through log y over log C. Raises UserError at one C only."""
    log_c, log_y = np.log(c), np.log(y)
    if len(log_c) < 2 or np.ptp(log_c) < math.log(_SAME_BUDGET):
        raise UserError(f"{len(log_c)} minima at one budget; a power law requires two budgets.")
    slope, intercept = np.polyfit(log_c, log_y, 1)
    return PowerLaw(exponent=float(slope), log_coefficient=float(intercept))


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsoFlopFit:
    """The parabolas of all budgets, and the power law of their minima."""

    parabolas: list[Parabola]
    law: PowerLaw | None  # N_opt over C; None with minima at fewer than two budgets.
    # Share of the bootstraps without a minimum at some budget, which are not in the intervals.
    without_minimum: float = 0.0


def fit_isoflop(
    flops: Floats, parameters: Floats, losses: Floats, *, num_bootstraps: int = 500, seed: int = 0
) -> IsoFlopFit:
    """Returns the parabolas and the power law N_opt ~ C^a, with a bootstrap interval of a.

    A minimum outside of the sizes of its budget is not used, nor are budgets too close to tell
    apart. The bootstrap adds residuals to the parabolas, drawn from those of all budgets; it refits
    parabolas and law.

    Args:
        flops: FLOPs of each run.
        parameters: N of each run.
        losses: Loss of each run.
        num_bootstraps: Number of refits.
        seed: Seed of the draws.
    """
    groups = group_by_budget(flops)
    fits = [_parabola(flops[g], parameters[g], losses[g]) for g in groups]
    used = [(fit, g) for fit, g in zip(fits, groups, strict=True) if fit.parameters is not None]
    if len(used) < 2:
        return IsoFlopFit(parabolas=fits, law=None)
    budgets = np.asarray([fit.budget for fit, _ in used])
    law = fit_power_law(budgets, np.asarray([fit.parameters for fit, _ in used]))
    rng = np.random.default_rng(seed)
    fitted = [np.polyval(fit.coefficients or (), np.log(parameters[g])) for fit, g in used]
    # A parabola takes three degrees of freedom from its residuals.
    residuals = np.concatenate(
        [
            (losses[g] - values) * math.sqrt(len(g) / (len(g) - 3))
            for (_, g), values in zip(used, fitted, strict=True)
        ]
    )
    minima = []
    for (_, g), values in zip(used, fitted, strict=True):
        noise = rng.choice(residuals, (len(g), num_bootstraps))
        a, b, _ = np.polyfit(np.log(parameters[g]), values[:, None] + noise, 2)
        minima.append(np.where(a > 0, -b / (2 * a), np.nan))
    ok = np.all(np.isfinite(minima), 0)
    interval = None
    if np.any(ok):
        slopes = np.polyfit(np.log(budgets), np.asarray(minima)[:, ok], 1)[0]
        interval = percentiles(slopes)
    law = dataclasses.replace(law, interval=interval)
    return IsoFlopFit(parabolas=fits, law=law, without_minimum=float(1 - np.mean(ok)))


def percentiles(values: Floats) -> Interval:
    """Returns the 2.5th and the 97.5th percentile."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _parabola(flops: Floats, parameters: Floats, losses: Floats) -> Parabola:
    """Returns the parabola of one budget."""
    budget = float(np.exp(np.mean(np.log(flops))))
    unused = Parabola(
        budget=budget, num_runs=len(flops), coefficients=None, parameters=None, loss=None
    )
    if (span := flops.max() / flops.min()) > _SAME_BUDGET:
        text = f"its FLOPs span a factor of {span:.3g}; set budgets over {_SAME_BUDGET} apart"
        return dataclasses.replace(unused, problem=text)
    if len(set(parameters.tolist())) < MIN_RUNS:
        text = f"{len(set(parameters.tolist()))} sizes; a parabola requires {MIN_RUNS}"
        return dataclasses.replace(unused, problem=text)
    x = np.log(parameters)
    a, b, c = map(float, np.polyfit(x, losses, 2))
    shown = dataclasses.replace(unused, coefficients=(a, b, c))
    if a <= 0:
        return dataclasses.replace(shown, problem="the parabola has no minimum")
    minimum = -b / (2 * a)
    if not x.min() <= minimum <= x.max():
        side = "below the smallest" if minimum < x.min() else "above the largest"
        text = f"its minimum is at {math.exp(minimum):.3g} parameters, {side} size"
        return dataclasses.replace(shown, problem=text)
    return dataclasses.replace(
        shown, parameters=math.exp(minimum), loss=float(np.polyval((a, b, c), minimum))
    )
