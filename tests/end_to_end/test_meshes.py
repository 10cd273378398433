"""A step of a 4-layer model, accumulation and all, is the same on every mesh of eight devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.layers.moe.router import Router
from moelib.layers.remat import REMAT_POLICIES, remat
from moelib.learner.optimizers import sgd_optimizer
from moelib.parallel import sharding
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.train import metrics, state
from moelib.train.step import make_train_step
from moelib.train.trainer import SpmdTrainer
from moelib.verify.batches import packed_batch
from tests import tiny
from tests.train.test_step import start_of

pytestmark = pytest.mark.slow
ROWS, SEQ_LEN = 16, 16

MESHES = [
    {"expert": 2, "fsdp": 2, "model": 2},
    {"data": 8},
    {"fsdp": 8},
    {"expert": 8},
    {"seq": 8},
    {"data": 4, "model": 2},
    {"expert": 4, "fsdp": 2},
    {"data": 2, "expert": 2, "fsdp": 2},
    {"expert": 2, "seq": 4},
    {"fsdp": 2, "seq": 2, "model": 2},
    {"data": 2, "expert": 2, "seq": 2},
    {"expert": 2, "seq": 2, "model": 2},
    {"data": 2, "fsdp": 2, "seq": 2},
]
REMATS: dict[str, dict[str, Any]] = {
    "inputs": {},
    **{policy: {"policy": policy} for policy in REMAT_POLICIES},
    "named": {"keep": ["attention_context", "experts_up"]},
    "offloaded": {"keep": ["experts_up"], "offload": ["attention_output", "experts_down"]},
}


def trainer(remat_fields: dict[str, Any] | None = None, **moe_fields: Any) -> SpmdTrainer:
    """Returns a trainer whose step subtracts the gradient."""
    balance = LoadBalanceLoss.default_config().set(weight=0.1, scope=BalanceScope.GLOBAL_BATCH)
    router = Router.default_config().set(bias_balancing=BiasBalancing.default_config())
    z_loss = RouterZLoss.default_config().set(weight=0.01)
    moe = tiny.moe(
        num_experts=8, router=router, load_balance_loss=balance, router_z_loss=z_loss
    ).set(**moe_fields)
    layer = tiny.transformer_layer(moe, window=7, sinks=True)
    wrap = None if remat_fields is None else config_for_function(remat).set(**remat_fields)
    model = tiny.model_config(tiny.stacked(layer, num_layers=4, remat=wrap))
    cfg = tiny.trainer_config("unused", model=model, evaler=False)
    cfg.input.set(seq_len=SEQ_LEN, global_batch_size=ROWS)
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(learning_rate=1.0)
    return cfg.instantiate(parent=None)


def run(made: SpmdTrainer, start: Any, axes: dict[str, int] | None, num_steps: int = 1) -> Any:
    """Returns (state, metrics) after some steps on a mesh, or on one device."""
    step = make_train_step(made.model, made.learner, num_microbatches=2)
    devices = jax.devices() if axes else jax.devices()[:1]
    mesh = create_device_mesh(mesh_shape_from_axes(**(axes or {})), devices=devices)
    with jax.set_mesh(mesh):
        places = sharding.named_shardings(made.trainer_state_specs, mesh)
        step = jax.jit(step, out_shardings=(places, None))
        at = jax.device_put(start, places)
        packed = None
        for i in range(num_steps):
            split = state.batch_sharding(ROWS, SEQ_LEN, mesh)
            batch = packed_batch(ROWS, SEQ_LEN, tiny.VOCAB_SIZE, seed=i)
            at, packed = step(at, jax.device_put(batch, split))
    return at, metrics.unpack(packed)


@functools.cache
def expected() -> tuple[Any, Any, Any]:
    made = trainer()
    start = jax.device_get(start_of(made))
    after, found = run(made, start, None)
    return start, jax.device_get(after), found


def check(got: Any, found: Any) -> None:
    start, want, want_metrics = expected()
    leaves = jax.tree_util.tree_flatten_with_path(want.model)[0]
    others = (jax.tree.leaves(tree) for tree in (start.model, jax.device_get(got.model)))
    for (path, a), before, b in zip(leaves, *others, strict=True):
        # Within 1e-5 of the largest gradient, and a rounding of the parameter it was taken from.
        atol = 1e-5 * np.abs(a - before).max() + 2**-23 * np.abs(a).max()
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(b, a, rtol=0, atol=atol, err_msg=name)
    assert found == pytest.approx(want_metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_step_is_the_same_on_every_mesh(axes):
    check(*run(trainer(), expected()[0], axes))


@pytest.mark.parametrize("fields", REMATS.values(), ids=REMATS)
@pytest.mark.parametrize("axes", [MESHES[0], MESHES[10]], ids=str)
def test_a_step_is_the_same_under_every_remat(axes, fields):
    check(*run(trainer(fields), expected()[0], axes))


@pytest.mark.parametrize(
    "dispatcher",
    [RingDispatcher.default_config(), CapacityDispatcher.default_config().set(capacity_factor=4.0)],
    ids=["ring", "capacity"],
)
def test_a_step_is_the_same_with_every_dispatcher(dispatcher):
    check(*run(trainer(dispatcher=dispatcher), expected()[0], MESHES[11]))


@pytest.mark.parametrize("axes", [MESHES[0], MESHES[7], MESHES[10]], ids=str)
def test_what_is_replicated_is_equal_on_all_devices_after_ten_steps(axes):
    made = trainer()
    after, _ = run(made, expected()[0], axes, num_steps=10)
    for path, leaf in jax.tree_util.tree_flatten_with_path(after)[0]:
        parts: dict[str, Any] = {}
        for shard in leaf.addressable_shards:
            place = str(shard.index)
            first = parts.setdefault(place, np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, first, err_msg=jax.tree_util.keystr(path))
    assert float(jnp.max(after.step)) == 10
