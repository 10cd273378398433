"""Tasks: models in three functions, trained, evaluated and predicted from plain calls."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from flax import nnx
from jax.sharding import PartitionSpec as P

import moelib
from moelib.core import config_text
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.external import Updated
from moelib.learner.optimizers import adamw_optimizer, sgd_optimizer
from moelib.learner.schedules import cosine
from moelib.parallel.mesh import create_device_mesh
from moelib.parallel.sharding import abstract_arrays, constrain
from moelib.tasks.input import TaskInput
from moelib.tasks.run import task_trainer_config
from moelib.tasks.task import Task
from tests.python_process import finish, free_port, start

DIM, CLASSES = 8, 3


def make_examples(count, seed=0):
    """Returns points with labels that depend on them, and weights of 0 to 2 tokens."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, DIM)).astype(np.float32)
    labels = np.argmax(points[:, :CLASSES], axis=1)
    return [
        {"x": x, "label": label, "tokens": np.float32(i % 3)}
        for i, (x, label) in enumerate(zip(points, labels, strict=True))
    ]


EXAMPLES = make_examples(203)


def init(key):
    up, down = jax.random.split(key)
    return [jax.random.normal(up, (DIM, 16)), {"down": jax.random.normal(down, (16, CLASSES))}]


def logits_of(params, x):
    return jax.nn.relu(x @ params[0]) @ params[1]["down"]


def losses_of(params, batch):
    logits = logits_of(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def mean_loss(params, batch, key, is_training):
    del key, is_training
    hits = jnp.argmax(logits_of(params, batch["x"]), -1) == batch["label"]
    return jnp.mean(losses_of(params, batch)), {"hits": jnp.mean(hits)}


def token_loss(params, batch, key, is_training):
    del key, is_training
    return jnp.sum(losses_of(params, batch) * batch["tokens"]), jnp.sum(batch["tokens"])


def predict(params, batch, key):
    del key
    return {"id": jnp.argmax(logits_of(params, batch["x"]), -1), "first": batch["x"][:, 0]}


def count_hits(examples, results):
    hits = [e["label"] == r["id"] for e, r in zip(examples, results, strict=True)]
    return {"accuracy": np.mean(hits)}


def make_task(**fields):
    return Task.default_config().set(init=init, loss=mean_loss, predict=predict).set(**fields)


def sgd(learning_rate=0.1):
    return config_for_function(sgd_optimizer).set(learning_rate=learning_rate)


def fit(task, folder, examples=EXAMPLES, **settings):
    defaults = {"batch_size": 64, "max_step": 4, "optimizer": sgd()}
    return moelib.fit(task, examples, trainer_dir=folder, **defaults | settings)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


PARAMS = jax.tree.map(np.asarray, init(jax.random.key(1)))


@pytest.mark.parametrize(
    ("count", "mesh"), [(203, "data=8"), (5, "fsdp=2,model=4"), (64, "data=8")]
)
def test_evaluation_is_exact(count, mesh):
    task, examples = make_task(metric=count_hits), EXAMPLES[:count]
    found = moelib.evaluate(task, examples, params=PARAMS, batch_size=64, mesh=mesh)
    whole = {name: np.stack([e[name] for e in examples]) for name in examples[0]}
    losses = np.asarray(losses_of(PARAMS, whole), np.float64)
    hits = np.argmax(logits_of(PARAMS, whole["x"]), -1) == whole["label"]
    assert found["weight"] == count
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found["hits"] == pytest.approx(np.mean(hits)) == found["accuracy"]
    if count != 203:
        return
    task.set(loss=lambda *args: (token_loss(*args), mean_loss(*args)[1]), metric=None)
    found = moelib.evaluate(task, examples, params=PARAMS, batch_size=64)
    assert found["weight"] == np.sum(whole["tokens"])
    assert found["hits"] == pytest.approx(np.mean(hits))  # Not over tokens, as the loss is.
    assert found["loss"] == pytest.approx(np.average(losses, weights=whole["tokens"]), rel=1e-6)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=2,model=4"])
@pytest.mark.parametrize("batch_size", [64, 32])
def test_losses_and_predictions_over_the_batch_are_those_of_whole_batches(batch_size, mesh):
    """A contrastive loss of two towers, whose negatives are the other examples of the batch."""

    def loss(params, batch, key, is_training):
        scores = (batch["x"] @ params[0]) @ (batch["x"] ** 2 @ params[0]).T
        matches = jnp.arange(len(scores))
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, matches)
        return losses.mean(), {"hits": jnp.mean(scores.argmax(-1) == matches)}

    center = lambda params, batch, key: batch["x"] - batch["x"].mean(0, keepdims=True)
    call = (make_task(loss=loss, predict=center), EXAMPLES[:43])
    settings = {"params": PARAMS, "batch_size": batch_size, "mesh": mesh}
    found, centered = moelib.evaluate(*call, **settings), moelib.predict(*call, **settings)
    points = np.stack([e["x"] for e in EXAMPLES[:43]]).astype(np.float64)
    batches = [points] if batch_size == 64 else [points[:32], points[32:]]
    scores = [(x @ PARAMS[0]) @ (x**2 @ PARAMS[0]).T for x in batches]
    losses = [scipy.special.logsumexp(s, axis=1) - np.diag(s) for s in scores]
    assert found["loss"] == pytest.approx(np.mean(np.concatenate(losses)), rel=1e-5)
    hits = [s.argmax(axis=1) == np.arange(len(s)) for s in scores]
    assert found["hits"] == pytest.approx(np.mean(np.concatenate(hits)))
    assert found["weight"] == 43
    np.testing.assert_allclose(centered, np.concatenate([x - x.mean(0) for x in batches]), 0, 1e-6)


