"""Two processes, as two threads that gather values as processes do."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from moelib.runtime import processes

_TIMEOUT_SECONDS = 20.0  # For a process that waits for one that has failed.


def run_as_two(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], Any]) -> list[Any]:
    """Returns the result of `action(index)` in each of two processes, or its error.

    A process that waits for one that has ended gets a `threading.BrokenBarrierError`.
    """
    local, values = threading.local(), ["", ""]
    barrier = threading.Barrier(2, timeout=_TIMEOUT_SECONDS)

    def gather_json(value: Any) -> list[Any]:
        values[local.index] = json.dumps(value)
        barrier.wait()
        found = [json.loads(each) for each in values]
        barrier.wait()
        return found

    def process(index: int) -> Any:
        local.index = index
        try:
            return action(index)
        except Exception as error:
            return error
        finally:
            if barrier.n_waiting:
                barrier.abort()

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(processes, "gather_json", gather_json)
        patch.setattr(jax, "process_index", lambda: getattr(local, "index", 0))
        return list(pool.map(process, range(2)))
