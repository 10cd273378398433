"""Throughput of a run: tokens and FLOP/s, and the kinds of work that its time is spent on."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from moelib.core.metrics import Scalars
from moelib.runtime.accelerators import peak_flops_per_second

PARTS = ("input", "step", "checkpoint", "evaluation")


class Throughput:
    """Counts steps, tokens or examples, and seconds; reports the rates since the last report.

    Time that is counted for no other of `PARTS` is counted for "step".
    """

    def __init__(
        self,
        flops_per_token: float | None,
        devices: Sequence[Any],
        dtype: str = "bfloat16",
        unit: str = "tokens",
    ) -> None:
        """Starts to count.

        Args:
            flops_per_token: FLOPs of the forward and backward pass, or None if unknown.
            devices: All devices of the mesh.
            dtype: Dtype of the matmuls, whose peak rate the MFU is relative to.
            unit: What is counted, in the name of its rate.
        """
        self._unit = unit
        self._flops = flops_per_token
        self._num_devices = len(devices)
        self._peak = peak_flops_per_second(devices[0].device_kind, dtype)
        self._local = [d for d in devices if d.process_index == jax.process_index()]
        self.total_tokens, self._total_slots = 0.0, 0
        self._total_seconds = dict.fromkeys(PARTS, 0.0)
        self._has_stopped = False
        self.restart()

    def restart(self) -> None:
        """Discards the steps and seconds since the last report."""
        self._begin = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._tokens, self._slots, self._steps = 0.0, 0, 0

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Counts the time inside the block for `part`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - begin)

    def add(self, part: str, seconds: float) -> None:
        """Counts seconds for `part`."""
        self._spent[part] += seconds

    def step_done(self, num_tokens: float, num_slots: int) -> None:
        """Counts a step over `num_tokens` valid tokens, in a batch with `num_slots` positions."""
        self._tokens += num_tokens
        self._slots += num_slots
        self._steps += 1

    def report(self) -> Scalars:
        """Returns the metrics of the steps since the last report, and starts the next interval.

        `tokens_per_second` counts valid tokens; `step_seconds`, `tflops_per_second` (per device)
        and `mfu` (0 to 1) count padding too. All are over the time of steps and of waiting for
        input. `time/<part>` is the part's share of all time, 0 to 1; `device_memory_gb` is the peak
        memory in use on a local device since the process started.
        """
        wall = max(time.perf_counter() - self._begin, 1e-9)
        self._spent["step"] += max(wall - sum(self._spent.values()), 0.0)
        running = max(self._spent["step"] + self._spent["input"], 1e-9)
        metrics = self._rates(self._tokens, self._slots, running)
        metrics["step_seconds"] = running / max(self._steps, 1)
        metrics |= {f"time/{part}": seconds / wall for part, seconds in self._spent.items()}
        stats = [d.memory_stats() for d in self._local]
        if peaks := [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]:
            metrics["device_memory_gb"] = max(peaks) / 1e9
        self.total_tokens += self._tokens
        self._total_slots += self._slots
        for part, seconds in self._spent.items():
            self._total_seconds[part] += seconds
        self.restart()
        return metrics

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part up to now, or up to `stop`; 0 before the first step."""
        if self._has_stopped or not self._has_steps:
            return dict(self._total_seconds)
        found = {part: self._total_seconds[part] + x for part, x in self._spent.items()}
        rest = time.perf_counter() - self._begin - sum(self._spent.values())
        return found | {"step": found["step"] + max(rest, 0.0)}

    @property
    def _has_steps(self) -> bool:
        return self._steps > 0 or self._total_slots > 0

    def stop(self) -> None:
        """Counts no further time; the time until now belongs to no part if there was no step."""
        if not self._has_stopped and self._has_steps:
            self.report()
        self._has_stopped = True

    def overall(self) -> Scalars:
        """Returns the mean rates over all reported steps; nothing if there were none."""
        running = self._total_seconds["step"] + self._total_seconds["input"]
        return (
            self._rates(self.total_tokens, self._total_slots, running) if self._total_slots else {}
        )

    def _rates(self, tokens: float, slots: int, seconds: float) -> Scalars:
        metrics = {f"{self._unit}_per_second": tokens / seconds}
        if self._flops is not None:
            flops_per_second = self._flops * slots / seconds / self._num_devices
            metrics["tflops_per_second"] = flops_per_second / 1e12
            if self._peak is not None:
                metrics["mfu"] = flops_per_second / self._peak
        return metrics
