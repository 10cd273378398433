"""The place in the training data as it is saved: that of every process, where they differ."""

import json
from typing import Any

import jax
import numpy as np

from moelib.data.prefetch import HostRows

State = dict[str, Any]  # JSON values only.

_HOSTS = "hosts"  # The one key of a saved place that is not the same on all hosts.


def gather_input_state(state: State | None, host: HostRows) -> State | None:
    """Returns what to save of the inputs of all processes; all of them must call it.

    Args:
        state: This process's place in the data, None at the beginning.
        host: Which share of the batch this process reads.

    Returns:
        The state itself if it is the same everywhere (it may then be restored on any number of
        processes), or else {"hosts": [the state of each share]}.
    """
    if jax.process_count() == 1:
        return state
    states = dict(_gather_json([host.host_index, state]))
    if all(other == states[0] for other in states.values()):
        return states[0]
    return {_HOSTS: [states[i] for i in range(host.num_hosts)]}


def input_state_of(saved: State | None, host: HostRows) -> State | None:
    """Returns what this process restores of what `gather_input_state` gave.

    Raises:
        ValueError: If there were more or fewer shares then.
    """
    if saved is None or saved.keys() != {_HOSTS}:
        return saved
    states = saved[_HOSTS]
    if len(states) != host.num_hosts:
        raise ValueError(
            f"The checkpoint holds the place in the data of {len(states)} hosts, and there are "
            f"{host.num_hosts} now; go on with {len(states)}, or start a new run: an input that "
            "streams cannot be divided anew."
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
