"""Federated averaging trains on clients whose shares of the data are uneven."""

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn")

from experiments.tasks import federated_averaging
from experiments.tasks.image_classification import digits


def test_clients_hold_each_example_once_in_uneven_shares():
    train, _ = digits()
    clients = federated_averaging.split(train)
    assert sum(client["weight"].sum() for client in clients) == len(train)
    held = np.concatenate([client["image"][client["weight"] > 0] for client in clients])
    everything = np.stack([example["image"] for example in train])
    np.testing.assert_array_equal(np.sort(held, axis=0), np.sort(everything, axis=0))
    sizes = [client["weight"].sum() for client in clients]
    assert max(sizes) > 5 * min(sizes)


def test_one_local_step_on_all_data_is_gradient_descent_on_the_data_of_all(monkeypatch):
    train, _ = digits()
    clients = federated_averaging.split(train[:200])
    batch = {name: np.stack([client[name] for client in clients]) for name in clients[0]}
    monkeypatch.setattr(federated_averaging, "NUM_PASSES", 1)
    monkeypatch.setattr(federated_averaging, "LOCAL_BATCH", batch["label"].shape[1])
    params = federated_averaging.init(jax.random.key(0))
    minus = lambda params, change: jax.tree.map(lambda p, c: p - c, params, change)
    round_of = jax.jit(lambda p: federated_averaging.train_step(p, batch, jax.random.key(1), minus))
    found, _ = round_of(params)

    def mean_loss(params):
        whole = {name: np.stack([e[name] for e in train[:200]]) for name in train[0]}
        total, weight = federated_averaging.loss(params, whole, None, True)[0]
        return total / weight

    gradients = jax.jit(jax.grad(mean_loss))(params)
    step = lambda p, g: p - federated_averaging.LOCAL_RATE * g
    expected = jax.tree.map(step, params, gradients)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)
    jax.tree.map(close, found, expected)


def test_federated_averaging_learns(tmp_path):
    assert federated_averaging.run(str(tmp_path), num_rounds=12)["accuracy"] > 0.5


@pytest.mark.slow
def test_federated_averaging(tmp_path):
    assert federated_averaging.run(str(tmp_path))["accuracy"] >= 0.93
