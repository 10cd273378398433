"""Metrics of a run in `metrics.jsonl`: a JSON object per line, with a step. Needs no JAX."""

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.runs.folder import METRICS_FILE
from moelib.runtime import storage
from moelib.runtime.storage import parse_json, readable

logger = logging.getLogger(__name__)

_OF_TRAINING = b'"mean_loss": '  # In lines of training, and not of evaluations.
_LINES_PER_CHECK = 20  # Lines between looks at the clock.


def read_metrics(
    run: str | os.PathLike[str], names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yields the lines of a run's metrics, oldest first, one at a time; none without the file.

    A line that is damaged or incomplete is skipped, and named in a warning at the end.

    Args:
        run: Folder of the run, or path of its file.
        names: Metrics to read; by default all, which takes several times as long.

    Raises:
        UserError: If the file cannot be read.
    """
    reader = MetricsReader(run, names)
    with readable(reader.path):
        yield from reader.read()
    if text := reader.damage():
        logger.warning("%s: %s.", reader.path, text)


class MetricsReader:
    """Reads a run's metrics, and later the lines that were appended since."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        names: Sequence[str] = (),
        *,
        only_last: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            run: Folder of the run, or path of its file.
            names: Metrics to read; by default all.
            only_last: Whether all lines of training but the last are skipped, unread.
        """
        run = os.fspath(run)
        self.path = run if run.endswith(".jsonl") else os.path.join(run, METRICS_FILE)
        as_written = lambda name: json.dumps(name)[1:-1].encode()
        self._names = {as_written(x): x for x in ("step", *names)} if names else {}
        pattern = b'"(%s)": ([^,}]+)' % b"|".join(map(re.escape, self._names))
        self._pattern, self._only_last = re.compile(pattern), only_last
        self.reset()

    def reset(self) -> None:
        """Goes back to the beginning of the file."""
        self.offset = 0  # Bytes read.
        self.damaged: list[int] = []  # Numbers of damaged lines, from 1.
        self.incomplete = 0  # Bytes after the last line, which is still written or was cut off.
        self.is_complete = False  # Whether the last call of `read` came to the end of the file.
        self._num_lines = 0
        self._file_id: tuple[int, int] | None = None

    def is_replaced(self) -> bool:
        """Returns whether the file is another one than before, or shorter: a run has resumed."""
        if storage.is_remote(self.path):
            return self.offset > storage.size(self.path)
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return self.offset > 0
        is_other = (stat.st_dev, stat.st_ino) != self._file_id or stat.st_size < self.offset
        return self.offset > 0 and is_other

    def read(self, seconds: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yields the lines that are new since the last call, {name: number, or None for NaN}.

        After about `seconds` it ends; the next call goes on where it ended.
        """
        self.is_complete, end = True, time.monotonic() + seconds
        if not storage.exists(self.path):
            return
        skipped = b""
        with storage.open_to_read(self.path, "rb") as file:
            if not storage.is_remote(self.path):
                stat = os.fstat(file.fileno())
                self._file_id = stat.st_dev, stat.st_ino
            file.seek(self.offset)
            self.incomplete = 0
            for line in file:
                if not line.endswith(b"\n"):
                    self.incomplete = len(line)
                    break
                self.offset += len(line)
                self._num_lines += 1
                if self._only_last and _OF_TRAINING in line and _is_whole(line):
                    skipped = line
                else:
                    yield from self._parsed(line)
                if self._num_lines % _LINES_PER_CHECK == 0 and time.monotonic() > end:
                    self.is_complete = False
                    break
        yield from self._parsed(skipped) if skipped else ()

    def _parsed(self, line: bytes) -> Iterator[dict[str, Any]]:
        """Yields the values of a line, unless it is damaged."""
        try:
            if self._names and _is_whole(line):
                pairs = self._pattern.findall(line)
                found: dict[str, Any] = {
                    self._names[k]: None if v == b"null" else float(v) for k, v in pairs
                }
                if len(found) < len(pairs):  # The end of a line is missing, and another follows.
                    raise ValueError("A name is there twice.")
            else:
                found = parse_json(line)
            step = int(found["step"])
        except (ValueError, TypeError, KeyError, OverflowError):
            self.damaged.append(self._num_lines)
        else:
            yield {**found, "step": step}

    def damage(self) -> str:
        """Returns a sentence on the lines that are skipped; an empty string if there are none."""
        texts = []
        if self.damaged:
            more = f" and {len(self.damaged) - 5} more" if len(self.damaged) > 5 else ""
            numbers = ", ".join(map(str, self.damaged[:5]))
            texts.append(f"damaged lines are skipped: {numbers}{more}")
        if self.incomplete:
            texts.append(f"the last line, of {self.incomplete} bytes, is incomplete")
        return "; ".join(texts)


def _is_whole(line: bytes) -> bool:
    return line.startswith(b'{"step": ') and line.endswith(b"}\n")
