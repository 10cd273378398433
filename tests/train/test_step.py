"""The step: its gradients are those of the objective, on any mesh and in micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.config import config_class, config_for_function
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.precision import cast_parameters
from moelib.layers.base import BaseLayer
from moelib.layers.initializers import constant
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss, RouterZLoss
from moelib.layers.remat import remat
from moelib.learner.learner import Learner, UpdateType
from moelib.learner.optimizers import sgd_optimizer
from moelib.learner.transforms import skip_bad_steps
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction
from moelib.parallel import sharding
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.train import metrics, state
from moelib.train.step import _is_non_finite, make_eval_step, make_train_step
from tests import tiny


def build(num_microbatches=1, train_dtype=None, skip=None, **model_fields):
    model = tiny.TinyModel.default_config().set(**{"dropout": 0.0, **model_fields})
    cfg = tiny.trainer_config("unused").set(model=model)
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(learning_rate=1.0)
    cfg.learner.skip = skip
    trainer = cfg.instantiate(parent=None)
    step = make_train_step(
        trainer.model, trainer.learner, num_microbatches=num_microbatches, train_dtype=train_dtype
    )
    return trainer, step


def start_of(trainer):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: one, trainer.trainer_state_specs)
    return state.init_state(trainer.model, trainer.learner, 0, shardings)


@pytest.fixture(scope="module")
def batch():
    batch = dict(tiny.input_config().instantiate().batch(0))
    batch["target_labels"][:3, 5:] = -1  # Sequences of different weight.
    return {name: jnp.asarray(value) for name, value in batch.items()}


def test_update_is_the_gradient_of_loss_and_auxiliary_losses(batch):
    trainer, step = build(aux_weight=0.5)
    before = start_of(trainer)

    def objective(params):
        (loss, _), _ = functional(
            trainer.model, None, {**before.model, **params}, (batch,), is_training=False
        )
        x = params["table"][batch["input_ids"]] @ params["head"]
        return loss.mean + 0.5 * jnp.mean(jnp.square(x))

    trained = {name: before.model[name] for name in ("table", "head")}
    value, gradients = jax.jit(jax.value_and_grad(objective))(trained)
    after, packed = jax.jit(step)(before, batch)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(before.model[name] - after.model[name], gradient, atol=1e-7)
    assert metrics.unpack(packed)["objective"] == pytest.approx(float(value), rel=1e-6)


def test_a_mesh_gives_the_same_step(batch):
    trainer, step = build()
    start = start_of(trainer)
    expected, expected_metrics = jax.jit(step)(start, batch)
    mesh = create_device_mesh(mesh_shape_from_axes(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        shardings = sharding.named_shardings(trainer.trainer_state_specs, mesh)
        rows = state.batch_sharding(8, 16, mesh)
        put = lambda x: jax.device_put(
            x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*rows.spec[: x.ndim]))
        )
        sharded = {name: put(x) for name, x in batch.items()}
        out, out_metrics = jax.jit(step)(jax.device_put(start, shardings), sharded)
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
    jax.tree.map(close, out.model, expected.model)
    got, want = metrics.unpack(out_metrics), metrics.unpack(expected_metrics)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_micro_batches_give_the_step_of_the_whole_batch(batch):
    whole_trainer, whole = build(aux_weight=0.0)
    _, parts = build(num_microbatches=4, aux_weight=0.0)
    start = start_of(whole_trainer)
    a, metrics_a = jax.jit(whole)(start, batch)
    b, metrics_b = jax.jit(parts)(start, batch)
    for name in ("table", "head"):
        np.testing.assert_allclose(a.model[name], b.model[name], atol=1e-6)
    assert int(a.model["passes"]) == 1
    assert int(b.model["passes"]) == 4  # What layers put out goes from part to part.
    assert int(b.model["steps"]) == 1
    a, b = metrics.unpack(metrics_a), metrics.unpack(metrics_b)
    assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
    assert b["num_tokens"] == a["num_tokens"] == float(jnp.sum(batch["target_labels"] >= 0))


def test_step_is_deterministic_and_its_key_changes(batch):
    trainer, step = build(dropout=0.5)
    step, start = jax.jit(step), start_of(trainer)
    one, two = step(start, batch), step(start, batch)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    later = step(start._replace(step=start.step + 1), batch)
    assert metrics.unpack(later[1])["loss"] != metrics.unpack(one[1])["loss"]


def test_only_trained_parameters_are_cast(batch):
    trainer, step = build(train_dtype="bfloat16")
    start = start_of(trainer)
    # 1000.5 and 1001 are the same in bfloat16.
    start = start._replace(model={**start.model, "passes": jnp.float32(1000.5)})
    after, _ = jax.jit(step)(start, batch)
    assert float(after.model["passes"]) == 1001.5
    assert after.model["table"].dtype == jnp.float32


@pytest.mark.parametrize("skipping", [False, True])
def test_nan_is_reported_unless_the_step_is_skipped(batch, skipping):
    skip = config_for_function(skip_bad_steps) if skipping else None
    trainer, step = build(skip=skip, nan_at=1)
    start = start_of(trainer)
    after, packed = jax.jit(step)(start, batch)
    assert metrics.unpack(packed)["non_finite"] == float(not skipping)
    if skipping:
        jax.tree.map(np.testing.assert_array_equal, after.model, start.model)
        assert int(after.step) == 1


@pytest.mark.parametrize(
    ("values", "expected"), [([3e38, 3e38], 0), ([1.0, np.nan], 1), ([np.inf, -np.inf], 1)]
)
def test_parameters_are_finite_though_their_sum_is_not(values, expected):
    params = {"weight": jnp.array(values, jnp.float32)}
    assert _is_non_finite(jnp.zeros(()), params, None) == expected


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_frozen_state_is_not_changed_by_layers(batch, num_microbatches):
    cfg = tiny.trainer_config("unused")
    cfg.learner.update_rules = [("passes", UpdateType.NO_UPDATE), ("head", UpdateType.NO_UPDATE)]
    trainer = cfg.instantiate(parent=None)
    step = make_train_step(trainer.model, trainer.learner, num_microbatches=num_microbatches)
    start = start_of(trainer)
    after, _ = jax.jit(step)(start, batch)
    assert float(after.model["passes"]) == 0
    assert float(after.model["steps"]) == 1  # Not frozen.
    np.testing.assert_array_equal(after.model["head"], start.model["head"])


def test_evaluation_adds_up(batch):
    trainer, _ = build()
    start = start_of(trainer)
    step = jax.jit(make_eval_step(trainer.model))
    totals = metrics.unpack(step(start.model, batch))
    parts = [
        metrics.unpack(step(start.model, jax.tree.map(rows, batch)))
        for rows in (lambda x: x[:3], lambda x: x[3:])
    ]
    for name in ("total/loss", "num_tokens", "total/bytes_per_token"):
        assert totals[name] == pytest.approx(sum(part[name] for part in parts), rel=1e-6)


def test_state_update_of_a_trained_parameter_is_refused(batch):
    class Wrong(tiny.TinyModel):
        def forward(self, batch):
            self.add_state_update("table", self.parameters["table"])
            return super().forward(batch)

    trainer, _ = build()
    model = Wrong.default_config().set(name="model").instantiate(parent=None)
    step = make_train_step(model, trainer.learner)
    with pytest.raises(ValueError, match="'table', which is trained"):
        jax.eval_shape(step, abstract(trainer), batch)


LAYERS = 3


def scanned(train_dtype, layer=None, **fields):
    """Returns (trainer, step, batch) of a model of three stacked layers."""
    layer = layer or tiny.transformer_layer(tiny.plain_moe())
    decoder = tiny.stacked(layer, num_layers=LAYERS, remat=config_for_function(remat))
    cfg = tiny.trainer_config("unused", model=tiny.model_config(decoder, vocab_size=64, **fields))
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(learning_rate=1.0)
    trainer = cfg.instantiate(parent=None)
    step = make_train_step(trainer.model, trainer.learner, train_dtype=train_dtype)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 8)), jnp.int32)
    return trainer, step, {"input_ids": ids, "target_labels": ids[:, ::-1]}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_summed_by_layer_are_those_of_whole_micro_batches(num_microbatches):
    trainer, _, batch = scanned("bfloat16")
    options = {"train_dtype": "bfloat16", "num_microbatches": num_microbatches}
    after, held = [], []
    for by_layer in (False, True):
        step = make_train_step(trainer.model, trainer.learner, sum_by_layer=by_layer, **options)
        compiled = jax.jit(step).lower(start_of(trainer), batch).compile()
        after.append(compiled(start_of(trainer), batch)[0].model)
        held.append(compiled.memory_analysis().temp_size_in_bytes)
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-8 * np.abs(a).max())
    assert held[1] < held[0] if num_microbatches > 1 else held[1] == held[0]


def abstract(trainer):
    """Returns shapes and dtypes of the state."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        trainer.trainer_state_specs,
        is_leaf=is_spec,
    )


