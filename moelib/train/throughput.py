"""How fast a run goes: tokens, FLOP/s, and where the time is spent."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from moelib.core.accelerators import peak_flops_per_second

PARTS = ("input", "step", "checkpoint", "evaluation")


class Throughput:
    """Counts steps, tokens and seconds, and says how fast the steps since it was last asked were.

    Time belongs to one of `PARTS`; what is in none of the others is the step's.
    """

    def __init__(self, flops_per_token: float | None, devices: Any) -> None:
        """Begins to count.

        Args:
            flops_per_token: Of training, forward and backward; None if not known.
            devices: All devices of the mesh.
        """
        self._flops = flops_per_token
        self._num_devices = len(devices)
        self._peak = peak_flops_per_second(devices[0].device_kind)
        self._local = [d for d in devices if d.process_index == jax.process_index()]
        self.total_tokens, self._total_slots = 0.0, 0
        self.total_seconds = dict.fromkeys(PARTS, 0.0)
        self.restart()

    def restart(self) -> None:
        """Forgets the steps and seconds since the last report."""
        self._begin = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._tokens, self._slots, self._steps = 0.0, 0, 0

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Counts the time inside as that part's."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - begin)

    def add(self, part: str, seconds: float) -> None:
        """Counts seconds as a part's."""
        self._spent[part] += seconds

    def step_done(self, num_tokens: float, num_slots: int) -> None:
        """Counts a step of so many valid tokens, in a batch of so many places for them."""
        self._tokens += num_tokens
        self._slots += num_slots
        self._steps += 1

    def report(self) -> dict[str, float]:
        """Returns the metrics of the steps since the last report, and begins anew.

        `tokens_per_second` (valid ones), `step_seconds`, `tflops_per_second` (a device), `mfu` (0
        to 1) are over the time of steps and of waiting for input; `time/<part>` is the share of
        all time, 0 to 1; `device_memory_gb` is the most that was ever in use on a local device.
        """
        wall = max(time.perf_counter() - self._begin, 1e-9)
        others = sum(self._spent.values())
        self._spent["step"] += max(wall - others, 0.0)
        running = max(self._spent["step"] + self._spent["input"], 1e-9)
        metrics = self._rates(self._tokens, self._slots, running)
        metrics["step_seconds"] = running / max(self._steps, 1)
        metrics |= {f"time/{part}": seconds / wall for part, seconds in self._spent.items()}
        stats = [d.memory_stats() for d in self._local]
        if peaks := [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]:
            metrics["device_memory_gb"] = max(peaks) / 1e9
        self.total_tokens += self._tokens
        for part, seconds in self._spent.items():
            self.total_seconds[part] += seconds
        self._total_slots += self._slots
        self.restart()
        return metrics

    def overall(self) -> dict[str, float]:
        """Returns `tokens_per_second`, `tflops_per_second` and `mfu` of all reported steps."""
        running = max(self.total_seconds["step"] + self.total_seconds["input"], 1e-9)
        return self._rates(self.total_tokens, self._total_slots, running)

    def _rates(self, tokens: float, slots: int, seconds: float) -> dict[str, float]:
        metrics = {"tokens_per_second": tokens / seconds}
        if self._flops is not None:
            rate = self._flops * slots / seconds / self._num_devices / 1e12
            metrics["tflops_per_second"] = rate
            if self._peak is not None:
                metrics["mfu"] = rate * 1e12 / self._peak
        return metrics
