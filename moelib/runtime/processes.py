"""Agreement of processes: the values of all of them, and whether a step has succeeded on all."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from moelib.core.errors import UserError


class OtherProcessError(RuntimeError):
    """A step failed in another process, whose log has the whole error."""


def gather_json(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in their order; all of them must call it."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(data.size, np.int32)).tolist()
    padded = np.zeros(max(sizes), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def agreed[T](action: Callable[[], T], kinds: Sequence[type[Exception]] = ()) -> T:
    """Returns the result of `action`, once it has succeeded on all processes.

    All processes must call it. An error of one of them would else leave the others waiting for it.

    Args:
        action: Step that this process takes.
        kinds: Errors that the caller tells apart; a later one is worse, and any other is the worst.

    Raises:
        Exception: On all processes, if the step failed on any: the process's own error, if it is
            as bad as any; else one that names the process with the worst, of its kind, a UserError
            or an OtherProcessError.
    """
    result, error, rank = None, None, 0
    ranked = [*kinds, UserError, Exception]
    try:
        result = action()
    except Exception as caught:
        error = caught
        rank = next(i for i, kind in enumerate(ranked, 1) if isinstance(error, kind))
    found = gather_json([rank, error and f"{type(error).__name__}: {error}"[:1000]])
    worst = max(found, key=lambda each: each[0])
    if worst[0] == 0:
        return cast("T", result)
    if error is not None and rank == worst[0]:
        raise error
    kind = [*kinds, UserError, OtherProcessError][worst[0] - 1]
    raise kind(f"process {found.index(worst)} failed, and all with it: {worst[1]}") from error


def on_process_0[T](action: Callable[[], T]) -> T:
    """Returns the JSON value of `action`, which process 0 alone runs; all processes must call it.

    Raises:
        Exception: On all processes, if it failed; see `agreed`.
    """
    value = agreed(lambda: action() if jax.process_index() == 0 else None)
    return gather_json(value)[0]
