"""Metrics: packed into one vector and unpacked, and metrics derived from them."""

import math

import jax.numpy as jnp
import pytest

from moelib.core.metrics import weighted
from moelib.train import metrics


def test_pack_and_unpack():
    packed = metrics.pack({"b": jnp.array([1.0, 2.0]), "a": 3, "c/d": jnp.array([[4.0]])})
    assert packed.vector.shape == (4,)
    assert metrics.unpack(packed) == {"a": 3.0, "b/0": 1.0, "b/1": 2.0, "c/d/0": 4.0}


def test_plain_scalars_have_the_given_weight():
    assert metrics.as_metric(2.0) == weighted(2.0, 1.0)
    assert metrics.as_metric(2.0, 5.0) == weighted(2.0, 5.0)
    assert metrics.as_metric(jnp.ones(3), 2.0).weight.tolist() == [2.0, 2.0, 2.0]


def test_perplexity_and_bits_per_byte_are_without_z_loss():
    scalars = {"loss": 3.5, "cross_entropy": 2.0, "bytes_per_token": 4.0}
    found = metrics.language_metrics(scalars)
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    assert found["bits_per_byte"] == pytest.approx(2.0 / math.log(2) / 4.0)


def test_without_bytes_there_are_no_bits_per_byte():
    assert metrics.language_metrics({"loss": 0.0, "bytes_per_token": 0.0}) == {"perplexity": 1.0}
    assert math.isnan(metrics.language_metrics({"loss": math.nan})["perplexity"])
