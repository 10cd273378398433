"""Dispatchers on meshes of eight devices: against the oracle on one, values, gradients, drops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.moe.dispatch import DenseDispatcher, SortedDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher, RingDispatcher
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.parallel.sharding import sharding_rules
from tests.layers.calling import QUICK, build, call, initial, normal

B, S, D, F, E, K = 8, 16, 8, 8, 8, 3
X, GRAD = jnp.asarray(normal(B, S, D)), jnp.asarray(normal(B, S, D, seed=1))
WEIGHTS = jnp.asarray(np.abs(normal(B, S, K, seed=2)))
MASK = np.random.default_rng(3).random((B, S)) < 0.8
DISPATCHERS = {
    "dense": DenseDispatcher.default_config(),
    "sorted": SortedDispatcher.default_config(),
    "ragged": RaggedDispatcher.default_config(),
    "ring": RingDispatcher.default_config(),
    "capacity": CapacityDispatcher.default_config().set(capacity_factor=E / K),
}
MESHES = [
    {"expert": 8},
    {"expert": 2, "fsdp": 2, "data": 2},
    {"expert": 4, "seq": 2},
    {"expert": 2, "model": 2, "seq": 2},
    {"expert": 2, "model": 4},
    {"fsdp": 2, "model": 2, "data": 2},
]


def draw(seed, experts=tuple(range(E)), mask=MASK):
    """Returns (ids, mask) that send each token to K different ones of the experts."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:K] for _ in range(B * S)]).reshape(B, S, K)
    return jnp.asarray(ids.astype(np.int32)), jnp.asarray(mask)


ROUTINGS = {
    "random": draw(0),
    "skewed to one device": draw(1, (0, 1, 2)),
    "no token of some rows": draw(2, mask=MASK & (np.arange(B) % 4 > 0)[:, None]),
    "all padding": draw(3, mask=np.zeros((B, S), bool)),
}


@functools.cache
def layer(name, **fields):
    dispatcher = DISPATCHERS[name].clone(**fields)
    cfg = MoELayer.default_config().set(
        input_dim=D, hidden_dim=F, num_experts=E, num_experts_per_token=K, dispatcher=dispatcher
    )
    return build(cfg)


PARAMS = initial(layer("dense"))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def pulled(made, params, x, weights, ids, mask, grad):
    """Returns ((output, choices dropped), gradients in the experts' weights, x and weights)."""

    def run(experts, x, weights):
        nothing = jnp.zeros((B, S, E))
        routing = Routing(ids, weights, nothing, nothing, mask)
        y, num_dropped = call(made, params, experts, x, routing, method="_routed")
        return y, num_dropped

    y, pull, num_dropped = jax.vjp(run, params["experts"], x, weights, has_aux=True)
    return (y, num_dropped), pull(grad)


def on_mesh(axes, made, routing, x=X, rules=None):
    mesh = create_device_mesh(mesh_shape_from_axes(**axes))
    with jax.set_mesh(mesh), sharding_rules(rules or {}):  # Each has a trace of its own.
        return jax.device_get(pulled(made, PARAMS, x, WEIGHTS, *routing, GRAD))


def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(np.max(np.abs(b)))))


# Those that know nothing of other devices see each mesh as the same.
CASES = [
    *(("ragged", mesh) for mesh in MESHES),
    *((name, mesh) for name in ("ring", "capacity", "sorted") for mesh in (MESHES[0], MESHES[3])),
    *(
        pytest.param(name, mesh, marks=pytest.mark.slow)
        for name in ("ring", "capacity", "sorted", "dense")
        for mesh in (MESHES[1], MESHES[2], MESHES[4], MESHES[5])
    ),
]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_every_mesh_equals_the_oracle_on_one_device(name, mesh, routing):
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, *ROUTINGS[routing], GRAD)
    check(on_mesh(mesh, layer(name), ROUTINGS[routing]), want)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("ragged", ("expert", "model")),
        ("ring", ("seq", "model")),
        *(
            pytest.param(name, experts, marks=pytest.mark.slow)
            for name in ("ragged", "ring", "capacity")
            for experts in (("expert", "model"), ("model",), ("seq", "model"))
        ),
    ],
)
def test_experts_may_be_split_over_other_axes_than_the_batch(name, experts):
    rules = {"experts": experts, "expert_ffn": ()}
    axes, made, routing = {"expert": 2, "model": 2, "seq": 2}, layer(name), ROUTINGS["random"]
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, *routing, GRAD)
    check(on_mesh(axes, made, routing), want)  # So that there is a trace under another table.
    check(on_mesh(axes, made, routing, rules=rules), want)
    lowered = []
    for table in ({}, rules):
        with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(**axes))), sharding_rules(table):
            lowered.append(pulled.lower(made, PARAMS, X, WEIGHTS, *routing, GRAD).as_text())
    assert lowered[0] != lowered[1]


