"""Curves of a run's metrics in bounded memory, however many steps the run has."""

import math
import re
from typing import Any

from moelib.runs.metrics_file import MetricsReader


class Curve:
    """Values by step, as mean, least and largest of buckets of equal width."""

    def __init__(self, limit: int) -> None:
        """Starts without values. `limit` is the number of buckets, 0 for none."""
        self.last: tuple[int, float | None] = (0, None)  # Step and value; None if not finite.
        self.least: tuple[int, float] = (0, math.inf)
        self._limit, self._width = limit, 1
        self._buckets: dict[int, list[float]] = {}  # [steps, values, least, largest, number].

    def add(self, step: int, value: Any) -> None:
        """Adds a value; one that is no finite number is only kept as the last."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.last = step, None
            return
        self.last = step, value
        if value < self.least[1]:
            self.least = step, value
        if self._limit:
            self._merge(step // self._width, [step, value, value, value, 1])
            if len(self._buckets) > self._limit:
                old, self._buckets, self._width = self._buckets, {}, self._width * 2
                for key, bucket in old.items():
                    self._merge(key // 2, bucket)

    def _merge(self, key: int, new: list[float]) -> None:
        if (old := self._buckets.get(key)) is None:
            self._buckets[key] = new
            return
        old[0] += new[0]
        old[1] += new[1]
        old[2], old[3] = min(old[2], new[2]), max(old[3], new[3])
        old[4] += new[4]

    def points(self) -> list[tuple[float, float, float, float]]:
        """Returns (mean of the steps, mean, least, largest value) of each bucket, by step."""
        found = ((x[0] / x[4], x[1] / x[4], x[2], x[3]) for x in self._buckets.values())
        return sorted(found)


class RunMetrics:
    """The curves of a run, brought up to date on demand."""

    def __init__(self, reader: MetricsReader, names: str = "", limit: int = 160) -> None:
        """Reads nothing yet.

        Args:
            reader: Reader of the run's metrics.
            names: Regex of the metrics to keep; by default all.
            limit: Number of points of a curve; 0 for the last and the least value only.
        """
        self.reader, self._limit = reader, limit
        self._names = re.compile(names) if names else None
        self.curves: dict[str, Curve] = {}  # By metric.
        self._ignored: set[str] = {"step"}

    def update(self, seconds: float = math.inf) -> bool:
        """Reads new lines for at most about `seconds`; returns whether all have been read.

        A file that was replaced, by a run that resumed, is read from its beginning.
        """
        if self.reader.is_replaced():
            self.reader.reset()
            self.curves = {}
        for line in self.reader.read(seconds):
            self._add(line)
        return self.reader.is_complete

    def _add(self, line: dict[str, Any]) -> None:
        step = line["step"]
        for name, value in line.items():
            if name in self._ignored:
                continue
            if name not in self.curves:
                if self._names and not self._names.fullmatch(name):
                    self._ignored.add(name)
                    continue
                self.curves[name] = Curve(self._limit)
            self.curves[name].add(step, value)

    def last(self, name: str) -> float | None:
        """Returns the last value of a metric; None if there is none, or it is not finite."""
        return self.curves[name].last[1] if name in self.curves else None
