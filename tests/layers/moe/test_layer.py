"""The MoE layer: against a loop over tokens, with padding, on meshes, in bfloat16."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.layers.activation import Activation
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.dispatch import DenseDispatcher, SortedDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.parallel.sharding import named_shardings, sharding_rules
from tests import tiny
from tests.layers.calling import build, call, call_and_collect, float64, initial, normal
from tests.oracles.losses import load_balance, router_z
from tests.oracles.moe import routed, sigmoid, softmax, swiglu

B, S, D, F, E, K = 8, 6, 8, 8, 4, 2
X = normal(B, S, D)
MASK = np.arange(S) < S - np.arange(B)[:, None] % 4  # 0 to 3 tokens of padding.


def layer(**fields):
    cfg = MoELayer.default_config().set(
        input_dim=D,
        hidden_dim=F,
        num_experts=E,
        num_experts_per_token=K,
        shared_experts=FeedForward.default_config().set(hidden_dim=12),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.5),
        router_z_loss=RouterZLoss.default_config().set(weight=0.25),
    )
    return build(cfg, **fields)


class OddRouter(Router):
    """A router that returns what no layer can use."""

    @config_class
    class Config(Router.Config):
        field: str = ""

    def forward(self, x, mask) -> Any:
        found, field = super().forward(x, mask), self.config.field
        return found._replace(**{field: getattr(found, field)[..., :1]}) if field else (*found,)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("", "router returned tuple; return a Routing"),
        ("weights", r"router returned weights=float32\[8, 6, 1\]; return the shape \[8, 6, 2\]"),
        ("expert_ids", r"router returned weights=float32\[8, 6, 2\]; return the shape \[8, 6, 1\]"),
        ("mask", r"router returned mask=bool\[8, 1\]; return the shape \[8, 6\]"),
    ],
)
def test_a_routing_of_another_shape_names_the_router(field, message):
    made = layer(router=OddRouter.default_config().set(field=field))
    with pytest.raises(UserError, match=message):
        call(made, initial(made), X, MASK)


LAYER = layer()
PARAMS = initial(LAYER)


def objective(made, params, x, mask):
    y, outputs = call_and_collect(made, params, x, mask)
    y = jnp.where(mask[..., None], y, 0.0).astype(jnp.float32)
    return jnp.mean(jnp.square(y)) + outputs.total_aux_loss(), (y, outputs)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(made, params, x, mask):
    run = functools.partial(objective, made)
    return jax.value_and_grad(run, (0, 1), has_aux=True)(params, x, mask)


def by_hand(params, mask=MASK):
    """Returns (ids and weights of the assignments [B, S, K], output [B, S, D]) in float64."""
    p, x = float64(params), X.astype(np.float64)
    probs = softmax(x @ p["router"]["weight"])
    ids = np.argsort(-probs, -1)[..., :K]
    weights = np.take_along_axis(probs, ids, -1) * mask[..., None]
    inputs = x @ p["latent_down"]["weight"] if "latent_down" in p else x
    rows = (a.reshape(B * S, -1) for a in (inputs, ids, weights))
    y = routed(p["experts"], *rows).reshape(inputs.shape)
    y = y @ p["latent_up"]["weight"] if "latent_up" in p else y
    return ids, weights, y + swiglu(x, p["shared_experts"]["up"], p["shared_experts"]["down"])


@pytest.mark.parametrize("mask", [MASK, None], ids=["padded", "no mask"])
def test_a_token_gets_its_experts_by_their_weights_and_the_shared_one(mask):
    *_, want = by_hand(PARAMS, np.ones((B, S)) if mask is None else mask)
    got = call(LAYER, PARAMS, X, mask)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scope", "score"),
    [
        pytest.param(BalanceScope.MICRO_BATCH, Score.SOFTMAX_BEFORE_TOP_K, marks=pytest.mark.slow),
        (BalanceScope.SEQUENCE, Score.SOFTMAX_AFTER_TOP_K),
        pytest.param(BalanceScope.SEQUENCE, Score.SIGMOID, marks=pytest.mark.slow),
    ],
)
def test_dispatchers_agree_in_every_gradient_with_padding_and_losses(scope, score):
    loss = LoadBalanceLoss.default_config().set(weight=0.5, scope=scope)
    fields = {"load_balance_loss": loss, "router": Router.default_config().set(score=score)}
    dense = layer(dispatcher=DenseDispatcher.default_config(), **fields)
    got = value_and_grads(layer(**fields), PARAMS, X, MASK)
    want = value_and_grads(dense, PARAMS, X, MASK)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_values_of_padding_change_no_output_loss_metric_or_gradient():
    other = np.where(MASK[..., None], X, np.float32(7))
    got = value_and_grads(LAYER, PARAMS, other, MASK)
    want = value_and_grads(LAYER, PARAMS, X, MASK)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), got, want)


def test_auxiliary_losses_carry_their_weights_and_the_number_of_valid_tokens():
    losses = call_and_collect(LAYER, PARAMS, X, MASK)[1].aux_losses
    weights = {name: float(loss.weight) for name, loss in losses.items()}
    assert weights == {"load_balance_loss": 0.5, "router_z_loss": 0.25}
    assert all(float(loss.num_tokens) == MASK.sum() for loss in losses.values())


def test_auxiliary_losses_are_those_of_all_assignments_of_the_global_batch():
    balance = LoadBalanceLoss.default_config().set(weight=0.5, scope=BalanceScope.GLOBAL_BATCH)
    made = layer(load_balance_loss=balance)
    params, earlier = initial(made), np.array([9.0, 0.0, 4.0, 1.0], np.float32)
    params["load_counter"] = {"counts": earlier}  # Of the micro-batches before.
    logits = X[MASK] @ np.float64(params["router"]["weight"])  # [T, E]
    best = np.argsort(-logits, -1)[:, :K]
    losses = call_and_collect(made, params, X, MASK)[1].aux_losses
    want = load_balance(softmax(logits), best, earlier)
    assert float(losses["load_balance_loss"].value) == pytest.approx(want, rel=1e-5)
    assert float(losses["router_z_loss"].value) == pytest.approx(router_z(logits), rel=1e-5)


def test_counts_of_each_expert_are_reported_on_request():
    made = layer(report_expert_counts=True)
    _, outputs = call_and_collect(made, PARAMS, X, MASK)
    counts = outputs.summaries["expert_counts"].mean
    assert counts.shape == (E,)
    assert float(np.sum(counts)) == K * MASK.sum()
    _, outputs = call_and_collect(LAYER, PARAMS, X, MASK)
    assert "expert_counts" not in outputs.summaries


def test_bfloat16_tokens_are_routed_and_weighed_in_float32():
    x = X.astype(jnp.bfloat16)
    y, outputs = call_and_collect(LAYER, PARAMS, x, MASK)
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(outputs))
    want_y, want = call_and_collect(LAYER, PARAMS, x.astype(np.float32), MASK)
    jax.tree.map(np.testing.assert_array_equal, outputs, want)  # Losses and metrics bit for bit.
    np.testing.assert_allclose(y.astype(jnp.float32), want_y, atol=0.02, rtol=2**-7)


GPT_OSS = {
    "router": Router.default_config().set(score=Score.SOFTMAX_AFTER_TOP_K, bias=True),
    "experts": FeedForwardExperts.default_config().set(
        activation=Activation.CLAMPED_SWIGLU, bias=True
    ),
}
BALANCED = Router.default_config().set(bias_balancing=BiasBalancing.default_config())


def random_parameters(made):
    """Returns parameters of which none is zero."""
    return jax.tree.map(lambda x: normal(*x.shape, seed=x.size), initial(made))


def test_gpt_oss_experts_have_biases_and_its_router_too():
    made = layer(**GPT_OSS, shared_experts=None)
    params = random_parameters(made)
    p, x = float64(params), X.astype(np.float64)
    experts, want = p["experts"], np.zeros_like(x)
    for b, s in zip(*np.nonzero(MASK), strict=True):
        logits = x[b, s] @ p["router"]["weight"] + p["router"]["bias"]
        best = np.argsort(-logits)[:K]
        for e, weight in zip(best, softmax(logits[best]), strict=True):
            gate, up = np.einsum("d,ndf->nf", x[b, s], experts["up"][e]) + experts["up_bias"][e]
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            want[b, s] += weight * (hidden @ experts["down"][e] + experts["down_bias"][e])
    got = call(made, params, X, MASK)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_shared_experts_may_have_a_gate():
    made = layer(shared_gate=True)
    params = initial(made)
    p, x = float64(params), X.astype(np.float64)
    gate = sigmoid(x @ p["shared_gate"])
    shared = swiglu(x, p["shared_experts"]["up"], p["shared_experts"]["down"])
    got = call(made, params, X, MASK)
    routed = call(layer(shared_experts=None), params, X, MASK)
    np.testing.assert_allclose(got - routed, gate * shared, rtol=1e-5, atol=1e-5)
    assert np.ptp(gate) > 0.5
    assert made.active_parameters() == LAYER.active_parameters() + D
    assert made.forward_flops_per_token(S) == LAYER.forward_flops_per_token(S) + 2 * D
    half = call(made, params, X.astype(jnp.bfloat16), MASK)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), got, atol=0.05)


def test_latent_experts_take_projections_of_the_tokens_and_shared_ones_the_tokens():
    made = layer(latent_dim=5)
    params = initial(made)
    _, _, want = by_hand(params)
    np.testing.assert_allclose(call(made, params, X, MASK), want, rtol=1e-5, atol=1e-5)
    fewer = 3 * K * F * (D - 5) - 2 * D * 5  # Of experts, less the projections.
    assert made.active_parameters() == LAYER.active_parameters() - fewer
    assert made.forward_flops_per_token(S) == LAYER.forward_flops_per_token(S) - 2 * fewer


MESH = {"fsdp": 2, "seq": 2, "model": 2}
SPLIT = {"expert": 2, "fsdp": 2, "model": 2}


@pytest.mark.slow  # The layer is in the model that every run computes on a mesh.
@pytest.mark.parametrize(
    ("axes", "dispatcher", "fields", "rules"),
    [
        (MESH, SortedDispatcher, {"router": BALANCED, "shared_gate": True}, {}),
        (MESH, SortedDispatcher, GPT_OSS, {}),
        (SPLIT, RaggedDispatcher, {"latent_dim": 4}, {}),
        # Weights may be split over an axis that splits no tokens.
        (SPLIT, RaggedDispatcher, GPT_OSS, {"expert_embed": ("fsdp", "model"), "expert_ffn": ()}),
        (SPLIT, RaggedDispatcher, GPT_OSS, {"expert_embed": ("model",), "expert_ffn": ()}),
        (SPLIT, SortedDispatcher, GPT_OSS, {"experts": ("expert", "model"), "expert_ffn": ()}),
    ],
)
def test_a_mesh_gives_the_values_of_one_device(axes, dispatcher, fields, rules):
    made = layer(dispatcher=dispatcher.default_config(), **fields)
    params = random_parameters(made) if fields is GPT_OSS else initial(made)
    want = value_and_grads(made, params, X, MASK)
    mesh = tiny.mesh(**axes)
    with jax.set_mesh(mesh), sharding_rules(rules):
        shardings = named_shardings(made.create_parameter_specs_recursively(), mesh)
        placed = jax.device_put(params, shardings)
        assert not placed["experts"]["up"].sharding.is_fully_replicated
        got = value_and_grads(made, placed, X, MASK)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    ("num_rows", "axes", "rules", "named"),
    [
        (4, {"data": 8}, {}, "'batch'.*size 4.*8"),
        (
            B,
            {"model": 2, "fsdp": 2, "expert": 2},
            {"expert_ffn": ("expert", "model"), "experts": ()},
            "axis 'expert'.*'batch'.*'expert_ffn'",
        ),
        (
            B,
            {"model": 2, "fsdp": 2, "seq": 2},
            {"expert_ffn": ("seq", "model")},
            "axis 'seq'.*'sequence'.*'expert_ffn'",
        ),
    ],
)
def test_axes_that_cannot_split_tokens_are_refused(num_rows, axes, rules, named):
    mesh = jax.set_mesh(tiny.mesh(**axes))
    with mesh, sharding_rules(rules), pytest.raises(ValueError, match=named):
        jax.eval_shape(functools.partial(call, LAYER), PARAMS, X[:num_rows], MASK[:num_rows])


def test_active_parameters_and_flops_are_counted_by_hand():
    matrices = 3 * D * (K * F + 12)
    assert LAYER.active_parameters() == matrices + D * E
    assert LAYER.forward_flops_per_token(S) == 2 * (matrices + D * E)


class Halves(BaseLayer):
    """Local experts that return their assignments' weights times x / 2."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = D
        num_experts: int = E
        num_experts_per_token: int = K

    def forward(self, x, routing):
        weights = jnp.where(routing.expert_ids >= self.config.num_experts, routing.weights, 0.0)
        return jnp.sum(weights, -1, keepdims=True) * x / 2


class Widened(Router):
    """A router with two experts more than the layer has parameters for."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg.clone(num_experts=cfg.num_experts + 2), parent=parent)


@pytest.mark.parametrize("axes", [{}, {"expert": 4, "fsdp": 2}], ids=str)
def test_local_experts_take_the_ids_after_those_of_experts_on_every_mesh(axes):
    router, local = Widened.default_config(), Halves.default_config()
    made = layer(router=router, local_experts=local, load_balance_loss=None)
    params = initial(made)
    with jax.set_mesh(tiny.mesh(**axes)) if axes else contextlib.nullcontext():
        got = np.asarray(call(made, params, X, MASK))
    ids, weights, want = by_hand(params)
    want += np.sum(weights * (ids >= E), -1, keepdims=True) * X / 2
    np.testing.assert_allclose(got[MASK], want[MASK], rtol=1e-5, atol=1e-5)
