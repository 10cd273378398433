"""Specs from a trace equal those by hand, on lists without names."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import sharding_models
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.parallel.auto_sharding.specs import auto_partition_specs

pytestmark = pytest.mark.usefixtures("_promotion")


@pytest.fixture
def _promotion():
    """Allows what models of other libraries do."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# The order of `sharding_models.models`, without ResNet and LSTM, whose traced specs are better.
_EQUAL = [each for i, each in enumerate(sharding_models.models()) if i not in (12, 14)]


@pytest.mark.parametrize("build", _EQUAL)
def test_traced_specs_equal_those_by_hand(build):
    model = build()
    leaves, structure = jax.tree.flatten(model.params)

    def loss(leaves, *batch):
        return model.loss(jax.tree.unflatten(structure, leaves), *batch)

    num_shards = 2 if "scan" in model.name else 8
    found = auto_partition_specs(loss, leaves, *model.batch, num_shards=num_shards)
    paths = [path for path, _ in tree.flatten_items(model.params)]
    hand = tree.match_rules(paths, model.hand, default=P(), field="hand")
    assert dict(zip(paths, found.specs, strict=True)) == hand
    assert not found.report.unknown


def _network(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


_PARAMS = {"up": jnp.zeros((16, 32)), "bias": jnp.zeros(32), "down": jnp.zeros((32, 16))}


def test_neighbors_of_an_override_follow():
    overrides = [("down", P("model"))]
    found = auto_partition_specs(
        _network, _PARAMS, jnp.ones((4, 16)), num_shards=4, overrides=overrides
    )
    assert found.specs == {"up": P(None, "model"), "bias": P("model"), "down": P("model")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 7}, "num_shards=7"),
        ({"num_shards": 4, "overrides": [("head", P("model"))]}, "'head'"),
        (
            {"num_shards": 4, "overrides": [("up", P("model")), ("bias", P("model"))]},
            "up cannot be sharded along dimension 0",
        ),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        auto_partition_specs(_network, _PARAMS, jnp.ones((4, 16)), **options)
