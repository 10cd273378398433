"""The twin of equal time: the search on made-up times, and one real measurement."""

import pytest

from experiments import flame_moe
from moelib.core.errors import UserError
from moelib.layers.moe.layer import MoELayer
from moelib.operations import time_twin as time_twin_lib
from moelib.operations.time_twin import measured_step_seconds, time_twin
from tests import tiny


def made_up(moe_seconds, *, fixed=1.0, per_hidden=0.01):
    """Returns a clock by which a dense layer of width H takes a fixed time and some per H."""

    def measure(cfg):
        layer = cfg.model.decoder.block[0].feed_forward
        is_moe = isinstance(layer, MoELayer.Config)
        return moe_seconds if is_moe else fixed + per_hidden * layer.hidden_dim

    return measure


@pytest.mark.parametrize("seconds", [1.7, 3.64, 9.0])
def test_the_twin_of_equal_time_is_found(seconds):
    found = time_twin(flame_moe.tiny(), measure=made_up(seconds))
    (hidden,) = found.twin.hidden_dims.values()
    assert found.dense_seconds == pytest.approx(seconds, rel=0.03)
    assert hidden == pytest.approx((seconds - 1) / 0.01, rel=0.07)
    assert found.moe_seconds == seconds
    assert len(found.measured) <= 8


def test_the_search_ends_at_the_rounding_of_hidden_sizes():
    found = time_twin(flame_moe.tiny(), measure=made_up(3.68), tolerance=0.0)
    assert found.dense_seconds == pytest.approx(3.68, abs=0.08)


def test_a_time_that_no_width_has_is_an_error():
    with pytest.raises(UserError, match=r"no width from 0.0625 to 16 has the 0\.5 s per step"):
        time_twin(flame_moe.tiny(), measure=made_up(0.5))


def test_steps_are_measured_without_the_data(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=1, save_every=1, evaler=False)
    assert 0 < measured_step_seconds(cfg, num_steps=2) < 60


def test_a_measurement_that_was_stopped_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(time_twin_lib, "fit", lambda cfg, trainer_dir: None)
    with pytest.raises(UserError, match="num_steps=2"):
        measured_step_seconds(tiny.trainer_config(tmp_path, evaler=False), num_steps=2)
