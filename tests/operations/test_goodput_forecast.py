"""Goodput: the closed form, the best interval, a simulation, and a published run."""

import math
import random

import pytest
from scipy.optimize import minimize_scalar

from moelib.cli.main import run
from moelib.core.errors import UserError
from moelib.operations.goodput_forecast import Failures, goodput_table

HOUR = 3600.0
CASES = [
    Failures(mtbf=3 * HOUR, restart=600, save=5, write=60),
    Failures(mtbf=3 * HOUR, restart=600, save=300),
    Failures(mtbf=0.5 * HOUR, restart=900, save=60, write=120),
    Failures(mtbf=1000 * HOUR, restart=60, save=1),
]


@pytest.mark.parametrize("failures", CASES)
def test_the_best_interval_maximizes_the_goodput(failures):
    found = minimize_scalar(
        lambda t: -failures.goodput(t), bounds=(1, 5 * failures.mtbf), options={"xatol": 1e-3}
    )
    assert failures.best_interval() == pytest.approx(found.x, rel=1e-3)
    if failures.save < failures.mtbf / 1000:
        young = math.sqrt(2 * failures.save * failures.mtbf)  # An approximation.
        assert failures.best_interval() == pytest.approx(young, rel=0.02)


def simulated_goodput(failures, interval, num_intervals=20_000):
    """Returns the goodput of a simulated run, event by event."""
    draw, steps = random.Random(0), interval * num_intervals
    now = done = 0.0  # Time, and seconds of steps in complete checkpoints.
    failure = draw.expovariate(1 / failures.mtbf)
    while done < steps:
        begin, kept = now, done
        while True:  # From one start to the next failure.
            end = begin + (interval + failures.save)
            if failure < end + failures.write:
                break
            begin, kept = end, kept + interval
            if kept >= steps:
                return steps / (end + failures.write)
        done, now = kept, failure
        while True:  # Restarts, until one does not fail.
            failure = now + draw.expovariate(1 / failures.mtbf)
            if failure >= now + failures.restart:
                now += failures.restart
                break
            now = failure
    return done / now


@pytest.mark.parametrize("failures", CASES)
@pytest.mark.parametrize("factor", [0.5, 1, 4])
def test_a_simulation_agrees(failures, factor):
    interval = max(factor * failures.best_interval(), failures.write)
    expected = failures.goodput(interval)
    assert simulated_goodput(failures, interval) == pytest.approx(expected, rel=0.015)


def test_an_interval_costs_what_the_exponential_says():
    # Without a restart, the expected time of a segment t is M (exp(t / M) - 1).
    failures = Failures(mtbf=50, restart=0, save=0)
    assert failures.goodput(100) == pytest.approx(100 / (50 * math.expm1(2)))


def test_llama_3_on_16384_gpus():
    """arXiv:2407.21783, section 3.3.4: 419 interruptions in 54 days, over 90 % effective time."""
    hours = 54 * 24 / 419 * 16384
    assert hours == pytest.approx(50_677, abs=1)
    costs = Failures(mtbf=1, restart=600, save=5, write=60)
    (row,) = goodput_table([16384], hours * HOUR, costs).rows
    assert row[1] == "3 h 05 min"
    assert float(row[4].rstrip("%")) > 90
    # Checkpoints of five minutes that stop the steps would not have reached it.
    slow = Failures(mtbf=1, restart=600, save=300)
    (row,) = goodput_table([16384], hours * HOUR, slow).rows
    assert float(row[4].rstrip("%")) < 80


@pytest.mark.parametrize("fields", [{"mtbf": 0}, {"restart": -1}, {"save": math.nan}])
def test_times_that_are_none_are_refused(fields):
    values = {"mtbf": 1.0, "restart": 1.0, "save": 1.0} | fields
    with pytest.raises(UserError, match=f"{next(iter(fields))}="):
        Failures(**values)


def test_the_command_prints_a_table(capsys):
    assert run(["plan", "--goodput=256,16384", "--interval=1800"]) == 0
    out = capsys.readouterr().out
    assert "16,384" in out
    assert "30 min 00 s" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput=many"], "--goodput=many"),
        (["--goodput=0"], "goodput=0"),
        (["--goodput=8", "--interval=10"], "interval=10 s is shorter than the 60 s"),
        (["--goodput=8", "--interval=0"], "interval=0"),
        (["--goodput=8", "--device_mtbf=-5"], "device_mtbf=-5 h"),
    ],
)
def test_wrong_flags_are_refused(capsys, flags, message):
    assert run(["plan", *flags]) == 2
    assert message in capsys.readouterr().err
