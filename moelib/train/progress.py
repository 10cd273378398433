"""What a run says while it runs, and the table at its end."""

import sys
from typing import Any, Self

from moelib.core.metrics import Scalars

_SHOWN = (  # (metric, how it is shown)
    ("loss", "loss {:.4f}"),
    ("cross_entropy", "ce {:.4f}"),
    ("learning_rate", "lr {:.2e}"),
    ("gradient_norm", "grad {:.2f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("tflops_per_second", "{:.3g} TFLOP/s"),
    ("mfu", "MFU {:.1%}"),
)


def progress_text(scalars: Scalars) -> str:
    """Returns the metrics that a progress line shows."""
    shown = [form.format(scalars[name]) for name, form in _SHOWN if name in scalars]
    same = scalars.get("cross_entropy") == scalars.get("loss")
    return "  ".join(text for text in shown if not (same and text.startswith("ce ")))


def evaluation_text(scalars: Scalars) -> str:
    """Returns the metrics of an evaluation that a line shows."""
    text = f"{progress_text(scalars)}  perplexity {scalars['perplexity']:.2f}"
    if "bits_per_byte" in scalars:
        text += f"  bits/byte {scalars['bits_per_byte']:.4f}"
    return text


class ProgressLine:
    """One live line on a terminal, plain lines elsewhere; on stderr. Use it in a `with`."""

    def __init__(self, total: int, *, start: int = 0, active: bool = True) -> None:
        """Makes the line.

        Args:
            total: The last step.
            start: Steps done before.
            active: Whether to say anything: on process 0.
        """
        self._total, self._start, self._active = total, start, active
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._active and sys.stderr.isatty():
            from rich import console, progress

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(bar_width=20),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
                console=console.Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start)
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, step: int, scalars: Scalars) -> None:
        """Shows the metrics of a step."""
        text = progress_text(scalars)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """Prints a line, above the live one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._active:
            print(text, file=sys.stderr, flush=True)


def seconds_text(seconds: float) -> str:
    """Returns a length of time as "1 h 02 min", "3 min 05 s" or "4.1 s"."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds:.1f} s"


_EXPERT_HEALTH = (  # (end of the metric's name, title, form)
    ("load_max_over_mean", "busiest expert / mean load", "{:.2f}"),
    ("dead_experts", "experts without a token", "{:.1f}"),
    ("entropy", "router entropy, nats", "{:.3f}"),
    ("drop_rate", "choices dropped / all", "{:.4f}"),
    ("logit_rms", "router logits, rms", "{:.3f}"),
    ("bias_range", "router bias, range", "{:.4f}"),
)


def expert_health(scalars: Scalars) -> list[tuple[str, str]]:
    """Returns (title, "mean (worst layer ...)") for each metric of routing that is there."""
    rows = []
    for end, title, form in _EXPERT_HEALTH:
        values = [x for name, x in scalars.items() if _is_layer_metric(name, end)]
        if not values:
            continue
        mean = sum(values) / len(values)
        worst = min(values) if end == "entropy" else max(values)
        rows.append((title, f"{form.format(mean)} (worst layer {form.format(worst)})"))
    return rows


def _is_layer_metric(name: str, end: str) -> bool:
    """Returns whether the last part of a metric's name, but for a number, is `end`."""
    return [part for part in name.split("/") if not part.isdigit()][-1] == end


def print_summary(title: str, rows: list[tuple[str, str]], health: list[tuple[str, str]]) -> None:
    """Prints the table at the end of a run to stdout."""
    from rich import box, console, table

    shown = table.Table(title=title, box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in rows:
        shown.add_row(name, value)
    if health:
        shown.add_section()
        for name, value in health:
            shown.add_row(name, value)
    width = None if sys.stdout.isatty() else 120  # A file has none of its own.
    console.Console(highlight=False, markup=False, width=width).print(shown)
