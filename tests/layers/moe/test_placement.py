"""Placements of a MoE layer on meshes, by hand from the table of logical axes."""

import pytest
from jax.sharding import PartitionSpec as P

from moelib.layers.moe.placement import place
from moelib.parallel.mesh import MESH_AXIS_NAMES
from moelib.parallel.sharding import SplitError, sharding_rules


def placed(shape=(8, 16, 4), *, expert_parallel=True, **axes):
    mesh = dict.fromkeys(MESH_AXIS_NAMES, 1) | axes
    return place(mesh, shape, expert_parallel=expert_parallel, title="layer")


def test_experts_stay_split_only_if_the_dispatcher_reaches_them():
    reached, gathered = placed(expert=2, data=2), placed(expert=2, data=2, expert_parallel=False)
    assert reached.experts == ("expert",)
    assert gathered.experts == ()
    assert reached.tokens == gathered.tokens
    assert set(reached.batch) == {"data", "expert"}


def test_devices_along_the_hidden_dimension_share_tokens_and_scatter_the_sum():
    found = placed(model=2, seq=2)
    assert (found.ffn, found.num_parts, found.is_scattered) == (("model",), 2, True)
    assert found.outputs == (P(found.tokens[0], ("seq", "model")), P())
    odd = placed((8, 6, 4), model=2, seq=2)  # 6 tokens have no 4 parts.
    assert not odd.is_scattered
    assert odd.outputs[0] == odd.tokens
    with sharding_rules({"residual_sequence": ("seq",)}):
        assert not placed(model=2, seq=2).is_scattered


def test_expert_axes_that_split_no_tokens_split_the_sequence():
    with sharding_rules({"batch": ("data",)}):
        assert placed(expert=2).sequence == ("expert",)
        assert placed(expert=2, expert_parallel=False).sequence == ()


def test_a_sequence_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(SplitError, match=r"tokens of layer.*5"):
        placed((8, 5, 4), seq=2)