@pytest.mark.parametrize("fields", [{}, {"lm_head": None}])
@pytest.mark.slow
def test_casting_at_use_gives_the_gradients_of_casting_all_at_once(fields):
    trainer, step, batch = scanned("bfloat16", **fields)
    before = start_of(trainer)
    specs = trainer.model.create_parameter_specs_recursively()

    def objective(params):
        params = cast_parameters(params, specs, "bfloat16")
        (loss, _), collection = functional(trainer.model, None, params, (batch,), is_training=True)
        return loss.mean + collection.total_aux_loss()

    gradients = jax.jit(jax.grad(objective))(before.model)
    after, _ = jax.jit(step)(before, batch)

    def same(path, old, new, gradient):
        want = old - gradient.astype(jnp.float32)
        scale = max(1e-3, float(jnp.abs(gradient).max()))
        np.testing.assert_allclose(new, want, atol=2**-8 * scale, err_msg=path)

    tree.map_by_path(same, before.model, after.model, gradients)


@pytest.mark.slow
def test_no_copy_of_all_layers_is_cast():
    trainer, step, batch = scanned("bfloat16")
    text = jax.jit(step).lower(abstract(trainer), batch).as_text()
    casts = re.findall(r"stablehlo.convert.*-> tensor<([\dx]*)xbf16>", text)
    assert casts
    assert not [shape for shape in casts if shape.startswith(f"{LAYERS}x")]
    assert f"tensor<{LAYERS}x4x2x16x8xbf16>" in text  # Gradients are summed in bfloat16.


