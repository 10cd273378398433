"""The how-to "a model of another library": quoted in the docs, and trained here."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.metrics import weighted
from moelib.layers.transformer import LoopStack
from moelib.models.external import ExternalModel
from moelib.parallel.mesh import mesh_shape_from_axes
from tests import tiny
from tests.inference.models import decoder, layer
from tests.layers.test_external import equinox_mlp, external, gated, nnx_mlp


# --8<-- [start:model]
class Reader(linen.Module):
    """A language model in Flax linen: one layer of attention."""

    vocab_size: int
    dim: int = 16

    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(self.vocab_size, self.dim)(ids)
        mask = linen.make_causal_mask(ids)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x), mask=mask)
        return linen.Dense(self.vocab_size)(linen.LayerNorm()(x))


def reader(vocab_size):
    """Returns how its parameters are made, and how its loss comes from a batch."""
    module = Reader(vocab_size)

    def init(key):
        return module.init(key, jnp.zeros((1, 2), jnp.int32))["params"]

    def apply(params, batch):
        logits = module.apply({"params": params}, batch["input_ids"])
        counted = batch["target_labels"] >= 0
        labels = jnp.where(counted, batch["target_labels"], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        num_tokens = jnp.sum(counted)
        loss = weighted(jnp.sum(losses * counted) / jnp.maximum(num_tokens, 1), num_tokens)
        return loss, {"cross_entropy": loss}

    return init, apply


# --8<-- [end:model]


def trainer_config(directory, *, whole=True, **fields):
    cfg = tiny.trainer_config(directory, evaler=whole, **fields)
    if whole:
        # --8<-- [start:train]
        model = ExternalModel.default_config().set(functions=config_for_function(reader))
        model.functions.vocab_size = 32
        model.axes = [
            ("Embed_0/embedding", ("vocab", "embed")),
            ("Dense_0/kernel", ("embed", "vocab")),
        ]
        cfg.model = model
        # --8<-- [end:train]
        return cfg
    functions = (gated, nnx_mlp, equinox_mlp)
    parts = [external(each, hidden_dim=8) for each in functions]
    stack = decoder(*(layer(part) for part in parts), kind=LoopStack)
    return cfg.set(model=tiny.model_config(stack))


def run(cfg, num_devices=1):
    """Returns the trainer after its run."""
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:num_devices])
    trainer.run()
    return trainer


def parameters(trainer):
    return dict(tree.flatten_items(jax.device_get(trainer.trainer_state.model)))


def test_a_model_of_flax_trains_and_resumes_bit_for_bit(tmp_path):
    unbroken = run(trainer_config(tmp_path / "a"))
    losses = tiny.losses(tmp_path / "a")
    assert losses[8] < losses[1]
    assert sorted(os.listdir(tmp_path / "a" / "summaries")) == ["train", "val"]
    run(trainer_config(tmp_path / "b", max_step=4))
    resumed = parameters(run(trainer_config(tmp_path / "b")))
    assert "MultiHeadDotProductAttention_0/query/kernel" in resumed
    for name, value in parameters(unbroken).items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_mesh_trains_them_as_one_device_does(tmp_path, whole):
    run(trainer_config(tmp_path / "one", whole=whole))
    mesh = mesh_shape_from_axes(data=2, fsdp=4)
    trainer = run(trainer_config(tmp_path / "eight", whole=whole, mesh_shape=mesh), 8)
    want, got = tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "eight")
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-5)
    assert want[8] < want[1]
    if whole:
        embedding = trainer.trainer_state.model["Embed_0"]["embedding"]
        assert embedding.sharding.shard_shape(embedding.shape) == (32, 4)
