"""The replay equals what the dispatchers do, and a proposed placement is never worse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.analysis import placement, routing_counts
from moelib.core.jaxpr import inner_jaxprs
from moelib.core.varying import vary
from moelib.layers.moe import dispatch_ragged
from moelib.layers.moe.dispatch import Assignments, DispatchContext
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.planning.estimate.transfers import _mean_destinations
from moelib.runs.routing_file import RoutingLog
from tests import tiny
from tests.analysis.planted import LAYER, plant
from tests.layers.calling import build, call, initial

B, S, D, E, K = 8, 16, 4, 8, 3
RNG = np.random.default_rng(0)
IDS = np.argsort(RNG.random((B, S, E)) + np.linspace(0, 0.5, E), -1)[..., :K]  # Uneven.
MASK = RNG.random((B, S)) < 0.8
LOGGED = np.where(MASK[..., None], IDS, E).astype(np.uint8)


def num_dropped(dispatcher):
    """Returns the assignments that a layer drops, whose router has selected IDS."""
    cfg = MoELayer.default_config().set(
        input_dim=D, hidden_dim=D, num_experts=E, num_experts_per_token=K, dispatcher=dispatcher
    )
    layer = build(cfg)
    params = initial(layer)

    def run(x):
        nothing = jnp.zeros((B, S, E))
        weights = jnp.ones((B, S, K))
        routing = Routing(jnp.asarray(IDS, jnp.int32), weights, nothing, nothing, jnp.asarray(MASK))
        return call(layer, params, params["experts"], x, routing, method="_routed")

    return int(jax.jit(run)(jnp.ones((B, S, D))).num_dropped)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_predicted_drops_are_those_of_the_dispatcher(factor):
    kept = placement.within_capacity(LOGGED, E, factor)
    num_assignments = int((LOGGED < E).sum())
    dropped = num_dropped(CapacityDispatcher.default_config().set(capacity_factor=factor))
    assert 0 < dropped == num_assignments - int(kept.sum())


class Identity:
    """Experts that return their rows."""

    added_once = ()

    def batched(self, params, rows):
        return rows

    def grouped(self, params, rows, group_sizes, weights):
        return rows

    def weighted_biases(self, params, ids, weights):
        return None


def test_predicted_rows_are_those_that_the_ragged_exchange_sends(monkeypatch, tmp_path):
    sizes, gather_sizes = [], dispatch_ragged.gather_sizes

    def recording(sent, axes):
        sizes.append(gather_sizes(sent, axes))
        return sizes[-1]

    monkeypatch.setattr(dispatch_ragged, "gather_sizes", recording)
    cfg = dispatch_ragged.RaggedDispatcher.default_config().set(round_factor=None)  # One round.
    dispatcher = cfg.instantiate()

    def run(ids, mask):
        sizes.clear()
        x, weights = jnp.ones((*ids.shape[:2], D)), jnp.ones(ids.shape)
        assignments = Assignments(ids, *vary((weights, mask), ("data", "expert")))
        context = DispatchContext(E, ("expert",))
        dispatcher(Identity(), {}, vary(x, ("data", "expert")), assignments, context)
        return sizes[0][None, None]  # Of this device's group.

    split = PartitionSpec(("data", "expert"))
    out = PartitionSpec("data", "expert")
    with jax.set_mesh(tiny.mesh(data=2, expert=4)):
        mapped = jax.shard_map(run, in_specs=(split, split), out_specs=out)
        sent = jax.jit(mapped)(jnp.asarray(IDS, jnp.int32), MASK)
    rows = placement.rows_sent(LOGGED, placement.contiguous(E, 4), outer=2)
    np.testing.assert_array_equal(np.asarray(sent)[:, 0].sum(0), rows)
    assert 0 < placement.remote(rows) < rows.sum()
    mesh = {"data": 2, "expert": 4, "fsdp": 1}
    log = plant(tmp_path, 1, LOGGED, np.zeros((B, S)), mask=MASK, num_experts=E, mesh=mesh)
    found = placement.replay(RoutingLog(log), LAYER, [], [4])["expert_parallel"]["4"]["trainer"]
    assert found["rows_per_token"] * MASK.sum() == pytest.approx(placement.remote(rows))


@pytest.mark.parametrize(
    ("num_devices", "around"), [(4, (2, 3)), (1, (8, 3)), (8, (1, 3)), (3, (8, 1)), (5, (1, 1))]
)
def test_the_other_axes_get_the_devices_that_expert_does_not_take(num_devices, around):
    mesh = {"data": 2, "expert": 4, "fsdp": 3}
    assert placement.parts_around(mesh, num_devices) == around


def operands_of(name, jaxpr):
    """Yields the first operand of each equation of a kind, in the jaxprs inside others too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield eqn.invars[0].aval
        for inner in inner_jaxprs(eqn):
            yield from operands_of(name, inner.jaxpr)