def test_gradients_of_tables_norms_and_routers_are_float32(monkeypatch):
    known, seen = Learner.update, {}

    def update(self, *, gradients, **given):
        seen.update((path, x.dtype) for path, x in tree.flatten_items(gradients))
        return known(self, gradients=gradients, **given)

    monkeypatch.setattr(Learner, "update", update)
    trainer, step, batch = scanned("bfloat16", lm_head=None)
    after, _ = jax.eval_shape(step, abstract(trainer), batch)
    assert after.model["embedding"]["weight"].dtype == jnp.float32
    low = {path for path, dtype in seen.items() if dtype == jnp.bfloat16}
    layer = "decoder/repeated0"
    assert {f"{layer}/self_attention/q", f"{layer}/feed_forward/experts/up"} <= low
    assert all("norm" not in path and "router" not in path for path in low)
    assert seen["embedding/weight"] == jnp.float32


class LoopOverLayers(BaseLayer):
    """Layers stacked by hand, without a scan of the library."""

    @config_class
    class Config(BaseLayer.Config):
        """Config of `LoopOverLayers`."""

        input_dim: int = 16

    def _create_layer_parameter_specs(self):
        return {
            "weight": ParameterSpec((LAYERS, 16), axes=("layers", None), initializer=constant(1.0))
        }

    def forward(self, x, **side_inputs):
        for weight in self.parameters["weight"]:
            assert weight.dtype == x.dtype
            x = x * weight[None, None]
        return x


def test_stacked_layers_without_a_scan_are_cast_too():
    model = tiny.model_config(LoopOverLayers.default_config(), vocab_size=64)
    cfg = tiny.trainer_config("unused", model=model)
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(learning_rate=1.0)
    trainer = cfg.instantiate(parent=None)
    before = start_of(trainer)
    ids = jnp.zeros((2, 8), jnp.int32)
    step = make_train_step(trainer.model, trainer.learner, train_dtype="bfloat16")
    after, _ = jax.jit(step)(before, {"input_ids": ids, "target_labels": ids + 1})
    assert (after.model["decoder"]["weight"] != before.model["decoder"]["weight"]).any()


def with_aux_losses(num_microbatches, labels_of_odd_rows):
    """Returns the state and metrics after a step of eight sequences, some with few labels.

    The layers of multi-token prediction do not see the last tokens of a document.
    """
    balance = LoadBalanceLoss.default_config().set(weight=0.1, scope=BalanceScope.SEQUENCE)
    z_loss = RouterZLoss.default_config().set(weight=0.1)
    layer = tiny.transformer_layer(tiny.plain_moe(load_balance_loss=balance, router_z_loss=z_loss))
    module = MultiTokenModule.default_config().set(layer=layer)
    further = MultiTokenPrediction.default_config().set(module=module)
    trainer, _, _ = scanned(None, layer, multi_token_prediction=further)
    before = start_of(trainer)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 64, (8, 8)), jnp.int32)
    segment_ids = jnp.asarray(np.arange(8) < rng.integers(4, 9, (8, 1)), jnp.int32)
    labels = jnp.where(segment_ids > 0, ids[:, ::-1], -1)
    labels = labels.at[1::2, labels_of_odd_rows:].set(-1)
    batch = {"input_ids": ids, "target_labels": labels, "segment_ids": segment_ids}
    step = make_train_step(trainer.model, trainer.learner, num_microbatches=num_microbatches)
    after, packed = jax.jit(step)(before, batch)
    return after, metrics.unpack(packed)


@pytest.mark.slow
@pytest.mark.parametrize(("num_microbatches", "labels_of_odd_rows"), [(2, 0), (8, 1)])
def test_micro_batches_with_few_labels_have_the_auxiliary_losses_of_their_tokens(
    num_microbatches, labels_of_odd_rows
):
    # Sequences are dealt out: all odd ones are one of two micro-batches.
    whole, metrics_of_whole = with_aux_losses(1, labels_of_odd_rows)
    parts, metrics_of_parts = with_aux_losses(num_microbatches, labels_of_odd_rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        whole.model,
        parts.model,
    )
    for name, value in metrics_of_whole.items():
        if "loss" in name or name in ("objective", "gradient_norm", "num_tokens"):
            np.testing.assert_allclose(metrics_of_parts[name], value, rtol=1e-5, err_msg=name)
