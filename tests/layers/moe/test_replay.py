"""Replayed experts: tokens go where they are told, with the weights of the router's own rule."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.moe.recording import RECORDING, ROUTING
from moelib.layers.moe.replay import moe_layers
from moelib.layers.moe.router import REPLAYED, Router, Score
from moelib.layers.remat import remat
from moelib.layers.transformer import LoopStack, ScanStack
from tests import tiny
from tests.layers.calling import build, call_and_collect, initial, normal

B, S, D, E, K = 2, 6, 8, 5, 2
X, MASK = normal(B, S, D), np.arange(S) < [[S], [4]]
IDS = np.stack([np.random.default_rng(i).permutation(E)[:K] for i in range(B * S)]).reshape(B, S, K)


@pytest.mark.parametrize("score", Score)
def test_weights_are_those_of_the_given_experts_by_the_full_logits(score):
    layer = build(
        Router.default_config(),
        input_dim=D,
        num_experts=E,
        num_experts_per_token=K,
        score=score,
        renormalize=True,
    )
    params, factors = initial(layer), normal(B, S, K, seed=1) * MASK[..., None]

    def got(weight):
        state = {"weight": weight, REPLAYED: IDS}
        found, outputs = call_and_collect(layer, state, X, MASK)
        return jnp.sum(found.weights * factors), (found, outputs.summaries["replaced"])

    def want(weight):
        logits = jnp.einsum("bsd,de->bse", X, weight, precision="highest")
        if score is Score.SIGMOID:
            scores = jnp.take_along_axis(jax.nn.sigmoid(logits), jnp.asarray(IDS), -1)
        else:  # The softmax over all, or over the K, has the same ratios.
            scores = jax.nn.softmax(jnp.take_along_axis(logits, jnp.asarray(IDS), -1), -1)
        return jnp.sum(scores / jnp.sum(scores, -1, keepdims=True) * factors)

    (value, (found, replaced)), gradient = jax.value_and_grad(got, has_aux=True)(params["weight"])
    expected = jax.value_and_grad(want)(params["weight"])
    np.testing.assert_array_equal(np.asarray(found.expert_ids)[MASK], IDS[MASK])
    tiny.assert_trees_close((value, gradient), expected, 2e-5)
    own = np.argsort(-np.asarray(found.logits), -1)[..., :K]
    other = [len(set(a) - set(b)) / K for a, b in zip(IDS[MASK], own[MASK], strict=True)]
    assert float(replaced.mean) == pytest.approx(np.mean(other), rel=1e-6)
    assert float(replaced.weight) == MASK.sum()


def test_a_token_without_given_experts_goes_to_its_own():
    layer = build(Router.default_config(), input_dim=D, num_experts=E, num_experts_per_token=K)
    params, mask = initial(layer), np.ones((B, S), bool)
    own, _ = call_and_collect(layer, params, X, mask)
    got, outputs = call_and_collect(layer, params | {REPLAYED: np.full_like(IDS, E)}, X, mask)
    tiny.assert_trees_equal(got, own)
    assert float(outputs.summaries["replaced"].weight) == 0


def model_of(stack, **fields):
    """Returns a model of a first layer and two blocks of two layers, and its parameters."""
    first, *block = (tiny.transformer_layer(tiny.moe()) for _ in range(3))
    decoder = tiny.stacked(*block, stack=stack, num_layers=5, first_layers=[first], **fields)
    model = tiny.model_config(decoder).instantiate(parent=None)
    return model, model.initialize_parameters_recursively(jax.random.key(0))


def recorded(model, params, batch):
    """Returns the experts of all layers, in their order, [B, S, L, K]."""
    _, outputs = functional(
        model, None, params, (batch,), is_training=False, inherited={RECORDING: True}
    )
    found = []
    for path, index in moe_layers(model):
        inside = outputs.module_outputs
        for name in path:
            inside = inside[name]
        found.append(inside[ROUTING].expert_ids[index])
    return jnp.stack(found, axis=2)


def given_ids(model, batch):
    layer = next(x for x, _ in model.walk() if hasattr(x.config, "num_experts_per_token"))
    num, top_k = layer.config.num_experts, layer.config.num_experts_per_token
    rng = np.random.default_rng(0)
    shape = *batch["input_ids"].shape, len(moe_layers(model))
    return jnp.asarray(np.argsort(rng.random((*shape, num)), -1)[..., :top_k], jnp.uint8)


@pytest.mark.parametrize("axes", [None, {"expert": 2, "fsdp": 2, "model": 2}])
def test_each_layer_gets_its_experts_and_own_ones_change_nothing(axes):
    model, params = model_of(ScanStack, remat=config_for_function(remat))
    loop, of_loop = model_of(LoopStack)
    batch = tiny.packed_batch()
    tokens = batch["segment_ids"] > 0
    ids = given_ids(model, batch)
    want = tiny.value_and_grad(loop, of_loop, batch | {"expert_ids": ids})

    def run(ids):
        return tiny.value_and_grad(model, params, batch | ids)

    with contextlib.nullcontext() if axes is None else jax.set_mesh(tiny.mesh(**axes)):
        found = jax.jit(lambda: recorded(model, params, batch | {"expert_ids": ids}))()
        np.testing.assert_array_equal(found[tokens], ids[tokens])
        got = run({"expert_ids": ids})
    assert float(got[0][0]) == pytest.approx(float(want[0][0]), rel=1e-5)
    if axes is None:
        (value, _), gradients = run({"expert_ids": recorded(model, params, batch)})
        (plain, _), of_plain = run({})
        tiny.assert_trees_close((value, gradients), (plain, of_plain), 1e-6)
    first = want[1]["decoder"]["layer3"]["feed_forward"]["router"]["weight"]
    got_first = got[1]["decoder"]["repeated0"]["feed_forward"]["router"]["weight"][1]
    np.testing.assert_allclose(got_first, first, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 2), "has 1 MoE layers, but the model 5"), ((5, 1), "1 experts per")]
)
def test_other_numbers_are_refused(shape, message):
    model, params = model_of(ScanStack)
    batch = tiny.packed_batch()
    ids = jnp.zeros((*batch["input_ids"].shape, *shape), jnp.uint8)
    with pytest.raises(UserError, match=message):
        tiny.value_and_grad(model, params, batch | {"expert_ids": ids})
