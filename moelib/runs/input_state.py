"""Saved position in the training data: one for all processes, or one per host."""

from typing import Any

from moelib.core.errors import UserError
from moelib.runtime.processes import gather_json

State = dict[str, Any]  # JSON values only.

_HOSTS = "hosts"  # Only key of a saved position that differs between hosts.


def gather_input_state(state: State | None, rows: range) -> State | None:
    """Returns the position of all processes to save; all of them must call it.

    This is the state itself if all are equal, which can be restored on any number of processes;
    otherwise {"hosts": {rows of the batch: state}}. It is None at the beginning.
    """
    states = dict(gather_json([_name(rows), state]))
    if all(other == state for other in states.values()):
        return state
    return {_HOSTS: states}


def input_state_of(saved: State | None, rows: range) -> State | None:
    """Returns this process's part of a position from `gather_input_state`.

    Raises:
        UserError: If no process had the same rows.
    """
    if saved is None or saved.keys() != {_HOSTS}:
        return saved
    states = saved[_HOSTS]
    if _name(rows) not in states:
        raise UserError(
            f"The checkpoint holds the position in the data of {len(states)} hosts, with the rows "
            f"{', '.join(states)} of a batch, and this one has {_name(rows)}; resume with "
            f"{len(states)}, or start a new run: a streaming input cannot be divided differently."
        )
    return states[_name(rows)]


def _name(rows: range) -> str:
    return f"{rows.start}:{rows.stop}"
