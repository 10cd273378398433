"""Limits of a process that runs tests: its memory maps and its memory.

A compiled program takes 6 to 150 memory maps, and Linux grants a process some 65,000: XLA ends a
process that needs more.
"""

import contextlib
import ctypes
import gc
import resource
import sys

import jax
import pytest

from moelib.runtime import memory_maps

_CLEAR_MAPS, _MAX_MAPS = 12_000, 30_000
# Bytes, on CPUs: the libraries of a GPU alone may take more. Slow tests may take twice as many.
_MAX_MEMORY = 3 << 30
_CLEAR_MEMORY = 3 << 29  # Bytes of a process above which it frees compiled programs.


class Limits:
    """The plugin of a process that runs tests, and of one that reports on its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._maps, self._memory = (0, ""), (0, "")  # The largest, each with its file.
        self._lines: list[str] = []  # Of xdist's workers.

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Measures the process after each file, and frees compiled programs if there are many."""
        if nextitem is not None and nextitem.path == item.path:
            return
        file, maps = item.nodeid.partition("::")[0], memory_maps.count()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory *= 1 if sys.platform == "darwin" else 1024
        limit = _MAX_MEMORY * (2 if item.get_closest_marker("slow") else 1)
        was_within = self._memory[0] <= limit
        self._maps, self._memory = max(self._maps, (maps, file)), max(self._memory, (memory, file))
        if maps > _CLEAR_MAPS or _resident() > _CLEAR_MEMORY:
            free_programs()
        if maps > _MAX_MAPS:
            pytest.fail(f"{file}: {maps:,} memory maps, above {_MAX_MAPS:,}.")
        if memory > limit and was_within and jax.config.jax_platforms == "cpu":
            pytest.fail(f"{file}: {memory / 2**30:.2f} GiB at peak, above {limit >> 30}.")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Hands the largest numbers of a worker to the process that reports."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["limits"] = self._line()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Keeps the numbers of a worker that ends."""
        line = getattr(node, "workeroutput", {}).get("limits", "ended without numbers")
        self._lines.append(f"{node.gateway.id}: {line}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Reports the largest numbers of each process that ran tests."""
        for line in sorted(self._lines) or [self._line()]:
            terminalreporter.write_line(line)

    def _line(self) -> str:
        (maps, most), (memory, largest) = self._maps, self._memory
        return f"at most {maps:,} memory maps ({most}), {memory / 2**30:.2f} GiB ({largest})"


def free_programs() -> None:
    """Frees compiled programs, and gives their memory back to the system.

    glibc keeps what is freed for later use: of 1.9 GB 1.3 GB are given back only on request.
    """
    gc.collect()
    jax.clear_caches()
    with contextlib.suppress(OSError, AttributeError):  # Another library of C.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident() -> int:
    """Returns the bytes of memory that the process has now; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0
