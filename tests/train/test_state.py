"""The state: specs, shardings, and keys of any form; the positions of inputs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.param import is_spec
from moelib.parallel import sharding
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.runs import input_state
from moelib.runs.input_state import gather_input_state, input_state_of
from moelib.train import state
from tests import tiny


@pytest.mark.parametrize("key", [5, jax.random.key(5), jax.random.PRNGKey(5)])
def test_keys_of_any_form(key):
    np.testing.assert_array_equal(state.key_data(key), jax.random.key_data(jax.random.key(5)))


def test_specs_are_those_of_the_state(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    trainer.init()
    specs = jax.tree.map(
        lambda spec: (spec.shape, spec.dtype), trainer.trainer_state_specs, is_leaf=is_spec
    )
    assert specs == jax.tree.map(lambda x: (x.shape, str(x.dtype)), trainer.trainer_state)


def test_optimizer_state_is_sharded_like_its_parameter(tmp_path):
    cfg = tiny.trainer_config(tmp_path, mesh_shape=mesh_shape_from_axes(fsdp=4, model=2))
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    table = trainer.trainer_state.model["table"].sharding
    moments = [x for x in jax.tree.leaves(trainer.trainer_state.learner) if x.shape == (32, 16)]
    assert len(moments) == 2
    assert all(x.sharding == table for x in moments)
    assert trainer.trainer_state.model["table"].addressable_shards[0].data.shape == (16, 4)


def test_abstract_state_has_shardings(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    target = sharding.abstract_state(trainer.trainer_state_specs, trainer.trainer_state_shardings)
    assert target.step.dtype == jnp.int32
    assert target.model["table"].sharding == trainer.trainer_state_shardings.model["table"]


def test_sequence_that_does_not_divide_is_refused():
    mesh = create_device_mesh(mesh_shape_from_axes(data=2, seq=4))
    with pytest.raises(ValueError, match=r"seq_len 18.*'sequence'.*size 18"):
        state.batch_sharding(8, 18, mesh)


def gather(monkeypatch, states):
    """Returns what process 0 saves of all states, [(name of the rows, state)]."""
    monkeypatch.setattr(input_state, "gather_json", lambda mine: list(map(list, states)))
    start, stop = map(int, states[0][0].split(":"))
    return gather_input_state(states[0][1], range(start, stop))


def test_each_host_restores_its_own_position(monkeypatch):
    states = [{"step": 3, "buffer": "a" * n} for n in (5, 0)]
    saved = gather(monkeypatch, [("4:8", states[1]), ("0:4", states[0]), ("4:8", states[1])])
    assert saved == {"hosts": {"4:8": states[1], "0:4": states[0]}}
    assert json.loads(json.dumps(saved)) == saved
    for share in (0, 1):
        assert input_state_of(saved, range(4 * share, 4 * share + 4)) == states[share]


@pytest.mark.parametrize("state", [None, {"step": 3, "input": {"seed": 0}}])
def test_equal_positions_are_saved_once_for_any_number_of_hosts(monkeypatch, state):
    saved = gather(monkeypatch, [("0:4", state), ("4:8", state)])
    assert saved == state
    assert input_state_of(saved, range(2, 3)) == state


def test_another_number_of_hosts_is_refused():
    saved = {"hosts": {"0:4": {"step": 1}, "4:8": {"step": 2}}}
    with pytest.raises(ValueError, match=r"2 hosts.*0:4, 4:8.*0:2"):
        input_state_of(saved, range(2))
