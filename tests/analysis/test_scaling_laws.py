"""The parametric law on losses drawn from known laws, and runs that cannot be fitted."""

import dataclasses
import math

import numpy as np
import pytest

from moelib.analysis import scaling_laws
from moelib.analysis.scaling_laws import NAMES, ParametricLaw, analyze
from moelib.analysis.training_runs import TrainingRun
from moelib.core.errors import UserError

# Hoffmann et al., arXiv:2203.15556, sec. D.3.
KNOWN = ParametricLaw(
    E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28, kappa=6.0, gamma=1.0, objective=0.0
)


def planted(noise=0.002, law=KNOWN, budgets=(1e18, 3e18, 1e19, 3e19), seed=0, **fields):
    """Returns seven runs per budget around its optimum; the embedding adds 5e6 parameters."""
    rng = np.random.default_rng(seed)
    runs = []
    for budget in budgets:
        best = law.optimum(budget)[0]
        for i, factor in enumerate(np.geomspace(1 / 6, 6, 7)):
            n = best * factor
            d = law.tokens(budget, n)
            loss = law.loss(n, d) * math.exp(noise * rng.normal())
            runs.append(
                TrainingRun(
                    name=f"{budget:.0e}/{i}",
                    parameters=n + 5e6,
                    non_embedding_parameters=n,
                    tokens=d,
                    flops=budget,
                    loss=loss,
                    steps=1000,
                    **fields,
                )
            )
    return runs


@pytest.fixture(scope="module")
def analysis():
    return analyze(planted(), [1e20], num_bootstraps=60)


def test_the_numbers_of_a_planted_law_are_inside_their_intervals(analysis):
    fit = analysis.fits["without embeddings"]
    for name in NAMES:
        low, high = fit.intervals[name]
        assert low <= getattr(KNOWN, name) <= high, name
    low, high = fit.intervals["a"]
    assert low < KNOWN.exponent < high
    assert high - low < 0.2
    assert (fit.parametric.kappa, fit.parametric.gamma) == pytest.approx((6, 1))
    assert fit.parametric.problem == ""


def test_both_methods_agree_on_a_planted_law(analysis):
    fit = analysis.fits["without embeddings"]
    low, high = fit.isoflop.law.interval
    assert low < KNOWN.exponent < high
    (prediction,) = fit.predictions
    assert prediction.times_largest == pytest.approx(100 / 30)
    expected = KNOWN.optimum(1e20)
    for value, (low, high), known in zip(
        prediction.parametric, prediction.parametric_interval, expected, strict=True
    ):
        assert low < known < high
        assert low < value < high
    n, d, loss = prediction.isoflop
    assert n == pytest.approx(expected[0], rel=0.3)
    assert 6 * n * d == pytest.approx(1e20)
    assert loss == pytest.approx(expected[2], rel=0.01)


def test_without_noise_the_law_is_found_although_the_starts_are_far():
    runs = planted(noise=0.0)
    fit = analyze(runs, num_bootstraps=1).fits["without embeddings"]
    for name in NAMES:
        assert getattr(fit.parametric, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name


def test_the_optimum_is_lower_than_its_neighbors():
    law = dataclasses.replace(KNOWN, kappa=10.0, gamma=0.8)
    n, d, loss = law.optimum(1e19)
    assert 10 * n**0.8 * d == pytest.approx(1e19)
    assert loss == pytest.approx(law.loss(n, d))
    for other in (0.9 * n, 1.1 * n):
        assert law.loss(other, law.tokens(1e19, other)) > loss
    slope = math.log(law.optimum(1e20)[0] / n) / math.log(10)
    assert slope == pytest.approx(law.exponent)


def test_runs_that_say_nothing_of_the_law_are_listed_and_change_nothing():
    runs = planted(budgets=(1e18, 1e19))
    odd = dataclasses.replace(runs[0], loss=5.0)
    bad = [
        dataclasses.replace(odd, name="nan", loss=math.nan),
        dataclasses.replace(odd, name="zero", loss=0.0),
        dataclasses.replace(odd, name="negative", loss=-1.0),
        dataclasses.replace(odd, name="short", steps=299),
        dataclasses.replace(odd, name="unfinished", steps=400, max_step=500),
    ]
    with_bad, without = (analyze(x, num_bootstraps=1) for x in (runs + bad, runs))
    assert list(with_bad.excluded) == ["nan", "zero", "negative", "short", "unfinished"]
    assert "loss is -1," in with_bad.excluded["negative"]
    assert "299 steps, fewer than 300" in with_bad.excluded["short"]
    assert "its last loss is of step 400 of 500" in with_bad.excluded["unfinished"]
    assert with_bad.fits == without.fits


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (3, {}, "3 runs .*; short: it has 10 steps"),
        (7, {}, r"7 runs, of 1e\+18"),  # One budget.
        (14, {"parameters": 1e7}, r"parameters is 1e\+07"),
        (14, {"non_embedding_parameters": 1e7}, r"non_embedding_parameters is 1e\+07"),
        (14, {"loss": 2.5}, r"loss is 2\.5"),
    ],
)
def test_runs_that_do_not_determine_the_law_are_an_error(number, fields, message):
    runs = [dataclasses.replace(run, **fields) for run in planted()[:number]]
    short = dataclasses.replace(runs[0], name="short", steps=10)
    with pytest.raises(UserError, match=message):
        analyze([*runs, short], num_bootstraps=1)


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_a_budget_whose_prediction_overflows_is_an_error(monkeypatch, factor):
    """Exponents at their bounds, as of losses that hardly change: N_opt is exp(+-3450)."""
    flat = dataclasses.replace(KNOWN, A=factor, B=1.0, alpha=0.001, beta=0.001)
    monkeypatch.setattr(scaling_laws, "fit_parametric", lambda *_, **__: (flat, [flat]))
    with pytest.raises(UserError, match=r"budgets has 1e\+20.* 1e\+18 to 1e\+19"):
        analyze(planted(budgets=(1e18, 1e19)), [1e20], num_bootstraps=1)


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 64), ("data", "other")])
def test_runs_of_different_vocabularies_or_data_are_an_error(field, value):
    runs = planted(vocab_size=32, data="this")
    runs[5] = dataclasses.replace(runs[5], **{field: value})
    with pytest.raises(UserError, match=f"{field} is .* in 1e\\+18/0, and {value} in 1e\\+18/5"):
        analyze(runs)


def test_an_exponent_at_a_bound_is_named():
    steep = dataclasses.replace(KNOWN, A=0.2 * 1e9**3.5, alpha=3.5)
    runs = planted(noise=0.0, law=steep, budgets=(1e20, 1e21))
    fit = analyze(runs, num_bootstraps=1).fits["without embeddings"]
    assert fit.parametric.problem == "alpha=3 is at a bound of the fit"