@pytest.mark.parametrize("factor", [0.5, 1.25])
def test_rows_of_a_capacity_are_those_of_its_all_to_all(tmp_path, factor):
    dispatcher = CapacityDispatcher.default_config().set(capacity_factor=factor).instantiate()

    def run(ids, mask):
        x, weights = jnp.ones((*ids.shape[:2], D)), jnp.ones(ids.shape)
        assignments = Assignments(ids, *vary((weights, mask), ("data", "expert")))
        context = DispatchContext(E, ("expert",))
        return dispatcher(Identity(), {}, vary(x, ("data", "expert")), assignments, context)[0]

    split = PartitionSpec(("data", "expert"))
    with jax.set_mesh(tiny.mesh(data=2, expert=4)):
        mapped = jax.shard_map(run, in_specs=(split, split), out_specs=split)
        traced = jax.make_jaxpr(mapped)(jnp.asarray(IDS, jnp.int32), MASK)
    there, back = operands_of("all_to_all", traced.jaxpr)
    assert there.size == back.size
    rows = 8 * there.size // D  # Of 8 devices, each of which keeps a fourth.
    log = RoutingLog(plant(tmp_path, 1, IDS, np.zeros((B, S)), num_experts=E))
    assert placement.capacity_rows(log, LAYER, factor, 4) == rows - rows // 4 > 0
    found = placement.replay(log, LAYER, [factor], [4])["capacity_bytes_per_batch"]
    assert found == {"4": {str(factor): (rows - rows // 4) * 8 * 2}}  # Width 8 in the header.


def test_rows_of_uniform_routing_are_those_of_the_estimate():
    uniform = np.array(list(itertools.combinations(range(6), 3)), np.uint8)  # 20 tokens.
    rows = placement.rows_sent(uniform.reshape(4, 5, 3), placement.contiguous(6, 2))
    assert rows.sum() / 20 == pytest.approx(_mean_destinations(6, 3, 2))


def test_experts_used_together_share_a_device():
    """Tokens go to experts i and i + 4, which the trainer holds on two devices."""
    first = np.arange(400).reshape(8, 50, 1) % 4
    ids = np.concatenate([first, first + 4], -1).astype(np.uint8)
    together = routing_counts.coactivation(ids.reshape(-1, 2), 8)
    devices = placement.propose_placement(together, np.ones((8, 4), np.int64))
    assert sorted(devices) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (devices[:4] == devices[4:]).all()
    assert placement.rows_sent(ids, devices).sum() == 8 * 50  # Each token travels once.


def test_experts_are_put_where_their_tokens_are(tmp_path):
    """Sequences of device d go to experts e and e + 4 alone: no row has to travel."""
    first = np.array([2, 2, 0, 0, 3, 3, 1, 1]).reshape(8, 1, 1)
    ids = np.broadcast_to(np.concatenate([first, first + 4], -1), (8, 5, 2))
    log = RoutingLog(plant(tmp_path, 1, ids, np.zeros((8, 5)), num_experts=8))
    found = placement.replay(log, LAYER, [], [4])["expert_parallel"]["4"]
    assert found["proposed"]["devices"] == [1, 3, 0, 2, 1, 3, 0, 2]
    assert (found["trainer"]["rows_per_token"], found["proposed"]["rows_per_token"]) == (2, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_proposed_placement_is_never_worse_and_close_to_the_best(tmp_path, seed):
    rng = np.random.default_rng(seed)
    by_sequence = rng.random((8, 1, 8))
    ids = np.argsort(rng.random((8, 12, 8)) + by_sequence + np.linspace(0, 0.3, 8), -1)[..., :2]
    log = RoutingLog(plant(tmp_path, 1, ids, np.zeros((8, 12)), num_experts=8))
    found = placement.replay(log, LAYER, [1.0], [2, 3, 4])["expert_parallel"]
    assert set(found) == {"2", "4"}  # 3 divides neither experts nor batch.
    for each in found.values():
        for name in ("rows_per_token", "bytes_per_batch", "load_violation"):
            assert each["proposed"][name] <= each["trainer"][name] + 1e-9
        rows = each["trainer"]["rows_per_token"] * 96
        assert each["trainer"]["bytes_per_batch"] == pytest.approx(rows * 8 * 2, rel=1e-4)
    load = np.bincount(ids.reshape(-1), minlength=8)
    splits = [np.isin(np.arange(8), half) * 1 for half in itertools.combinations(range(8), 4)]
    most = max(load[:4].sum(), load[4:].sum())  # Of a device, in the trainer's placement.
    allowed = [x for x in splits if max(load @ x, load @ (1 - x)) <= most]
    best = min(placement.remote(placement.rows_sent(ids, x)) for x in allowed)
    rows = {name: round(x["rows_per_token"] * 96) for name, x in found["2"].items()}
    assert rows["trainer"] - rows["proposed"] >= 0.9 * (rows["trainer"] - best)


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_devices=3"):
        placement.contiguous(8, 3)
    with pytest.raises(ValueError, match="8 sequences"):
        placement.rows_sent(LOGGED, placement.contiguous(E, 4), outer=3)
