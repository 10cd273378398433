"""Weights are quantized once per optimizer step, whatever the number of micro-batches."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core import jaxpr
from moelib.core.param import is_spec
from moelib.layers.feed_forward import FeedForward
from moelib.layers.quantization import Quantization
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train.pipeline import PipelineConfig
from moelib.train.step import make_train_step
from tests import tiny

NUM_WEIGHTS = 7  # Of a layer: q, kv, output; up and down of experts and of shared experts.


@pytest.mark.parametrize("schedule", [None, pytest.param(Schedule.ZB_H1, marks=pytest.mark.slow)])
def test_each_weight_is_quantized_once_per_step_of_four_micro_batches(schedule, tmp_path):
    shared = FeedForward.default_config().set(hidden_dim=40)
    model = tiny.model_config(tiny.decoder(hidden_dim=24, shared_experts=shared))
    model.quantization = Quantization.FP8_BLOCK
    cfg = tiny.trainer_config(tmp_path, model=model, evaler=False)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    batch = tiny.packed_batch()
    step = make_train_step(
        trainer.model,
        trainer.learner,
        train_dtype="bfloat16",
        num_microbatches=4,
        pipeline=None if schedule is None else PipelineConfig(schedule, 2),
    )
    state = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        trainer.trainer_state_specs,
        is_leaf=is_spec,
    )
    with jax.set_mesh(tiny.mesh(pipeline=1 if schedule is None else 2)):
        program = jax.make_jaxpr(step)(state, batch)
    casts = [
        site
        for site in jaxpr.walk(program)
        if site.eqn.primitive.name == "convert_element_type"
        and site.eqn.params["new_dtype"] == jnp.float8_e4m3fn
    ]
    once = [site for site in casts if site.executions == 1]
    assert len(once) == NUM_WEIGHTS  # Stacked over the layers.
    # Of blocks of 128 x 128, each micro-batch casts those of activations alone.
    tiles = [site.eqn.outvars[0].aval.shape for site in casts if site.executions > 1]
    tiles = [shape for shape in tiles if (shape[-3], shape[-1]) == (128, 128)]
    assert tiles
    assert all(len(shape) == 5 and shape[0] == tiny.ROWS // 4 for shape in tiles)
