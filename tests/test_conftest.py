"""The checks that conftest enables are active."""

import importlib
import sys
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from moelib import layers


def test_shapes_in_signatures_are_checked(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(
        "from jaxtyping import Array, Float\n\n\n"
        'def total(probs: Float[Array, "T E"], scale: float) -> Float[Array, "T"]:\n'
        "    return scale * probs.sum(-1)\n"
    )
    monkeypatch.setattr(layers, "__path__", [*layers.__path__, str(tmp_path)])
    planted = importlib.import_module("moelib.layers.planted")
    monkeypatch.delitem(sys.modules, "moelib.layers.planted")
    assert planted.total(jnp.ones((2, 3)), 1).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError, match="probs"):
        planted.total(jnp.ones((2, 3, 4)), 1.0)


def test_tests_run_under_strict_numerics():
    assert jax.device_count() == 8
    with pytest.raises(jax.dtypes.TypePromotionError, match="promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", stacklevel=1)