def test_keys_of_a_batch_are_those_that_collate_returns():
    def collate(examples):
        x = np.stack([e["x"] for e in examples])
        return {"a/b": x, "a": {"b": 0 * x, "c": {0: 2 * x}}}

    def loss(params, batch, key, is_training):
        inner = {"zero": jnp.mean(batch["a"]["b"]), "twice": jnp.mean(batch["a"]["c"][0])}
        return jnp.mean(batch["a/b"]), inner

    task = make_task(collate=collate, loss=loss, predict=None)
    found = moelib.evaluate(task, EXAMPLES[:9], params=PARAMS, batch_size=8)
    assert found["loss"] == pytest.approx(np.mean([e["x"] for e in EXAMPLES[:9]]))
    assert found["zero"] == 0
    assert found["twice"] == pytest.approx(2 * found["loss"])


def test_layers_of_moelib_evaluate_an_incomplete_batch():
    def loss(params, batch, key, is_training):
        batch = batch | {"x": constrain(batch["x"], ("batch", None))}
        return mean_loss(params, batch, key, is_training)

    found = moelib.evaluate(make_task(loss=loss), EXAMPLES[:5], params=PARAMS)
    assert found["loss"] == moelib.evaluate(make_task(), EXAMPLES[:5], params=PARAMS)["loss"]


def test_predictions_are_those_of_the_examples_in_order():
    mesh = "data=2,fsdp=2,model=2"
    found = moelib.predict(make_task(), EXAMPLES, params=PARAMS, batch_size=64, mesh=mesh)
    assert len(found) == 203
    assert [r["first"] for r in found] == [e["x"][0] for e in EXAMPLES]
    texts = make_task(postprocess=lambda out: [f"class {i}" for i in out["id"]])
    assert moelib.predict(texts, EXAMPLES, params=PARAMS) == [f"class {r['id']}" for r in found]


