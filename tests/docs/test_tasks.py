"""The page on tasks: a model of Flax, trained, resumed, sharded, evaluated."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import moelib
from moelib.core.config import config_for_function
from moelib.core.module import functional
from moelib.layers.external import Updated
from moelib.layers.feed_forward import FeedForward
from moelib.learner.optimizers import adamw_optimizer
from moelib.tasks.run import task_trainer_config


# --8<-- [start:model]
class Classifier(linen.Module):
    """Your model: which of three classes a point belongs to."""

    @linen.compact
    def __call__(self, points):
        hidden = linen.relu(linen.Dense(64)(points))
        return linen.Dense(3)(hidden)


network = Classifier()
# --8<-- [end:model]


# --8<-- [start:task]
def init(key):
    """Returns initial parameters: a tree of any kind."""
    return network.init(key, jnp.zeros((1, 2)))


def loss(params, batch, key, is_training):
    """Returns the mean loss of a batch, and metrics by name."""
    logits = network.apply(params, batch["point"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


task = moelib.Task.default_config().set(init=init, loss=loss)
# --8<-- [end:task]


# --8<-- [start:data]
def make_points(count, seed):
    """Returns points of the plane, each with its class."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, 2)).astype(np.float32)
    labels = np.argmax(points @ [[1, -1, 0], [0, 1, -1]], axis=-1)
    return [{"point": p, "label": label} for p, label in zip(points, labels, strict=True)]


train, test = make_points(1000, seed=0), make_points(203, seed=1)
optimizer = config_for_function(adamw_optimizer).set(learning_rate=1e-2)
# --8<-- [end:data]


@pytest.fixture(scope="module", autouse=True)
def _in_an_empty_folder(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        yield


@pytest.fixture(scope="module")
def result():
    # --8<-- [start:fit]
    result = moelib.fit(
        task,
        train,  # [{"point": array([0.1, -0.7]), "label": 2}, ...]
        trainer_dir="runs/points",
        optimizer=optimizer,
        batch_size=64,
        num_epochs=10,
        eval_examples=test,
        best_metric="validation/accuracy",
        best_mode="max",
    )
    print(result.evaluations["validation"]["accuracy"])
    # --8<-- [end:fit]
    return result


def test_fit(result):
    assert result.evaluations["validation"]["accuracy"] > 0.9
    assert result.step == 157


def test_evaluate_and_predict(result):
    # --8<-- [start:predict]
    def predict(params, batch, key):
        """Returns arrays whose first dimension is that of the examples."""
        return network.apply(params, batch["point"]).argmax(-1)

    def postprocess(classes):
        """Returns a list with the result of each example."""
        return [["red", "green", "blue"][i] for i in classes]

    predicting = task.clone(predict=predict, postprocess=postprocess)
    scores = moelib.evaluate(task, test, trainer_dir="runs/points")
    colors = moelib.predict(predicting, test, trainer_dir="runs/points")
    print(scores["accuracy"], scores["weight"], len(colors))  # All 203 examples, once, in order.
    # --8<-- [end:predict]
    assert scores["accuracy"] == result.evaluations["validation"]["accuracy"]
    hits = [c == ["red", "green", "blue"][e["label"]] for c, e in zip(colors, test, strict=True)]
    assert np.mean(hits) == pytest.approx(scores["accuracy"])


def test_sharded():
    # --8<-- [start:config]
    cfg = task_trainer_config(
        task,
        train,
        optimizer=optimizer,
        batch_size=64,
        max_step=2,
        num_microbatches=2,
        mesh="data=2,fsdp=2,model=2",
    )
    cfg.learner.ema.decay = 0.99
    result = moelib.fit(cfg, trainer_dir="runs/sharded")
    # --8<-- [end:config]
    kernels = [x for x in jax.tree.leaves(result.params) if x.ndim == 2]
    assert ["model" in str(x.sharding.spec) for x in kernels] == [True, True]


def test_weights_and_state():
    # --8<-- [start:tokens]
    def weighted_loss(params, batch, key, is_training):
        """Returns (sum, weight): evaluation and accumulation weight by it."""
        losses = optax.softmax_cross_entropy_with_integer_labels(
            network.apply(params["net"], batch["point"]), batch["label"]
        )
        counted = batch["label"] > 0
        loss = (losses * counted).sum(), counted.sum()
        return Updated((loss, {}), {"steps": params["steps"] + 1})

    counting = moelib.Task.default_config().set(
        init=lambda key: {"net": init(key), "steps": jnp.zeros((), jnp.int32)},
        loss=weighted_loss,
        fixed=["steps"],
    )
    result = moelib.fit(
        counting, train, trainer_dir="runs/tokens", optimizer=optimizer, batch_size=64, max_step=3
    )
    # --8<-- [end:tokens]
    assert int(result.params["steps"]) == 3


def test_own_step():
    # --8<-- [start:step]
    def train_step(params, batch, key, apply_gradients):
        """Clips the gradient of each example, and takes their mean."""

        def of_example(example):
            alone = jax.tree.map(lambda x: x[None], example)
            (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(
                params, alone, key, True
            )
            scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
            return value, metrics, jax.tree.map(lambda g: g * scale, grads)

        value, metrics, grads = jax.tree.map(lambda x: x.mean(0), jax.vmap(of_example)(batch))
        return apply_gradients(params, grads), (value, metrics)

    clipped = task.clone(train_step=train_step)
    result = moelib.fit(
        clipped, train, trainer_dir="runs/clipped", optimizer=optimizer, batch_size=64, max_step=2
    )
    # --8<-- [end:step]
    assert 0 < result.metrics["gradient_norm"] <= 1


def test_examples_of_an_epoch():
    # --8<-- [start:epoch]
    def new_points(epoch, params):
        """Returns the examples of an epoch, where the model errs."""
        points = np.random.default_rng(epoch).normal(size=(1024, 2)).astype(np.float32)
        labels = np.argmax(points @ [[1, -1, 0], [0, 1, -1]], axis=-1)
        found = network.apply(params, points).argmax(-1)
        hardest = np.argsort(found == labels, kind="stable")[:256]
        return [{"point": points[i], "label": labels[i]} for i in hardest]

    settings = {"batch_size": 64, "max_step": 8, "save_every": 4}  # An epoch has 4 steps.
    result = moelib.fit(
        task, new_points, trainer_dir="runs/hardest", optimizer=optimizer, **settings
    )
    # --8<-- [end:epoch]
    assert result.step == 8


def test_layers_of_moelib():
    # --8<-- [start:layers]
    def task_around(layer_config):
        """Returns a task whose functions enclose a layer."""
        layer = layer_config.clone(name="layer").instantiate(parent=None)

        def init(key):
            return {
                "layer": layer.initialize_parameters_recursively(key),
                "head": jnp.zeros((2, 3)),
            }

        def loss(params, batch, key, is_training):
            inputs = batch["point"][:, None]  # [B, S, D]
            outputs, found = functional(
                layer, key, params["layer"], (inputs,), is_training=is_training
            )
            logits = outputs[:, 0] @ params["head"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean() + found.total_aux_loss()

        return moelib.Task.default_config().set(init=init, loss=loss)

    gated = task_around(FeedForward.default_config().set(input_dim=2, hidden_dim=64))
    result = moelib.fit(
        gated, train, trainer_dir="runs/layers", optimizer=optimizer, batch_size=64, max_step=20
    )
    # --8<-- [end:layers]
    assert result.metrics["loss"] < 1
