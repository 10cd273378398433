"""Weights are quantized once per optimizer step, whatever the number of micro-batches."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core import jaxpr
from moelib.core.param import is_spec, specs_by_path
from moelib.layers.feed_forward import FeedForward
from moelib.layers.quantization import Quantization
from moelib.train.step import make_train_step
from tests import tiny

NUM_WEIGHTS = 7  # Of a layer: q, kv, output; up and down of experts and of shared experts.


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_each_weight_is_quantized_once_per_step_of_four_micro_batches(tmp_path, dtype):
    shared = FeedForward.default_config().set(hidden_dim=40)
    model = tiny.model_config(tiny.decoder(hidden_dim=24, shared_experts=shared))
    model.quantization = Quantization.FP8_BLOCK
    cfg = tiny.trainer_config(tmp_path, model=model, evaler=False)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    batch = tiny.packed_batch()
    B, S = (x // n for x, n in zip(batch["input_ids"].shape, (4, 1), strict=True))
    step = make_train_step(trainer.model, trainer.learner, train_dtype=dtype, num_microbatches=4)
    state = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        trainer.trainer_state_specs,
        is_leaf=is_spec,
    )
    program = jax.make_jaxpr(step)(state, batch)
    specs = specs_by_path(trainer.model.create_parameter_specs_recursively()).values()
    casts = [
        site
        for site in jaxpr.walk(program)
        if site.eqn.primitive.name == "convert_element_type"
        and site.eqn.params["new_dtype"] == jnp.float8_e4m3fn
    ]
    once = [site for site in casts if site.executions == 1]
    assert len(once) == NUM_WEIGHTS  # Stacked over the layers.
    weights = sum(s.size for s in specs if s.quantization)
    assert sum(site.eqn.outvars[0].aval.size for site in once) == weights
    # All others, in each micro-batch, are of activations.
    for site in casts:
        if site.executions > 1:
            assert site.eqn.outvars[0].aval.shape[0] in (B, B * S * 2)