@pytest.mark.parametrize("name", ["sorted", "ragged", "ring", "capacity"])
def test_a_choice_of_no_expert_counts_nowhere(name):
    ids, mask = ROUTINGS["random"]
    ids = ids.at[0, 3, 1].set(-1).at[1, 2, 0].set(E)  # One of a token's.
    ids = ids.at[2, :2].set(-1).at[2, 2:4].set(E)  # All of four tokens'.
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, ids, mask, GRAD)
    assert not np.any(want[0][0][2, :4])
    check(pulled(layer(name), PARAMS, X, WEIGHTS, ids, mask, GRAD), want)
    check(on_mesh({"expert": 4, "fsdp": 2}, layer(name), (ids, mask)), want)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"expert": 4, "fsdp": 2}], ids=str)
def test_ragged_and_ring_drop_the_same(mesh):
    made = [
        on_mesh(mesh, layer(name, buffer_factor=0.7), ROUTINGS["random"])
        for name in ("ragged", "ring")
    ]
    assert float(made[0][0][1]) > 0
    check(*made)


def test_capacity_drops_the_same_on_every_mesh():
    made = layer("capacity", capacity_factor=0.8)
    want = pulled(made, PARAMS, X, WEIGHTS, *ROUTINGS["random"], GRAD)
    assert 0 < float(want[0][1]) < MASK.sum() * K
    for mesh in MESHES:
        check(on_mesh(mesh, made, ROUTINGS["random"]), want)


@pytest.mark.parametrize("name", ["ragged", "ring"])
@pytest.mark.parametrize("routing", ["random", "skewed to one device"])
def test_a_buffer_too_small_drops_the_last_tokens_and_counts_them(name, routing):
    ids, mask = ROUTINGS[routing]
    factor, n = 1.0, 8
    (y, num_dropped), _ = on_mesh({"expert": n}, layer(name, buffer_factor=factor), (ids, mask))
    kept = np.zeros((B, S, K), bool)  # One row of the batch is on each device.
    free = np.full(n, int(factor * S * K))
    for b, s, k in np.ndindex(B, S, K):
        device = int(ids[b, s, k]) // (E // n)
        if mask[b, s] and free[device] > 0:
            free[device] -= 1
            kept[b, s, k] = True
    assert num_dropped == np.sum(np.asarray(mask)[..., None] & ~kept)
    assert num_dropped > 0
    weights = jnp.where(jnp.asarray(kept), WEIGHTS, 0.0)
    (want, _), _ = pulled(layer("dense"), PARAMS, X, weights, ids, mask, GRAD)
    np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_token_with_nan_stays_by_itself(name):
    ids, mask = ROUTINGS["random"]
    (want, _), _ = pulled(layer("dense"), PARAMS, X, WEIGHTS, ids, mask, GRAD)
    mask = mask.at[2, 5].set(True)
    x = X.at[2, 5].set(jnp.nan)
    (got, _), (_, grad_x, _) = on_mesh({"expert": 4, "fsdp": 2}, layer(name), (ids, mask), x)
    others = np.ones((B, S), bool)
    others[2, 5] = False
    assert np.isnan(got[2, 5]).all()
    np.testing.assert_allclose(got[others], want[others], atol=1e-5)
    assert np.isfinite(grad_x[others]).all()


def test_experts_that_do_not_divide_are_named():
    made = build(layer("ragged").config.clone(num_experts=6))
    mesh = create_device_mesh(mesh_shape_from_axes(expert=4, data=2))
    message = r"experts/down: its dimension 'experts' of 6 does not divide into 4 parts"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: call(made, p, X), jax.eval_shape(lambda: initial(made)))
