"""Dispatchers on meshes of eight devices: against the oracle on one, values, gradients, drops."""

import functools
import re
from typing import Any

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
from tests.layers.calling import build, call, initial, normal

B, S, D, F, E, K = 8, 16, 8, 8, 8, 3
X, GRAD = normal(B, S, D), normal(B, S, D, seed=1)
WEIGHTS = np.abs(normal(B, S, K, seed=2))
MASK = np.random.default_rng(3).random((B, S)) < 0.8
DISPATCHERS: dict[str, Any] = {
    "dense": DenseDispatcher.default_config(),
    "sorted": SortedDispatcher.default_config(),
    "ragged": RaggedDispatcher.default_config(),
    "ring": RingDispatcher.default_config(),
    "capacity": CapacityDispatcher.default_config().set(capacity_factor=E / K),
}
HARDEST = {"expert": 2, "model": 2, "seq": 2}  # Random meshes are in test_dispatch_properties.py.


def draw(seed, experts=tuple(range(E)), mask=MASK):
    """Returns (ids, mask) with K different experts for each token."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:K] for _ in range(B * S)]).reshape(B, S, K)
    return ids.astype(np.int32), mask


def draw_some():
    """Returns (ids, mask), with assignments, and all of some tokens, that are of no expert."""
    ids, mask = draw(0)
    ids[0, 3, 1], ids[1, 2, 0] = -1, E
    ids[2, :2], ids[2, 2:4] = -1, E
    return ids, mask


ROUTINGS = {
    "random": draw(0),
    "skewed to one device": draw(1, (0, 1, 2)),
    "no token of some rows": draw(2, mask=MASK & (np.arange(B) % 4 > 0)[:, None]),
    "all padding": draw(3, mask=np.zeros((B, S), bool)),
    "some of no expert": draw_some(),
}


@functools.cache
def layer(name, **fields):
    cfg = MoELayer.default_config().set(
        input_dim=D, hidden_dim=F, num_experts=E, num_experts_per_token=K
    )
    sizes = {field: fields.pop(field) for field in cfg.keys() & fields.keys()}
    return build(cfg.set(dispatcher=DISPATCHERS[name].clone(**fields), **sizes))


PARAMS = initial(layer("dense"))


@functools.partial(jax.jit, static_argnums=0)
def pulled(made, params, x, weights, ids, mask, grad):
    """Returns ((output, assignments dropped), gradients in the experts' weights, x and weights)."""

    def run(experts, x, weights):
        nothing = jnp.zeros((*mask.shape, made.config.num_experts))
        routing = Routing(ids, weights, nothing, nothing, mask)
        return tuple(call(made, params, experts, x, routing, method="_routed"))

    y, pull, num_dropped = jax.vjp(run, params["experts"], x, weights, has_aux=True)
    return (y, num_dropped), pull(grad)


def on_mesh(axes, made, routing, x=X, rules=None):
    mesh = create_device_mesh(mesh_shape_from_axes(**axes))
    with jax.set_mesh(mesh), sharding_rules(rules or {}):
        return jax.device_get(pulled(made, PARAMS, x, WEIGHTS, *routing, GRAD))


def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "name", ["ragged", "ring", "capacity", "sorted", pytest.param("dense", marks=pytest.mark.slow)]
)
def test_a_mesh_equals_the_oracle_on_one_device(name, routing):
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, *ROUTINGS[routing], GRAD)
    check(on_mesh(HARDEST, layer(name), ROUTINGS[routing]), want)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("factor", [0.1, 0.4, 1.0, None])
@pytest.mark.parametrize("name", ["ragged", "ring"])
def test_any_number_of_rounds_equals_the_oracle(name, factor, routing):
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, *ROUTINGS[routing], GRAD)
    made = layer(name, round_factor=factor)
    check(on_mesh({"expert": 4, "seq": 2}, made, ROUTINGS[routing]), want)


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("ragged", ("seq", "model")),
        pytest.param("ragged", ("model",), marks=pytest.mark.slow),
        pytest.param("ring", ("expert", "model"), marks=pytest.mark.slow),
        pytest.param("capacity", ("seq", "model"), marks=pytest.mark.slow),
    ],
)
def test_experts_may_be_split_over_other_axes_than_the_batch(name, experts):
    made, routing = layer(name), ROUTINGS["random"]
    want = pulled(layer("dense"), PARAMS, X, WEIGHTS, *routing, GRAD)
    check(on_mesh(HARDEST, made, routing), want)  # Traced with other sharding rules first.
    before = pulled._cache_size()
    rules = {"experts": experts, "expert_ffn": ()}
    check(on_mesh(HARDEST, made, routing, rules=rules), want)
    assert pulled._cache_size() == before + 1


