"""A step in a pipeline equals a step without: metrics, parameters, state that layers update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core import config_text, tree
from moelib.core.config import config_class, config_for_function
from moelib.core.errors import UserError
from moelib.layers.base import BaseLayer
from moelib.layers.embedding import Embedding
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadBalanceLoss
from moelib.layers.moe.router import Router
from moelib.layers.norm import RMSNorm
from moelib.layers.quantization import Quantization
from moelib.layers.remat import remat
from moelib.layers.transformer import LoopStack
from moelib.learner.learner import Learner
from moelib.models.causal_lm import CausalLM
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction
from moelib.parallel import sharding
from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, mesh_shape_from_axes
from moelib.parallel.pipeline import engine
from moelib.parallel.pipeline.passes import split_passes
from moelib.parallel.pipeline.schedule import Schedule
from moelib.tasks.fit import fit
from moelib.train import state as state_lib
from moelib.train.metrics import unpack
from moelib.train.pipeline import PipelineConfig, stack_of, stage_sizes, warn_empty_stages
from moelib.train.step import make_train_step
from tests.tiny import model_config, moe, packed_batch, stacked, trainer_config, transformer_layer


def moe_model(num_blocks: int, *, first_experts: bool = True):
    """Returns a model of a dense layer, one of experts, and blocks.

    Experts have both auxiliary losses and a balancing bias.
    """
    loss = LoadBalanceLoss.default_config().set(weight=0.3, scope=BalanceScope.GLOBAL_BATCH)
    balancing = BiasBalancing.default_config()
    layer = transformer_layer(
        moe(load_balance_loss=loss, router=Router.default_config().set(bias_balancing=balancing))
    )
    first = [transformer_layer(), *[layer.clone()] * first_experts]  # All in the first stage.
    return model_config(stacked(layer, num_layers=len(first) + num_blocks, first_layers=first))


def step_of(
    cfg, axes=None, pipeline=None, *, num_microbatches: int, train_dtype=None, traced=False
):
    """Returns parameters and metrics after a step of SGD with a rate of 1, if not only traced."""
    model = cfg.instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    learner_cfg = Learner.default_config().set(name="learner", optimizer=optax.sgd(1.0))
    learner = learner_cfg.instantiate(parent=None, param_specs=specs)
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *map(packed_batch, range(2)))
    step = make_train_step(
        model,
        learner,
        num_microbatches=num_microbatches,
        pipeline=pipeline,
        train_dtype=train_dtype,
    )
    num = int(np.prod(list((axes or {}).values())))
    mesh = create_device_mesh(
        mesh_shape_from_axes(**(axes or {})), MESH_AXIS_NAMES, jax.devices()[:num]
    )
    with jax.set_mesh(mesh), sharding.sharding_rules(sharding.PIPELINE_RULES):
        shardings = state_lib.state_shardings(state_lib.state_specs(model, learner), learner, mesh)
        state = state_lib.init_state(model, learner, 0, shardings)
        if traced:
            return jax.eval_shape(step, state, batch)
        before = jax.device_get(state.model)
        after, metrics = jax.jit(step, out_shardings=(shardings, None))(state, batch)
    return before, jax.device_get(after.model), unpack(metrics)


def check(cfg, axes, pipeline, num_microbatches: int) -> None:
    before, want, metrics = step_of(cfg, num_microbatches=num_microbatches)
    _, got, found = step_of(cfg, axes, pipeline, num_microbatches=num_microbatches)
    assert found == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    for (path, a), b, start in zip(
        tree.flatten_items(want), jax.tree.leaves(got), jax.tree.leaves(before), strict=True
    ):
        floor = 1e-5 * max(float(np.abs(a - start).max()), 1e-2)
        np.testing.assert_allclose(b, a, rtol=0, atol=floor, err_msg=path)


CASES = [
    (Schedule.GPIPE, {"pipeline": 4, "model": 2}, 5),
    (Schedule.ONE_F_ONE_B, {"pipeline": 2, "data": 2, "fsdp": 2}, 2),
    (Schedule.INTERLEAVED, {"pipeline": 2, "data": 2, "expert": 2}, 4),
    (Schedule.ZB_H1, {"pipeline": 4, "expert": 2}, 8),
    (Schedule.ZB_V, {"pipeline": 2, "expert": 2, "seq": 2}, 6),  # 6 blocks over 4 stages.
    (Schedule.DUALPIPE_V, {"pipeline": 2, "expert": 2, "fsdp": 2}, 3),  # One stage has none.
    (Schedule.DUALPIPE_V, {"pipeline": 1, "expert": 2, "data": 2}, 3),  # Pairs alone.
    (Schedule.ONE_F_ONE_B, {"pipeline": 4, "fsdp": 2}, 4),
    (Schedule.INTERLEAVED, {"pipeline": 4, "expert": 2}, 8),
    (Schedule.ZB_V, {"pipeline": 4, "seq": 2}, 8),
    (Schedule.DUALPIPE_V, {"pipeline": 4, "model": 2}, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "axes", "num_blocks"), CASES)
def test_a_step_equals_one_without_a_pipeline(schedule, axes, num_blocks):
    num_ranks = axes["pipeline"]
    num = max(4, 2 * num_ranks) if schedule is Schedule.DUALPIPE_V else 4
    pipeline = PipelineConfig(schedule, num_ranks, uniform=True)
    check(moe_model(num_blocks), axes, pipeline, num_microbatches=num)


# The program that accelerators run, on meshes for which XLA puts no permute in a branch.
# `tests/planning/test_pipeline_memory.py` compiles one with permutes for a TPU.
BRANCHES = [
    (Schedule.GPIPE, {"pipeline": 2, "expert": 2}, 4),
    (Schedule.ONE_F_ONE_B, {"pipeline": 4, "expert": 2}, 4),
    (Schedule.INTERLEAVED, {"pipeline": 2, "expert": 2, "data": 2}, 4),
    (Schedule.ZB_H1, {"pipeline": 2, "model": 2}, 4),
    (Schedule.ZB_V, {"pipeline": 2, "expert": 2, "fsdp": 2}, 6),
    (Schedule.DUALPIPE_V, {"pipeline": 2, "expert": 2}, 4),
    (Schedule.DUALPIPE_V, {"pipeline": 2, "expert": 2, "fsdp": 2}, 3),  # One stage has none.
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "axes", "num_blocks"), BRANCHES)
def test_the_program_of_accelerators_equals_a_step_without_one(schedule, axes, num_blocks):
    num_ranks = axes["pipeline"]
    check(moe_model(num_blocks), axes, PipelineConfig(schedule, num_ranks), num_microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "axes", "num_blocks"),
    [
        (Schedule.ONE_F_ONE_B, {"pipeline": 2, "fsdp": 2}, 2),
        (Schedule.DUALPIPE_V, {"pipeline": 2, "expert": 2}, 4),  # Rank 0 has both ends.
    ],
)
def test_multi_token_prediction_after_the_last_stage(schedule, axes, num_blocks):
    cfg = moe_model(num_blocks)
    module = MultiTokenModule.default_config().set(
        layer=cfg.decoder.block[0], remat=config_for_function(remat)
    )
    cfg.multi_token_prediction = MultiTokenPrediction.default_config().set(module=module)
    check(cfg, axes, PipelineConfig(schedule, 2, uniform=True), num_microbatches=4)


@pytest.mark.slow
def test_weights_quantized_before_the_pipeline():
    cfg = moe_model(4).set(quantization=Quantization.FP8_BLOCK)
    axes = {"pipeline": 2, "fsdp": 2}
    check(cfg, axes, PipelineConfig(Schedule.ZB_H1, 2, uniform=True), num_microbatches=4)


def test_dense_layers_in_a_pipeline(monkeypatch):
    cfg = model_config(stacked(transformer_layer(), num_layers=2))
    saved = []
    record = lambda *args: saved.append(split_passes(*args)) or saved[-1]
    monkeypatch.setattr(engine, "split_passes", record)
    axes, pipeline = {"pipeline": 2}, PipelineConfig(Schedule.ONE_F_ONE_B, 2)
    step_of(cfg, axes, pipeline, num_microbatches=2, traced=True)
    cfg.decoder.remat = config_for_function(remat)
    check(cfg, axes, pipeline, num_microbatches=2)
    sizes = [sum(x.size for x in passes.saved) for passes in saved]
    assert sizes[-1] < sizes[0] / 5  # The inputs of blocks, which are recomputed.


def test_a_schedule_that_keeps_much_more_than_1f1b_is_reported(caplog):
    cfg = model_config(stacked(transformer_layer(), num_layers=4))

    def warnings(schedule):
        caplog.clear()
        pipeline = PipelineConfig(schedule, 2)
        step_of(cfg, {"pipeline": 2}, pipeline, num_microbatches=4, traced=True)
        return [r.args[:2] for r in caplog.records if r.name == engine.__name__]

    assert not warnings(Schedule.DUALPIPE_V)
    cfg.decoder.remat = config_for_function(remat)
    ((name, times),) = warnings(Schedule.DUALPIPE_V)
    assert name == "DUALPIPE_V"
    assert times > 1.5
    assert not warnings(Schedule.ONE_F_ONE_B)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.DUALPIPE_V])
def test_a_step_in_bfloat16_is_as_exact_as_one_without_a_pipeline(schedule):
    cfg, M = moe_model(4, first_experts=False), 4  # A token that is sent elsewhere changes more.
    before, exact, _ = step_of(cfg, num_microbatches=M)
    options = {"num_microbatches": M, "train_dtype": "bfloat16"}
    _, plain, metrics = step_of(cfg, **options)
    pipeline = PipelineConfig(schedule, 2, uniform=True)
    _, got, found = step_of(cfg, {"pipeline": 2, "fsdp": 2}, pipeline, **options)
    assert found["loss"] == pytest.approx(metrics["loss"], rel=1e-3)
    norm = lambda x: float(np.linalg.norm(x))
    for (path, want), *others in zip(
        tree.flatten_items(exact), *map(jax.tree.leaves, (plain, got, before)), strict=True
    ):
        of_plain, of_pipeline, start = (norm(x - want) for x in others)
        assert of_pipeline <= 1.5 * of_plain + 0.003 * start, (path, of_pipeline, of_plain, start)


class _LoudEmbedding(Embedding):
    """Gives outputs in each call: before the blocks and, in further predictions, after them."""

    def forward(self, ids):
        x = super().forward(ids)
        self.add_summary("size", jnp.mean(jnp.abs(x).astype(jnp.float32)))
        self.add_aux_loss("size", jnp.mean(jnp.square(x).astype(jnp.float32)), weight=0.1)
        return x


@pytest.mark.slow
def test_outputs_of_a_module_before_and_after_the_blocks_are_all_kept():
    cfg = model_config(stacked(transformer_layer(), num_layers=2))
    cfg.embedding = _LoudEmbedding.default_config()
    cfg.multi_token_prediction = MultiTokenPrediction.default_config().set(
        module=MultiTokenModule.default_config().set(layer=transformer_layer())
    )
    pipeline = PipelineConfig(Schedule.ONE_F_ONE_B, 2, uniform=True)
    check(cfg, {"pipeline": 2}, pipeline, num_microbatches=2)


class _Scaled(CausalLM):
    """Gives its layers an array of floats."""

    def before(self, batch):
        x = self.embedding(batch["input_ids"])
        return x, {"positions": batch["positions"], "scale": jnp.ones(x.shape[:1])}


class _ConstantNorm(RMSNorm):
    """Does not train its scale."""

    def _scaled(self, x, name="scale"):
        return jax.lax.stop_gradient(super()._scaled(x, name))


@pytest.mark.slow
def test_parameters_without_a_gradient_are_named_in_a_pipeline_too(tmp_path, caplog):
    cfg = trainer_config(tmp_path, max_step=1, evaler=False)
    layer = transformer_layer()
    layer.norm = _ConstantNorm.default_config()
    cfg.set(
        model=model_config(stacked(layer, num_layers=2)),
        mesh_shape=mesh_shape_from_axes(pipeline=2, data=4),
        num_microbatches=2,
        pipeline_schedule=Schedule.ONE_F_ONE_B,
    )
    cfg.instantiate(parent=None).compile_train_step()
    (record,) = [r for r in caplog.records if r.name == "moelib.train.no_gradient"]
    norms = (f"decoder/repeated0/{name}_norm/scale" for name in ("attention", "feed_forward"))
    assert record.args[2] == ", ".join(norms)


@pytest.mark.slow
def test_a_run_goes_on_with_another_schedule_and_without_a_pipeline(tmp_path):
    def run(folder, max_step, schedule=None, **axes):
        cfg = trainer_config(tmp_path / folder, max_step=max_step, save_every=2, evaler=False)
        cfg.set(
            model=model_config(stacked(transformer_layer(), num_layers=4)),
            mesh_shape=mesh_shape_from_axes(**axes),
            num_microbatches=4,
            pipeline_schedule=schedule,
        )
        cfg.input.global_batch_size = 32
        return fit(cfg).metrics["loss"]

    whole = run("whole", 6, data=8)
    run("parts", 2, Schedule.ONE_F_ONE_B, pipeline=4, data=2)
    run("parts", 4, Schedule.DUALPIPE_V, pipeline=2, fsdp=2, data=2)
    assert run("parts", 6, data=8) == pytest.approx(whole, rel=1e-5)


def test_the_fields_of_the_page_are_those_of_a_config(tmp_path):
    cfg = trainer_config(tmp_path)
    # --8<-- [start:pipeline]
    cfg.mesh_shape = mesh_shape_from_axes(pipeline=4, fsdp=-1)
    cfg.pipeline_schedule = Schedule.DUALPIPE_V
    cfg.num_microbatches = 16
    # --8<-- [end:pipeline]
    assert cfg.pipeline_schedule.stage(4, 0, 1) == 7  # The last stage.


def test_too_few_microbatches_are_refused(tmp_path):
    cfg = trainer_config(tmp_path, evaler=False, mesh_shape=mesh_shape_from_axes(pipeline=8))
    cfg.set(model=model_config(stacked(transformer_layer(), num_layers=16)), num_microbatches=8)
    with pytest.raises(UserError, match="num_microbatches=8: schedule 'dualpipe-v' requires"):
        fit(cfg.set(pipeline_schedule=Schedule.DUALPIPE_V))
    with pytest.raises(
        UserError, match="mesh axis pipeline=8: no sharding rule uses it; set pipeline_schedule, or"
    ):
        fit(cfg.set(pipeline_schedule=None))


def test_models_that_cannot_be_cut_are_refused():
    loop = model_config(stacked(transformer_layer(), stack=LoopStack, num_layers=2))
    with pytest.raises(UserError, match="has no stack of repeated layers; make its decoder a Scan"):
        stack_of(loop.instantiate(parent=None))
    loss = LoadBalanceLoss.default_config().set(weight=0.3, scope=BalanceScope.ALL_LAYERS)
    layer = transformer_layer(moe(load_balance_loss=loss))
    cfg = model_config(stacked(layer, num_layers=2))
    with pytest.raises(UserError, match="ALL_LAYERS, but the layers of a pipeline") as error:
        stack_of(cfg.instantiate(parent=None))
    config_text.set_from_text(cfg, f"{str(error.value).split()[0]}=SEQUENCE")
    stack_of(cfg.instantiate(parent=None))


class TwiceLM(CausalLM):
    """A model that runs its decoder twice."""

    def forward(self, batch):  # pyrefly: ignore[bad-override]
        x, side_inputs = self.before(batch)
        return self.after(self.decoder(self.decoder(x, **side_inputs), **side_inputs), batch)


class SharedNorm(BaseLayer):
    """A layer that uses the model's norm."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = 16

    def forward(self, x, **side_inputs):
        del side_inputs
        model = self.parent
        while not isinstance(model, CausalLM):
            model = model.parent
        return model.output_norm(x)


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (_Scaled, transformer_layer(), "decoder gets 'scale', an array of floats"),
        (TwiceLM, transformer_layer(), "TwiceLM overrides forward"),
        (CausalLM, SharedNorm.default_config(), "output_norm is not inside decoder"),
    ],
)
def test_models_that_stages_cannot_compute_are_refused(model, layer, message):
    cfg = model_config(stacked(layer, num_layers=2))
    fields = {name: value for name, value in cfg.items() if name != "klass"}
    cfg = model.default_config().set(**fields)
    pipeline = PipelineConfig(Schedule.GPIPE, 2, uniform=True)
    with pytest.raises(UserError, match=message):
        step_of(cfg, {"pipeline": 2}, pipeline, num_microbatches=2, traced=True)


def test_stages_without_blocks_are_reported(caplog):
    model = model_config(stacked(transformer_layer(), num_layers=4)).instantiate(parent=None)
    warn_empty_stages(model, PipelineConfig(Schedule.ZB_V, 2))
    assert not caplog.records
    warn_empty_stages(model, PipelineConfig(Schedule.ZB_V, 4))
    wanted = "ZB_V, which has 8 stages on 4 ranks, but the model has 4 repeated blocks: 4 stages"
    assert wanted in caplog.text


def test_larger_stages_are_in_the_middle():
    assert stage_sizes(26, 4) == (6, 7, 7, 6)
    assert stage_sizes(8, 4) == (2, 2, 2, 2)
    assert stage_sizes(5, 4) == (1, 2, 1, 1)
