"""The learning rates that `verify` expects, against values worked out by hand."""

import pytest

from moelib.core.config import config_for_function
from moelib.learner import schedules
from moelib.verify.learner_checks import rate_at
from moelib.verify.outcome import CheckSkippedError


@pytest.mark.parametrize(
    ("schedule", "fields", "step", "rate"),
    [
        ("constant", {"peak_lr": 2.0, "warmup_steps": 4}, 1, 0.5),
        ("linear", {"peak_lr": 1.0, "max_step": 10, "warmup_steps": 2, "end_lr": 0.2}, 6, 0.6),
        ("cosine", {"peak_lr": 1.0, "max_step": 8}, 4, 0.5),
        ("inverse_sqrt", {"peak_lr": 1.0, "warmup_steps": 4}, 16, 0.5),
        ("wsd", {"peak_lr": 1.0, "max_step": 10, "decay_steps": 4}, 6, 1.0),
        ("wsd", {"peak_lr": 1.0, "max_step": 10, "decay_steps": 4}, 9, 0.25),
    ],
)
def test_rates_of_schedules(schedule, fields, step, rate):
    cfg = config_for_function(getattr(schedules, schedule)).set(**fields)
    assert rate_at(cfg, step) == pytest.approx(rate)
    assert float(cfg.instantiate()(step)) == pytest.approx(rate)


def test_another_schedule_is_skipped():
    with pytest.raises(CheckSkippedError, match="my_schedule"):
        rate_at(config_for_function(my_schedule), 1)


def my_schedule():
    return lambda step: 1.0