def test_low_precision_weights_reach_every_expert_of_a_device():
    # 260 experts per device: bfloat16 rounds the ids 257 and 259 to their neighbours.
    made = layer("ragged", input_dim=2, hidden_dim=2, num_experts=520, num_experts_per_token=1)
    params, x = initial(made), normal(8, 1, 2)
    ids = np.int32([3, 257, 259, 256, 517, 519, 258, 516])[:, None, None]
    nothing, mask = np.zeros((8, 1, 520), np.float32), np.ones((8, 1), bool)

    def run(dtype):
        routing = Routing(ids, np.full(ids.shape, 0.5, dtype), nothing, nothing, mask)
        return call(made, params, params["experts"], x, routing, method="_routed").y

    mesh = create_device_mesh(mesh_shape_from_axes(expert=2, data=4))
    with jax.set_mesh(mesh), sharding_rules({}):
        got = jax.device_get(run(jnp.bfloat16))
    np.testing.assert_allclose(got, run(jnp.float32), rtol=1e-5)


def dropped_by_row(ids, mask, factor):
    """Returns (ids with E for dropped assignments, their number), in the order of tokens."""
    ids, num_dropped = np.array(ids), 0
    for b in range(B):
        balanced = np.sum(mask[b]) * K / E  # Of the sequence's own tokens.
        free = np.full(E, max(1, int(np.ceil(factor * balanced))))
        for s, k in np.ndindex(S, K):
            expert = ids[b, s, k]
            if mask[b, s] and free[expert] == 0:
                ids[b, s, k] = E
                num_dropped += 1
            elif mask[b, s]:
                free[expert] -= 1
    return ids, num_dropped


@pytest.mark.parametrize("routing", ["random", "skewed to one device", "no token of some rows"])
def test_the_same_assignments_are_dropped_on_a_mesh(routing):
    made = layer("capacity", capacity_factor=0.6)
    ids, mask = ROUTINGS[routing]
    ids, num_dropped = dropped_by_row(ids, mask, 0.6)
    assert num_dropped > 0
    (y, _), grads = pulled(layer("dense"), PARAMS, X, WEIGHTS, ids, mask, GRAD)
    want = (y, np.float32(num_dropped)), grads
    check(pulled(made, PARAMS, X, WEIGHTS, *ROUTINGS[routing], GRAD), want)
    check(on_mesh(HARDEST, made, ROUTINGS[routing]), want)


@pytest.mark.parametrize("name", ["ragged", pytest.param("ring", marks=pytest.mark.slow)])
def test_buffers_of_a_round_are_a_multiple_of_sixteen_rows(name):
    n, even = 8, B * S * K // 8
    worst = n * B * S // 8
    assert rows_held(name, n, round_factor=1.25) == 64 < worst  # 60 rows, rounded up.
    assert rows_held(name, n, round_factor=2.0) == 2 * even
    assert rows_held(name, n, round_factor=None) == worst


def rows_held(name, n, **fields):
    """Returns the rows of a device's saved activations in the experts, which alone are 24 wide."""
    made = build(layer(name, **fields).config.clone(hidden_dim=24))
    params = jax.eval_shape(lambda: initial(made))
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(expert=n, fsdp=8 // n))):
        program = str(pulled.trace(made, params, X, WEIGHTS, *ROUTINGS["random"], GRAD).jaxpr)
    return max(int(rows) for rows in re.findall(r"f32\[(\d+),24\]", program)) // 8


@pytest.mark.parametrize(
    "name", [n if n == "ragged" else pytest.param(n, marks=pytest.mark.slow) for n in DISPATCHERS]
)
def test_a_token_with_nan_stays_by_itself(name):
    ids, mask = ROUTINGS["random"]
    (want, _), _ = pulled(layer("dense"), PARAMS, X, WEIGHTS, ids, mask, GRAD)
    others = np.ones((B, S), bool)
    others[2, 5] = False
    x = np.where(others[..., None], X, np.float32(np.nan))
    (got, _), (_, grad_x, _) = on_mesh(HARDEST, layer(name), (ids, mask | ~others), x)
    assert np.isnan(got[2, 5]).all()
    np.testing.assert_allclose(got[others], want[others], atol=1e-5)
    assert np.isfinite(grad_x[others]).all()


def test_experts_that_do_not_divide_are_named():
    made = build(layer("ragged").config.clone(num_experts=6))
    mesh = create_device_mesh(mesh_shape_from_axes(expert=4, data=2))
    message = r"experts/down:.*'experts'.*size 6.*4"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: call(made, p, X), jax.eval_shape(lambda: initial(made)))