def test_learning_rate_is_that_of_the_schedule_at_the_step_of_the_optimizer(tmp_path):
    schedule = config_for_function(cosine).set(peak_lr=1.0, warmup_steps=3, max_step=8)
    task, settings = make_task(loss=token_loss), {"max_step": 8, "batch_size": 32}
    for parts in (1, 4):
        cfg = task_trainer_config(
            task, EXAMPLES, optimizer=sgd(schedule), num_microbatches=parts, **settings
        )
        cfg.log_every_n_steps = 1
        moelib.fit(cfg, trainer_dir=tmp_path / str(parts))
    whole, parts = (lines(tmp_path / name) for name in ("1", "4"))
    wanted = [float(schedule.instantiate()(step)) for step in range(1, 9)]
    assert [line["learning_rate"] for line in parts] == pytest.approx(wanted)
    assert wanted[-1] < 0.1  # RedCoast would apply the rate of step 2, and log that of step 8.
    assert [x["loss"] for x in parts] == pytest.approx([x["loss"] for x in whole], rel=1e-5)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, caplog):
    def noisy(params, batch, key, is_training):
        loss, metrics = mean_loss(params, batch, key, is_training)
        return loss + jax.random.normal(key) * jnp.sum(params[0]), metrics

    settings = {
        "batch_size": 64,  # The fourth batch ends one epoch and begins the next.
        "optimizer": config_for_function(adamw_optimizer).set(learning_rate=1e-2),
        "save_every": 3,
        "eval_examples": EXAMPLES[:10],
        "best_metric": "validation/hits",
        "best_mode": "max",
    }
    task = make_task(loss=noisy)
    whole = fit(task, tmp_path / "whole", max_step=6, **settings)
    fit(task, tmp_path / "parts", max_step=3, **settings)
    resumed = fit(task, tmp_path / "parts", max_step=6, **settings)
    assert resumed.best_step == whole.best_step
    scores = {
        x["step"]: x["validation/hits"] for x in lines(tmp_path / "parts") if "validation/hits" in x
    }
    assert scores[resumed.best_step] == max(scores.values())
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.evaluations == whole.evaluations
    settings["eval_examples"] = EXAMPLES[:9]
    fit(task, tmp_path / "parts", max_step=7, **settings)
    assert "validation.input has changed: num_examples was 10 and is 9." in caplog.text
    assert "evaluated on a weight of 9, and of 10" in caplog.text


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A task with large parameters, and what a run of it on one axis of data returns."""
    task = make_task(
        init=lambda key: [
            jax.random.normal(key, (DIM, 8192)),
            {"down": jnp.ones((8192, CLASSES)) / 100},
        ]
    )
    return task, fit(task, tmp_path_factory.mktemp("data"), max_step=2, optimizer=sgd(1e-4))


@pytest.mark.parametrize(
    "mesh",
    [
        "data=2,fsdp=2,model=2",
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("model=8", "fsdp=8")),
    ],
)
def test_parameters_are_sharded_and_numbers_equal(tmp_path, wide, mesh):
    task, plain = wide
    found = fit(task, tmp_path, max_step=2, optimizer=sgd(1e-4), mesh=mesh)
    axis = "fsdp" if mesh == "fsdp=8" else "model"
    up, down = (x.sharding.spec for x in jax.tree.leaves(found.params))
    assert (up[1], down[0]) == (axis, axis)
    for name, value in plain.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(
    ("method", "others", "gathered"),
    [("predict", (), "128,512"), ("own_step", (lambda params, gradients: params,), "3,128,512")],
)
def test_predictions_gather_one_layer_at_a_time_and_own_steps_all(method, others, gathered):
    def stack(params, batch, key):
        layer = lambda x, each: (jnp.tanh(x @ each["up"]) @ each["down"], None)
        return jax.lax.scan(layer, batch["x"], params)[0]

    task = make_task(
        init=lambda key: {"up": jnp.zeros((3, 128, 512)), "down": jnp.zeros((3, 512, 128))},
        predict=stack,
        train_step=lambda p, b, k, apply: (apply(p, p), jnp.mean(stack(p, b, k))),
    )
    model = task.clone(name="task").instantiate(parent=None)
    mesh = create_device_mesh((2, 4), ("fsdp", "model"))
    model.set_shardings({"up": P(None, None, "model")}, dict(mesh.shape))
    params = abstract_arrays(model.create_parameter_specs_recursively(), mesh)
    batch = {"batch": {"x": jnp.zeros((8, 128))}}
    run = lambda params: functional(
        model, None, params, (batch, *others), is_training=False, method=method
    )[0]
    with jax.set_mesh(mesh):
        trace = str(jax.make_jaxpr(run)(params))
    found = re.findall(r"f32\[([\d,]+)\]\S* = sharding_constraint", trace)
    assert gathered in found
    assert len(found) == 2


def test_own_training_step(tmp_path):
    def step(params, batch, key, apply_gradients):
        value, gradients = jax.value_and_grad(lambda p: mean_loss(p, batch, key, True)[0])(params)
        new = apply_gradients(params, jax.tree.map(lambda g: 2 * g, gradients))
        return [*new[:1], {"down": new[1]["down"] * 0.5}], (value, {"twice": 2 * value})

    found = fit(make_task(train_step=step), tmp_path, max_step=1)
    plain = fit(make_task(), tmp_path / "plain", max_step=1, optimizer=sgd(0.2))
    np.testing.assert_allclose(found.params[0], plain.params[0], rtol=1e-6)
    np.testing.assert_allclose(found.params[1]["down"], plain.params[1]["down"] / 2, rtol=1e-6)
    assert found.metrics["loss"] == plain.metrics["loss"]
    assert found.metrics["twice"] == pytest.approx(2 * found.metrics["loss"])
    assert found.metrics["learning_rate"] == pytest.approx(0.1)


def test_parameters_that_are_not_trained_take_the_values_that_the_loss_returns(tmp_path):
    def counted(params, batch, key, is_training):
        loss, metrics = mean_loss(params["net"], batch, key, is_training)
        return Updated((loss, metrics), {"steps": params["steps"] + 1})

    task = make_task(
        init=lambda key: {"net": init(key), "steps": jnp.zeros(())}, loss=counted, fixed=["steps"]
    )
    assert float(fit(task, tmp_path, max_step=3).params["steps"]) == 3


def test_examples_of_an_epoch_may_depend_on_the_parameters(tmp_path):
    seen = []

    def roll_out(epoch, params):
        seen.append((epoch, params[0].copy()))
        return make_examples(16, seed=int(1000 * abs(params[0]).sum()))

    settings = {"examples": roll_out, "batch_size": 8}
    whole = fit(make_task(), tmp_path / "whole", max_step=5, **settings)
    assert [epoch for epoch, _ in seen] == [0, 1, 2]
    assert whole.step == 5
    assert not np.array_equal(seen[1][1], seen[2][1])
    fit(make_task(), tmp_path / "parts", max_step=4, **settings)
    seen.clear()
    parts = fit(make_task(), tmp_path / "parts", max_step=5, **settings)
    jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
    assert [epoch for epoch, _ in seen] == [2]


def test_a_position_within_an_epoch_that_depends_on_the_parameters_is_a_warning(caplog):
    cfg = TaskInput.default_config().set(
        examples=lambda epoch, params: make_examples(16), global_batch_size=8
    )
    batches = cfg.instantiate().iterator()
    position = batches.state() | {"examples_per_epoch": 16}
    batches.restore(position | {"step": 4})
    assert not caplog.records
    batches.restore(position | {"step": 5})
    assert "step 5 is within epoch 2" in caplog.text
    assert "save_every=2" in caplog.text


def test_another_batch_size_goes_on_with_the_next_example():
    examples = [{"x": np.int32(i)} for i in range(8)]
    seen, state = [], {}
    for size in (2, 2, 4):
        cfg = TaskInput.default_config().set(examples=lambda: examples, global_batch_size=size)
        batches = cfg.instantiate().iterator()
        batches.follow(state)
        seen += next(batches)["batch"]["x"].tolist()
        state = batches.state()
    assert sorted(seen) == [*range(8)]
    assert state["step"] == 3


def nnx_model(key):
    rngs = nnx.Rngs(key)
    return nnx.Linear(DIM, CLASSES, rngs=rngs)


def equinox_model(key):
    return eqx.nn.Linear(DIM, CLASSES, key=key)


def nnx_logits(params, x):
    graph = nnx.graphdef(nnx.eval_shape(nnx_model, jax.random.key(0)))
    return nnx.merge(graph, params)(x)


@pytest.mark.parametrize(
    ("initial", "apply", "kind"),
    [
        (lambda key: nnx.state(nnx_model(key), nnx.Param), nnx_logits, nnx.State),
        (equinox_model, lambda params, x: jax.vmap(params)(x), eqx.nn.Linear),
    ],
)
def test_trees_of_other_libraries(tmp_path, initial, apply, kind):
    def loss(params, batch, key, is_training):
        logits = apply(params, batch["x"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    task = Task.default_config().set(
        init=initial, loss=loss, predict=lambda params, batch, key: apply(params, batch["x"])
    )
    result = fit(task, tmp_path, optimizer=optax.sgd(0.1), max_step=2, mesh="fsdp=8")
    assert isinstance(result.params, kind)
    again = fit(task, tmp_path, optimizer=optax.sgd(0.1), max_step=3, mesh="fsdp=8")
    assert again.step == 3
    with pytest.raises(UserError, match=r"settings is \.{3}.{,60}=-0\.1.* and \.{3}.{,60}=-0\.5"):
        fit(task, tmp_path, optimizer=optax.sgd(0.5), max_step=3, mesh="fsdp=8")
    logits = moelib.predict(task, EXAMPLES[:3], params=again.params)
    stacked = np.stack([e["x"] for e in EXAMPLES[:3]])
    np.testing.assert_allclose(np.stack(logits), apply(again.params, stacked), rtol=1e-5)


def test_config_of_a_task_reads_back_and_trains(tmp_path):
    cfg = task_trainer_config(
        Task.default_config().set(init=init, loss=config_for_function(scaled_loss).set(scale=2.0)),
        config_for_function(make_examples).set(count=16),
        optimizer=sgd(),
        batch_size=8,
        max_step=1,
    )
    again = config_text.parse(cfg.debug_string(), trusted=True)
    assert again == cfg
    found = moelib.fit(again, trainer_dir=tmp_path).metrics["loss"]
    plain = fit(make_task(), tmp_path / "plain", make_examples(16), batch_size=8, max_step=1)
    assert found == pytest.approx(2 * plain.metrics["loss"])


def scaled_loss(scale):
    """Returns a loss, from a setting of a config."""
    return lambda *args: scale * mean_loss(*args)[0]


def test_given_parameters_are_the_initial_ones(tmp_path):
    cfg = task_trainer_config(
        make_task(), EXAMPLES, params=PARAMS, batch_size=8, max_step=1, optimizer=sgd()
    )
    trainer = cfg.set(dir=str(tmp_path)).instantiate(parent=None)
    trainer.init()
    jax.tree.map(np.testing.assert_array_equal, trainer.result(), PARAMS)


# -- Bad input -----------------------------------------------------------------------------------


def fitting(fields, *examples, **settings):
    """Returns a call that trains with fields of the task, until it is refused."""
    return lambda folder: fit(make_task(**fields), folder, *examples, **settings)


def evaluating(fields, examples=EXAMPLES[:9], **settings):
    """Returns a call that evaluates with fields of the task."""
    settings = {"params": PARAMS} | settings
    return lambda folder: moelib.evaluate(make_task(**fields), examples, **settings)


def predicting(examples=EXAMPLES[:9], **fields):
    """Returns a call that predicts with fields of the task."""
    return lambda folder: moelib.predict(make_task(**fields), examples, params=PARAMS)


def with_metrics(metrics):
    return {"loss": lambda p, b, k, t: (jnp.mean(losses_of(p, b)), metrics)}


def updating(changed):
    """Returns functions of a task whose loss changes parameters."""
    return {
        "init": lambda key: {"net": init(key), "steps": jnp.zeros((), jnp.int32)},
        "loss": lambda p, b, k, t: Updated(jnp.mean(losses_of(p["net"], b)), changed),
    }


def with_axes(axes):
    init = lambda key: [jnp.zeros((DIM, 16)), {"down": jnp.zeros((16, 8))}]
    fields = {"init": init, "axes": axes}
    return evaluating(fields, params=init(None), mesh="data=2,model=4")


def ragged(examples):
    return {"x": [e["x"][: 1 + i] for i, e in enumerate(examples)]}


def grow(examples):
    return {"x": np.ones((len(examples), int(examples[0]["tokens"]) + 1))}


def drift(examples):
    return {"x": np.ones(len(examples), "float32" if examples[0]["tokens"] else "int32")}


def roll_out(epoch, params):
    return make_examples(16)


def update_twice(params, batch, key, apply_gradients):
    gradients = jax.tree.map(jnp.ones_like, params)
    return apply_gradients(apply_gradients(params, gradients), gradients), jnp.zeros(())


def planned(folder):
    cfg = task_trainer_config(make_task(), EXAMPLES, batch_size=8, max_step=1, optimizer=sgd())
    return moelib.plan(cfg, ["v6e:2x2"])


ADAM_OF_PARTS = optax.MultiSteps(optax.adam(1e-3), 4)
INTEGERS = {"init": lambda key: {"n": jnp.zeros(3, int)}, "loss": lambda p, *args: 0.0 * p["n"][0]}
SUM = {"loss": lambda p, b, k, t: jnp.sum(p[0])}
NEGATIVE = {"loss": lambda p, b, k, t: (jnp.sum(p[0]), -(b["x"][0, 0] ** 2))}

REFUSED = [
    (fitting({"loss": lambda p, b, k, t: losses_of(p, b)}), r"loss is float32\[64\]"),
    (fitting({"loss": lambda p, b, k, t: None}), "loss is None"),
    (fitting({"loss": lambda p, b, k, t: jnp.sum(p[0]) + 1j}), r"loss is complex64\[\]"),
    (fitting(with_metrics({"hits": jnp.ones(2)})), r"hits is float32\[2\]"),
    (fitting(with_metrics({"objective": 1.0})), "'objective'"),
    (fitting(with_metrics({1: 1.0})), "loss returned {1: "),
    (fitting(updating({"new": 1.0})), "'new', which is no parameter"),
    (fitting(updating({"net": {"0": 1.0}})), "'net/0', which is trained"),
    (fitting(updating({"steps": jnp.ones(())})), r"'steps' is float32\[\] instead of int32\[\]"),
    (fitting(INTEGERS), "no parameter is trained"),
    (fitting({"collate": 3}), "collate is 3"),
    (fitting({"loss": "sum"}), "loss is 'sum'"),
    (fitting({"fixed": [".*"]}), "fixed=.*"),
    (fitting({}, {"x": np.ones((9, DIM))}), "examples is dict"),
    (fitting({"collate": lambda e: {"id": [2**40] * len(e)}}), "'id' with 1099511627776"),
    (fitting({}, []), "examples is empty"),
    (fitting({}, lambda: None), "examples is NoneType"),
    (fitting({}, [{"x": 1.0}, {"y": 1.0}]), r"\['y'\].*\['x'\]|\['x'\].*\['y'\]"),
    (fitting({"collate": ragged}), "collate returned 'x'"),
    (fitting({"collate": lambda e: {"x": np.ones(3)}}), r"'x' of shape \(3,\) for 64"),
    (fitting({"collate": lambda e: None}), "collate returned None"),
    (fitting({"collate": lambda e: {"x": ["a"] * len(e)}}), "collate returned 'x' of <U1"),
    (fitting({}, num_microbatches=3), "batch_size is 64, which num_microbatches, 3,"),
    (fitting({}, max_step=0), "max_step=0.*above 0"),
    (fitting({}, max_step=None, num_epochs=0), "num_epochs=0.*above 0"),
    (fitting({}, max_step=None, num_epochs=np.inf), "num_epochs=inf.*above 0"),
    (fitting({}, optimizer=ADAM_OF_PARTS), r"optax\.MultiSteps"),
    (
        fitting({}, optimizer=optax.chain(ADAM_OF_PARTS.gradient_transformation())),
        r"optax\.MultiSteps",
    ),
    (fitting({}, roll_out, batch_size=8, mesh="model=8"), r"examples\(epoch, params\)"),
    (evaluating({}, roll_out), r"examples\(epoch, params\)"),
    # Training steps of the task's own.
    (fitting({"train_step": update_twice}), "apply_gradients"),
    (fitting({"train_step": update_twice}, num_microbatches=2), "num_microbatches=2"),
    (fitting({"train_step": lambda p, b, k, a: jnp.zeros(())}), r"train_step returned float32\[\]"),
    (
        fitting({"train_step": lambda p, b, k, a: (p, Updated(jnp.zeros(()), {}))}),
        "train_step returned Updated",
    ),
    (
        fitting({"train_step": lambda p, b, k, a: ([p[0][:1], p[1]], jnp.zeros(()))}),
        r"'0' is float32\[1, 16\] instead",
    ),
    (
        fitting({"train_step": lambda p, b, k, a: ([p[0].astype("bfloat16"), p[1]], 0.0)}),
        r"'0' is bfloat16\[8, 16\] i",
    ),
    # Settings.
    (lambda folder: moelib.fit(make_task(), EXAMPLES, batch_size=8), "'optimizer'"),
    (fitting({}, optimizer=1, max_steps=8), "no argument 'max_steps'; did you mean 'max_step'"),
    (
        fitting({"loss": lambda p, b: 0.0}),
        r"loss has the .*\(p, b\): .* take \(params, batch",
    ),
    (fitting({"init": lambda: PARAMS}), r"init has the .*\(\): .* take \(key\)"),
    (fitting({}, optimizer=0.01), r"optimizer is 0.01; pass one, such as optax.adam\(0.01\)"),
    (fitting({}, optimizer=1, max_step="2"), "max_step='2'"),
    (fitting({}, optimizer=1, batch_size=0), "batch_size=0"),
    (fitting({}, optimizer=1, max_step=None, num_epochs="2"), "num_epochs='2'"),
    (planned, "model is a Task"),
    # Evaluations.
    (evaluating({"metric": lambda examples, results: None}), "metric returned None"),
    (evaluating({"metric": lambda examples, results: {"a": None}}), "metric returned None as 'a'"),
    (evaluating({"metric": lambda examples, results: {"hits": 1}}), "'hits'"),
    (evaluating({"loss": lambda p, b, k, t: (jnp.sum(p[0]), 0)}), "weights of all examples are 0"),
    (evaluating(NEGATIVE), "one is negative"),
    (evaluating({}, batch_size=5), "batch_size=5 .* multiple of 8"),
    (evaluating({}, params=PARAMS[:1]), r"params: '1/down' is missing instead of float32\[16, 3\]"),
    (evaluating({}, params="runs/a"), "params: '0' is missing"),
    (evaluating({}, step=3), "step=3"),
    (evaluating({"predict": None, "metric": count_hits}), "metric is set, but predict is not"),
    (evaluating({"predict": None, "postprocess": list}), "postprocess is set, but predict is not"),
    (evaluating({}, batchsize=3), "moelib.evaluate of a task .*'batchsize'"),
    (evaluating({}, num_fewshot=3), "moelib.evaluate of a task .*'num_fewshot'"),
    (evaluating({}, mesh=8), "mesh=8"),
    (evaluating({"collate": grow, **SUM}, EXAMPLES, batch_size=8), r"'x' is float32\[3\] instead"),
    (
        evaluating({"collate": drift, **SUM}, EXAMPLES, batch_size=8),
        r"float32\[\] instead of int32\[\]",
    ),
    (with_axes([("0", ("model", None))]), "axes: 0 cannot be sharded along dimension 0"),
    (with_axes([("0", (None, "model")), ("1/down", (None, "model"))]), "axes: .* contradict"),
    # Predictions.
    (predicting(EXAMPLES, predict=lambda p, b, k: None), "predict returned None"),
    (predicting(EXAMPLES, predict=lambda p, b, k: {"a": "cat"}), "predict returned 'cat' as 'a'"),
    (
        predicting(EXAMPLES, predict=lambda p, b, k: jax.random.split(k, 64)),
        r"predict returned key<fry>\[64\]",
    ),
    *(
        (predicting(postprocess=lambda found, results=results: results), "results for 9 examples")
        for results in (None, [1], iter([1]), dict.fromkeys(range(9)), "9 letters", set(range(9)))
    ),
]


@pytest.mark.parametrize(("call", "names"), REFUSED, ids=[names for _, names in REFUSED])
def test_bad_input_is_named_in_one_line(call, names, tmp_path):
    with pytest.raises(UserError, match=names) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_of_zero_are_logged_and_negative_ones_end_the_run(tmp_path, caplog):
    weight_of = lambda batch: batch["tokens"][0]
    loss = lambda p, b, k, t: (jnp.mean(losses_of(p, b)) * weight_of(b), weight_of(b))
    weighed = lambda weight: [e | {"tokens": np.float32(weight)} for e in EXAMPLES[:8]]
    settings = {"batch_size": 8, "max_step": 1}
    fit(make_task(loss=loss), tmp_path / "zero", weighed(0), **settings)
    assert "step 1: the weights of the loss are 0" in caplog.text
    with pytest.raises(UserError, match="step 1: a weight of the loss is negative"):
        fit(make_task(loss=loss), tmp_path / "negative", weighed(-1), **settings)
    settings |= {"eval_examples": [*weighed(0), *weighed(0.5)]}  # Tried on the first batch.
    found = fit(make_task(loss=loss), tmp_path / "small", weighed(0.01), **settings)
    assert found.evaluations["validation"]["weight"] == 0.5
    line, _ = lines(tmp_path / "small")
    assert line["mean_loss"] == pytest.approx(line["loss"])
    assert line["examples_per_second"] > 0
    assert "tokens_per_second" not in line


def test_operations_that_the_trace_cannot_read_are_a_warning(caplog):
    def loss(params, batch, key, is_training):
        same = jax.pure_callback(lambda x: x, params[0], params[0])
        return jnp.mean(losses_of([same, params[1]], batch))

    cfg = task_trainer_config(
        make_task(loss=loss), EXAMPLES, batch_size=8, max_step=1, optimizer=sgd(), mesh="model=8"
    )
    cfg.set(dir="unused").instantiate(parent=None)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("unknown operation: pure_callback" in text for text in warnings)


def test_epochs_are_not_rounded_up_for_an_error_of_floating_point():
    settings = {"batch_size": 10, "num_epochs": 1.1, "optimizer": sgd()}
    assert task_trainer_config(make_task(), EXAMPLES[:100], **settings).max_step == 11


def test_error_in_a_function_of_the_task_keeps_its_traceback(tmp_path):
    def broken(params, batch, key, is_training):
        return batch["no_such_key"]

    with pytest.raises(KeyError, match="no_such_key") as caught:
        fit(make_task(loss=broken), tmp_path)
    assert caught.traceback[-1].name == "broken"


def test_evaluation_and_prediction_are_tried_before_the_first_step(tmp_path):
    for task in (
        make_task(metric=lambda examples, results: results["no_such_key"]),
        make_task(postprocess=lambda predictions: predictions + {}),
    ):
        with pytest.raises(TypeError):
            fit(task, tmp_path, eval_examples=EXAMPLES)
    assert not (tmp_path / "metrics.jsonl").exists()


# -- Processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_collate_their_own_examples_and_agree_with_one(tmp_path):
    command = "-m", "tests.tasks.task_process", tmp_path, "data=2,model=2"
    command = *command, f"localhost:{free_port()}", 2
    outputs = finish(*(start(*command, i) for i in range(2)))
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    one = fit(make_task(), tmp_path / "one", eval_examples=EXAMPLES[:21], batch_size=16, max_step=3)
    for found in results:
        assert (found["processes"], found["rows"]) == (2, 8)  # Half of a batch of 16.
        assert found["loss"] == pytest.approx(one.metrics["loss"], rel=1e-5)
        assert found["validation"]["loss"] == pytest.approx(
            one.evaluations["validation"]["loss"], rel=1e-5
        )
        assert found["scores"]["weight"] == 203
        assert found["scores"]["accuracy"] == pytest.approx(found["scores"]["hits"])
        assert found["first"] == [float(e["x"][0]) for e in EXAMPLES]
