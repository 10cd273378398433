"""Wrong initial values are found: drawn weights, norm scales and biases."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from moelib.core.param import FanAxes
from moelib.layers import initializers
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.router import Router
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.verify.early_checks import scale
from moelib.verify.outcome import CheckFailedError
from tests.tiny import initial
from tests.verify.tiny import tiny

pytestmark = pytest.mark.slow


def check(**layer: Any) -> None:
    cfg = tiny(**layer).set(dir="unused", mesh_shape=(1,) * 6)
    model = cfg.instantiate(parent=None, devices=jax.devices()[:1]).model
    values = SimpleNamespace(model=jax.tree.map(np.asarray, initial(model)))
    scale(SimpleNamespace(trainer=SimpleNamespace(model=model)), values)


def starts_with(patch: pytest.MonkeyPatch, layer: type, weight: str, **fields: Any) -> None:
    """Replaces fields of the spec of a layer's weight."""
    known = layer._create_layer_parameter_specs

    def specs(self):
        own = known(self)
        changed = {n: dataclasses.replace(s, **fields) for n, s in own.items() if n == weight}
        return {**own, **changed}

    patch.setattr(layer, "_create_layer_parameter_specs", specs)


def test_right_values_pass():
    check()


def test_a_mean_of_half_the_standard_deviation(monkeypatch):
    known = initializers.normal
    shifted = lambda std: lambda key, spec: known(std)(key, spec) + 0.5 * std
    monkeypatch.setattr(initializers, "normal", shifted)
    with pytest.raises(CheckFailedError, match="weight starts with the mean"):
        check()


def test_norm_scales_of_one_half(monkeypatch):
    starts_with(monkeypatch, BaseNorm, "scale", initializer=initializers.constant(0.5))
    with pytest.raises(CheckFailedError, match=r"scale starts with the mean 0\.5, not with 1"):
        check()


def test_biases_that_are_not_0(monkeypatch):
    starts_with(monkeypatch, Router, "bias", initializer=initializers.constant(0.1))
    cfg = tiny().model.decoder.block[0].feed_forward
    cfg.router.bias = True
    with pytest.raises(CheckFailedError, match=r"router/bias starts with the mean 0\.1"):
        check(feed_forward=cfg)


@pytest.mark.parametrize(
    ("layer", "weight", "fan_axes"),
    [
        (GroupedQueryAttention, "output", FanAxes((0,), (1, 2))),
        (FeedForwardExperts, "up", FanAxes((0, 2), (3,), (1,))),
    ],
)
def test_fans_that_miss_or_add_a_dimension(monkeypatch, layer, weight, fan_axes):
    starts_with(monkeypatch, layer, weight, fan_axes=fan_axes)
    with pytest.raises(CheckFailedError, match=f"{weight} starts with the standard deviation"):
        check()


class HalfNorm(RMSNorm):
    """No bug: a norm of the user's own that starts elsewhere."""

    def _create_layer_parameter_specs(self):
        specs = super()._create_layer_parameter_specs()
        half = initializers.constant(0.5)
        return {name: dataclasses.replace(spec, initializer=half) for name, spec in specs.items()}


def test_users_layers_may_start_elsewhere():
    check(norm=HalfNorm.default_config())
