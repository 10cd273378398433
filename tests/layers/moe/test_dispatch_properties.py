"""Random shapes, meshes, routings and masks: all dispatchers equal the oracle.

Each seed draws a case: the sizes, which of five mesh axes the eight devices lie on, which experts
tokens go to (any, a few, one after the other) and which tokens are padding.
"""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.layer import MoELayer
from tests import tiny
from tests.layers.calling import build, initial, normal
from tests.layers.moe.test_dispatch_on_meshes import DISPATCHERS, check, pulled

AXES = ("data", "expert", "fsdp", "seq", "model")
pytestmark = pytest.mark.slow
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=5) if np.prod(shape) == 8]


class Case:
    """One draw."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.mesh = dict(zip(AXES, SHAPES[rng.integers(len(SHAPES))], strict=True))
        mesh = self.mesh
        self.E = int(mesh["expert"] * rng.integers(1, 5))
        self.K = int(rng.integers(1, min(self.E, 5) + 1))
        self.B = int(mesh["data"] * mesh["expert"] * mesh["fsdp"] * rng.integers(1, 3))
        self.S = int(2 * mesh["seq"] * mesh["model"] * rng.integers(1, 5))
        self.D, self.F = int(8 * rng.integers(1, 4)), int(8 * rng.integers(1, 4))
        few = rng.permutation(self.E)[: self.K]  # All tokens go to the same experts.
        skew = np.log1p(np.arange(self.E)) * rng.choice([0.0, 1.0, 3.0])
        score = rng.gumbel(size=(self.B, self.S, self.E)) - skew
        ids = np.argsort(-score, -1)[..., : self.K]
        ids = np.broadcast_to(few, ids.shape) if rng.random() < 0.25 else ids
        self.ids = ids.astype(np.int32)
        kept = rng.choice([0.0, 0.5, 1.0], p=[0.15, 0.35, 0.5])
        self.mask = rng.random((self.B, self.S)) < kept
        self.weights = np.abs(normal(self.B, self.S, self.K, seed=seed))
        self.x, self.grad = (normal(self.B, self.S, self.D, seed=s) for s in (1, 2))

    def layer(self, dispatcher):
        return build(
            MoELayer.default_config(),
            input_dim=self.D,
            hidden_dim=self.F,
            num_experts=self.E,
            num_experts_per_token=self.K,
            dispatcher=dispatcher,
        )

    def pulled(self, dispatcher, mesh=None):
        """Returns ((output, assignments dropped), gradients in experts, x and weights)."""
        params = initial(self.layer(DenseDispatcher.default_config()))
        inputs = (params, self.x, self.weights, self.ids, self.mask, self.grad)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(tiny.mesh(**mesh)):
            return jax.device_get(pulled(self.layer(dispatcher), *inputs))


@pytest.mark.parametrize("seed", range(30))
def test_all_dispatchers_agree_with_the_oracle(seed):
    case = Case(seed)
    want = case.pulled(DenseDispatcher.default_config())
    for name, cfg in DISPATCHERS.items():
        if name == "capacity":
            cfg = cfg.clone(capacity_factor=case.E / case.K)  # Capacity for every token.
        got = case.pulled(cfg, case.mesh)
        assert got[0][1] == 0, name
        check(got, want)


# Seeds that drop assignments.
DROPPING = (103, 101, 104, 105, 106, 107, 110, 112, 113, 115, 117, 118, 120, 122)


@pytest.mark.parametrize("seed", DROPPING)
def test_the_same_assignments_are_dropped_on_every_mesh(seed):
    case = Case(seed)
    cfg = CapacityDispatcher.default_config().set(capacity_factor=0.6)
    want = case.pulled(cfg)
    assert want[0][1] > 0
    check(case.pulled(cfg, case.mesh), want)
