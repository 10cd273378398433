"""Progress of long work: one bar on a terminal, plain lines elsewhere; on stderr."""

import sys
import time
from typing import Any, Self


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes with a decimal unit, such as "1.3 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Returns a duration as "1 h 02 min", "3 min 05 s" or "4.1 s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{seconds:.1f} s"


class Progress:
    """A progress display for a `with` block.

    with Progress("step", total=700) as progress:
        progress.update(10, "loss 4.04")
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        start: int = 0,
        unit: str = "",
        enabled: bool = True,
        seconds_between_lines: float = 0.0,
    ) -> None:
        """Creates the display; nothing is shown before the `with` block.

        Args:
            title: First word of each line, such as "step" or "prepare".
            total: Amount of work, or None if unknown.
            start: Work completed earlier, which does not count towards the rate.
            unit: "B" if work is counted in bytes, else "".
            enabled: Whether to show anything; true on process 0 only.
            seconds_between_lines: Minimum time between plain lines where stderr is no terminal.
        """
        self._title, self._total, self._unit = title, total, unit
        self._start = self._completed = start
        self._enabled, self._interval = enabled, seconds_between_lines
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        self._began = self._last_line = time.monotonic()
        if self._enabled and sys.stderr.isatty():
            self._bar = _bar(self._total is not None)
            self._bar.start()
            self._task = self._bar.add_task(
                self._title, total=self._total, completed=self._completed, text=""
            )
            self.update()
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, amount: int) -> None:
        """Adds completed work."""
        self.update(self._completed + amount)

    def update(self, completed: int | None = None, text: str = "") -> None:
        """Sets the completed work, in total, and the text shown after it."""
        if completed is not None:
            self._completed = completed
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self._completed,
                description=self._headline(),
                text=text or self._rate(),
            )
            return
        now = time.monotonic()
        if now - self._last_line >= self._interval:
            self._last_line = now
            self.log("  ".join(filter(None, (self._headline(), text or self._rate()))))

    def log(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._enabled:
            print(text, file=sys.stderr, flush=True)

    def _headline(self) -> str:
        if self._total is None:
            return self._title
        if self._unit == "B":
            return f"{self._title} {format_bytes(self._completed)}/{format_bytes(self._total)}"
        return f"{self._title} {self._completed}/{self._total}"

    def _rate(self) -> str:
        """Returns the mean rate in bytes per second since the start, if work is in bytes."""
        seconds = time.monotonic() - self._began
        if self._unit != "B" or seconds <= 0:
            return ""
        return f"{format_bytes((self._completed - self._start) / seconds)}/s"


def _bar(has_total: bool) -> Any:
    """Returns a rich display whose text is cut, not its bar, on a narrow terminal."""
    from rich import console, progress, table

    title = table.Column(no_wrap=True)
    text = table.Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}", markup=False, table_column=title)
    ]
    if has_total:
        columns += [progress.BarColumn(bar_width=20), progress.TimeRemainingColumn()]
    else:
        columns.insert(0, progress.SpinnerColumn())
    columns.append(progress.TextColumn("{task.fields[text]}", markup=False, table_column=text))
    return progress.Progress(
        *columns, console=console.Console(stderr=True, emoji=False), expand=True
    )
