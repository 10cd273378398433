"""Saved position in the training data: one for all processes, or one per host."""

from typing import Any

from moelib.core.errors import UserError
from moelib.data.prefetch import HostRows
from moelib.runtime.processes import gather_json

State = dict[str, Any]  # JSON values only.

_HOSTS = "hosts"  # Only key of a saved position that differs between hosts.


def gather_input_state(state: State | None, host: HostRows) -> State | None:
    """Returns the position of all processes to save; all of them must call it.

    This is the state itself if all are equal, which can be restored on any number of processes;
    otherwise {"hosts": [state of each share of the batch]}. It is None at the beginning.
    """
    states = dict(gather_json([host.host_index, state]))
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
