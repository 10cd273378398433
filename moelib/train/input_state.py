"""Saved position in the training data: one for all processes, or one per host."""

import json
from typing import Any

import jax
import numpy as np

from moelib.core.errors import UserError
from moelib.data.prefetch import HostRows

State = dict[str, Any]  # JSON values only.

_HOSTS = "hosts"  # Only key of a saved position that differs between hosts.


def gather_input_state(state: State | None, host: HostRows) -> State | None:
    """Returns the position of all processes to save; all of them must call it.

    This is the state itself if all are equal, which can be restored on any number of processes;
    otherwise {"hosts": [state of each share of the batch]}. It is None at the beginning.
    """
    if jax.process_count() == 1:
        return state
    states = dict(_gather_json([host.host_index, state]))
    if all(other == states[0] for other in states.values()):
        return states[0]
    return {_HOSTS: [states[i] for i in range(host.num_hosts)]}


def input_state_of(saved: State | None, host: HostRows) -> State | None:
    """Returns this process's part of a position from `gather_input_state`.

    Raises:
        UserError: If the number of shares has changed.
    """
    if saved is None or saved.keys() != {_HOSTS}:
        return saved
    states = saved[_HOSTS]
    if len(states) != host.num_hosts:
        raise UserError(
            f"The checkpoint holds the position in the data of {len(states)} hosts, but there are "
            f"{host.num_hosts} now; resume with {len(states)}, or start a new run: a streaming "
            "input cannot be divided differently."
        )
    return states[host.host_index]


def _gather_json(value: Any) -> list[Any]:
    """Returns the JSON values of all processes."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(data.size, np.int32)).tolist()
    padded = np.zeros(max(sizes), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
