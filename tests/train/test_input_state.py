"""Positions of several processes in the data: saved together, restored separately."""

import json

import pytest

from moelib.data.prefetch import HostRows
from moelib.train import input_state
from moelib.train.input_state import gather_input_state, input_state_of


def gather(monkeypatch, states):
    """Returns what process 0 saves of all states, [(share, state)]."""
    monkeypatch.setattr(input_state, "gather_json", lambda mine: list(map(list, states)))
    num_hosts = 1 + max(share for share, _ in states)
    return gather_input_state(states[0][1], HostRows(states[0][0], num_hosts))


def test_each_share_restores_its_own_position(monkeypatch):
    states = [{"step": 3, "buffer": "a" * n} for n in (5, 0)]
    saved = gather(monkeypatch, [(1, states[1]), (0, states[0]), (1, states[1])])
    assert saved == {"hosts": states}
    assert json.loads(json.dumps(saved)) == saved
    for share in (0, 1):
        assert input_state_of(saved, HostRows(share, 2)) == states[share]


@pytest.mark.parametrize("state", [None, {"step": 3, "input": {"seed": 0}}])
def test_equal_positions_are_saved_once_for_any_number_of_hosts(monkeypatch, state):
    saved = gather(monkeypatch, [(0, state), (1, state)])
    assert saved == state
    assert input_state_of(saved, HostRows(2, 3)) == state


def test_another_number_of_hosts_is_refused():
    saved = {"hosts": [{"step": 1}, {"step": 2}]}
    with pytest.raises(ValueError, match=r"2 hosts.*4 now"):
        input_state_of(saved, HostRows(0, 4))
