"""Scaling laws of finished runs: the parametric law, compared with the IsoFLOP analysis.

Letters: N parameters, D tokens, C FLOPs, L loss.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelib.analysis.isoflop import (
    MIN_RUNS,
    Floats,
    Interval,
    IsoFlopFit,
    fit_isoflop,
    group_by_budget,
    percentiles,
)
from moelib.analysis.training_runs import TrainingRun, select
from moelib.core.errors import UserError

_HUBER_DELTA = 1e-3  # Of the residuals of log L, as in the source.
_NUM_PARAMETERS = 5
_NUM_STARTS = 8  # Best points of the grid of starts that are optimized.
_NUM_WARM_STARTS = 2  # Distinct optima that every bootstrap starts from.
_EXPONENTS = (1e-3, 3.0)  # Bounds of alpha and beta.
NAMES = ("E", "A", "B", "alpha", "beta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParametricLaw:
    """L = E + A / N^alpha + B / D^beta, and C = kappa N^gamma D.

    kappa and gamma are fitted to the runs' own FLOPs: they are 6 and 1 for C = 6 N D.

    Source: Hoffmann et al., arXiv:2203.15556, eq. 10.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    kappa: float
    gamma: float
    objective: float  # Mean Huber loss of log L.
    problem: str = ""  # Exponents that the runs do not determine.

    def loss(self, n: float, d: float) -> float:
        """Returns L at N parameters and D tokens."""
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    @property
    def exponent(self) -> float:
        """The exponent a of N_opt ~ C^a: beta / (alpha + beta) for gamma = 1."""
        return self.beta / (self.alpha + self.gamma * self.beta)

    def tokens(self, c: float, n: float) -> float:
        """Returns the tokens that a model of N parameters is trained on with C FLOPs."""
        return math.exp(math.log(c / self.kappa) - self.gamma * math.log(n))

    def optimum(self, c: float) -> tuple[float, float, float]:
        """Returns (N, D, L) of the lowest loss with C FLOPs."""
        both = self.alpha + self.gamma * self.beta
        ratio = math.log(self.alpha * self.A) - math.log(self.gamma * self.beta * self.B)
        n = math.exp((ratio + self.beta * math.log(c / self.kappa)) / both)
        d = self.tokens(c, n)
        return n, d, self.loss(n, d)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The best model for a budget."""

    budget: float
    times_largest: float  # The budget over the largest one of the fit.
    parametric: tuple[float, float, float]  # N, D and L.
    parametric_interval: tuple[Interval, Interval, Interval]
    # N and D of the IsoFLOP law, and the parametric law's L there; None without the former.
    isoflop: tuple[float, float, float] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Both fits for one way of counting parameters."""

    isoflop: IsoFlopFit
    parametric: ParametricLaw
    intervals: dict[str, Interval]  # Of the law's five numbers, and of its exponent "a".
    predictions: list[Prediction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingAnalysis:
    """The scaling laws of runs."""

    runs: list[TrainingRun]  # Those that were fitted.
    excluded: dict[str, str]  # {name of a run: reason}.
    fits: dict[str, ScalingFit]  # With keys "with embeddings" and "without embeddings".


COUNTS = {"with embeddings": "parameters", "without embeddings": "non_embedding_parameters"}


def analyze(
    runs: Sequence[TrainingRun],
    budgets: Sequence[float] = (),
    *,
    num_bootstraps: int = 500,
    seed: int = 0,
) -> ScalingAnalysis:
    """Fits both laws to runs, for parameters counted with and without embeddings.

    Args:
        runs: The runs. Those that are not finished, whose loss is not finite, not positive or not
            of the last step, or that have fewer than 300 steps are excluded and listed.
        budgets: FLOPs to predict the best model for.
        num_bootstraps: Number of refits for the intervals.
        seed: Seed of the bootstrap.

    Raises:
        UserError: If the runs cannot be compared, too few are left, or all have one budget, one
            size or one loss, or if a budget is too far from theirs.
    """
    kept, excluded = select(runs)
    flops = np.asarray([run.flops for run in kept])
    listed = "".join(f"; {name}: {reason}" for name, reason in excluded.items())
    least = max(MIN_RUNS, _NUM_PARAMETERS + 1)
    if len(kept) < least:
        raise UserError(f"{len(kept)} runs for a fit, which requires {least}; add runs{listed}.")
    if len(group_by_budget(flops)) < 2:
        raise UserError(
            f"all {len(kept)} runs, of {flops.min():.3g} to {flops.max():.3g} FLOPs, are of one "
            f"budget; add another{listed}."
        )
    tokens, losses = (np.asarray([getattr(r, x) for r in kept]) for x in ("tokens", "loss"))
    fits = {}
    for name, field in COUNTS.items():
        n = np.asarray([getattr(run, field) for run in kept], np.float64)
        for what, values in ((field, n), ("loss", losses)):
            if np.ptp(values) == 0:
                raise UserError(
                    f"{what} is {values[0]:.6g} in all {len(kept)} runs; add runs with another"
                    f"{listed}."
                )
        fits[name] = _fit(flops, n, tokens, losses, budgets, num_bootstraps, seed)
    return ScalingAnalysis(runs=kept, excluded=excluded, fits=fits)


def _fit(
    flops: Floats,
    n: Floats,
    d: Floats,
    losses: Floats,
    budgets: Sequence[float],
    num_bootstraps: int,
    seed: int,
) -> ScalingFit:
    """Returns both fits and the predictions, with N counted in one way."""
    isoflop = fit_isoflop(flops, n, losses, num_bootstraps=num_bootstraps, seed=seed)
    law, boots = fit_parametric(flops, n, d, losses, num_bootstraps=num_bootstraps, seed=seed)
    columns = {name: [getattr(each, name) for each in boots] for name in NAMES}
    columns["a"] = [each.exponent for each in boots]
    predictions = []
    for budget in budgets:
        try:
            optima = np.asarray([each.optimum(budget) for each in (*boots, law)])[:-1]
        except (ArithmeticError, ValueError):  # Also the logarithm of 0.
            raise UserError(
                f"budgets has {budget:g}: its prediction is beyond the range of numbers; set FLOPs "
                f"nearer to those of the runs, {flops.min():.3g} to {flops.max():.3g}."
            ) from None
        low_n, low_d, low_l = (percentiles(optima[:, i]) for i in range(3))
        point = None
        if isoflop.law is not None:
            best = isoflop.law(budget)
            tokens = law.tokens(budget, best)
            point = best, tokens, law.loss(best, tokens)
        predictions.append(
            Prediction(
                budget=budget,
                times_largest=budget / float(flops.max()),
                parametric=law.optimum(budget),
                parametric_interval=(low_n, low_d, low_l),
                isoflop=point,
            )
        )
    intervals = {name: percentiles(np.asarray(values)) for name, values in columns.items()}
    return ScalingFit(isoflop=isoflop, parametric=law, intervals=intervals, predictions=predictions)


# -- The parametric law --------------------------------------------------------------------------


def fit_parametric(
    flops: Floats, n: Floats, d: Floats, losses: Floats, *, num_bootstraps: int, seed: int = 0
) -> tuple[ParametricLaw, list[ParametricLaw]]:
    """Returns the law, and those of bootstraps, which draw runs within each budget.

    log A, log B, log E, alpha and beta minimize the Huber loss of log L, from the best points of a
    grid of starts. log N and log D are centered, so that A hardly depends on alpha.

    Args:
        flops: C of each run.
        n: N of each run.
        d: D of each run.
        losses: L of each run.
        num_bootstraps: Number of refits, at least 1.
        seed: Seed of the draws.
    """
    x, y = np.log(n), np.log(d)
    center_x, center_y = float(np.mean(x)), float(np.mean(y))
    data = np.stack([x - center_x, y - center_y, np.log(losses)])
    gamma, log_kappa = np.polyfit(x, np.log(flops) - y, 1)

    def law(found: Any) -> ParametricLaw:
        a, b, e, alpha, beta = map(float, found.x)
        stuck = [
            f"{name}={exponent:.3g}"
            for name, exponent in (("alpha", alpha), ("beta", beta))
            if not _EXPONENTS[0] * 1.01 < exponent < _EXPONENTS[1] * 0.99
        ]
        return ParametricLaw(
            E=math.exp(e),
            A=math.exp(a + alpha * center_x),
            B=math.exp(b + beta * center_y),
            alpha=alpha,
            beta=beta,
            kappa=math.exp(log_kappa),
            gamma=float(gamma),
            objective=float(found.cost) / len(x),
            problem=f"{' and '.join(stuck)} is at a bound of the fit" if stuck else "",
        )

    optima = _optima(_starts(data), data)
    starts = _distinct([each.x for each in optima])[:_NUM_WARM_STARTS]
    rng, groups = np.random.default_rng(seed), group_by_budget(flops)
    boots = []
    for _ in range(num_bootstraps):
        drawn = np.concatenate([rng.choice(group, len(group)) for group in groups])
        boots.append(law(_optima(starts, data[:, drawn])[0]))
    return law(optima[0]), boots


def _starts(data: Floats) -> list[Floats]:
    """Returns the best starts of a grid: shares of the smallest loss, and exponents."""
    from scipy.special import huber

    lowest = float(np.min(data[2]))
    of_term, exponents = (0.03, 0.2, 0.6), (0.1, 0.3, 0.6, 1.2)
    starts = itertools.product((0.05, 0.3, 0.6, 0.9), of_term, of_term, exponents, exponents)
    grid = [
        np.asarray([*(lowest + math.log(share) for share in (a, b, e)), alpha, beta])
        for e, a, b, alpha, beta in starts
    ]
    cost = lambda theta: np.sum(huber(_HUBER_DELTA, _residuals(theta, data)))
    return sorted(grid, key=cost)[:_NUM_STARTS]


def _optima(starts: Sequence[Floats], data: Floats) -> list[Any]:
    """Returns scipy's result for each start, best first."""
    from scipy.optimize import least_squares
    from scipy.special import softmax

    def jacobian(theta: Floats, data: Floats) -> Floats:
        a, b, e = softmax(_terms(theta, data), axis=0)
        return np.stack([a, b, e, -a * data[0], -b * data[1]], 1)

    (low, high), most = _EXPONENTS, 50.0  # The largest logarithm of a term.
    found = [
        least_squares(
            _residuals,
            start,
            jacobian,
            bounds=([-most] * 3 + [low] * 2, [most] * 3 + [high] * 2),
            method="dogbox",  # A third faster than "trf", to the same optima.
            loss="huber",
            f_scale=_HUBER_DELTA,
            ftol=1e-10,
            xtol=1e-9,
            gtol=None,
            max_nfev=1000,
            args=(data,),
        )
        for start in starts
    ]
    return sorted(found, key=lambda each: each.cost)


def _distinct(points: Sequence[Floats]) -> list[Floats]:
    """Returns the points that differ from all before them."""
    kept: list[Floats] = []
    for point in points:
        if all(np.max(np.abs(point - other)) > 1e-2 for other in kept):
            kept.append(point)
    return kept


def _terms(theta: Floats, data: Floats) -> Floats:
    """Returns the logarithms of the law's three terms at each run [3, runs]."""
    a, b, e, alpha, beta = theta
    x, y, _ = data
    return np.stack([a - alpha * x, b - beta * y, np.full_like(x, e)])


def _residuals(theta: Floats, data: Floats) -> Floats:
    """Returns the errors of log L at each run; `data` are centered log N and log D, and log L."""
    return np.logaddexp.reduce(_terms(theta, data), 0) - data[2]
