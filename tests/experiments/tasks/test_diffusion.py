"""Images are drawn from noise, and a classifier names their digits."""

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn")

from experiments.tasks import diffusion


def test_noise_grows_with_time_at_a_constant_variance():
    signal, amount = diffusion.shares(np.linspace(0, 1, 5))
    assert np.all(np.diff(amount[:, 0]) > 0)
    np.testing.assert_allclose(signal**2 + amount**2, 1, rtol=1e-6)


def test_samples_depend_on_the_key():
    params = diffusion.init(jax.random.key(0))
    draw = jax.jit(diffusion.sample)
    a, b, c = (draw(params, {"label": np.arange(4)}, jax.random.key(i)) for i in (0, 0, 1))
    assert a.shape == (4, 8, 8)
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    assert 0 <= np.min(a) < np.max(a) <= 1


@pytest.mark.slow
def test_learns(tmp_path, monkeypatch):
    train, test = diffusion.digits()
    monkeypatch.setattr(diffusion, "digits", lambda: (train, test[:64]))
    assert diffusion.run(str(tmp_path), max_step=20)["loss"] < 1.1


@pytest.mark.slow
def test_score(tmp_path):
    assert diffusion.run(str(tmp_path))["named"] >= 0.8
