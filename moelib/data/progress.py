"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as people read it, such as "1.3 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


class Progress:
    """Says on stderr how far work on a known number of bytes is."""

    def __init__(self, title: str) -> None:
        """`title` begins every line."""
        self._title = title

    def say(self, text: str) -> None:
        """Prints a line."""
        print(f"{self._title}: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def of(self, total: int) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called with the bytes that have been done since."""
        if sys.stderr.isatty():
            with self._bar(total) as advance:
                yield advance
        else:
            yield self._lines(total)

    @contextlib.contextmanager
    def _bar(self, total: int) -> Iterator[Callable[[int], None]]:
        from rich import console, progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
            task = bar.add_task(self._title, total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)

    def _lines(self, total: int) -> Callable[[int], None]:
        start = last = time.monotonic()
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal last, done
            done += num_bytes
            now = time.monotonic()
            if now - last >= _SECONDS_BETWEEN_LINES:
                last = now
                rate = format_bytes(done / (now - start))
                self.say(f"{format_bytes(done)} of {format_bytes(total)}, {rate}/s")

        return advance
