"""The replay equals what the dispatchers do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.analysis import placement
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
    found = placement.replay(RoutingLog(log), LAYER, [], [3, 4, 16])["expert_parallel"]
    assert set(found) == {"4"}  # 3 and 16 do not divide the experts.
    assert found["4"]["rows_per_token"] * MASK.sum() == pytest.approx(placement.remote(rows))
    assert found["4"]["bytes_per_batch"] == placement.remote(rows) * 8 * 2  # Width 8, two bytes.


@pytest.mark.parametrize(
    ("num_devices", "around"), [(4, (2, 3)), (1, (8, 3)), (8, (1, 3)), (3, (8, 1)), (5, (1, 1))]
)
def test_the_other_axes_get_the_devices_that_expert_does_not_take(num_devices, around):
    mesh = {"data": 2, "expert": 4, "fsdp": 3}
    assert placement.parts_around(mesh, num_devices) == around


def test_rows_of_uniform_routing_are_those_of_the_estimate():
    uniform = np.array(list(itertools.combinations(range(6), 3)), np.uint8)  # 20 tokens.
    rows = placement.rows_sent(uniform.reshape(4, 5, 3), placement.contiguous(6, 2))
    assert rows.sum() / 20 == pytest.approx(_mean_destinations(6, 3, 2))


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_devices=3"):
        placement.contiguous(8, 3)
    with pytest.raises(ValueError, match="8 sequences"):
        placement.rows_sent(LOGGED, placement.contiguous(E, 4), outer=3)
