"""Metrics as text: the progress line, the line of an evaluation, the table at the end of a run."""

import dataclasses
from collections.abc import Mapping, Sequence

from moelib.core.metrics import Scalars
from moelib.core.progress import format_seconds
from moelib.core.table import Table

_SHOWN = (  # (metric, format)
    ("loss", "loss {:.4f}"),
    ("cross_entropy", "ce {:.4f}"),
    ("learning_rate", "lr {:.2e}"),
    ("gradient_norm", "grad {:.2f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("tflops_per_second", "{:.3g} TFLOP/s"),
    ("mfu", "MFU {:.1%}"),
)

_EXPERT_HEALTH = (  # (last part of the metric's name, title, format)
    ("load_max_over_mean", "busiest expert / mean load", "{:.2f}"),
    ("dead_experts", "experts without a token", "{:.1f}"),
    ("entropy", "router entropy, nats", "{:.3f}"),
    ("drop_rate", "dropped / all assignments", "{:.4f}"),
    ("logit_rms", "router logits, RMS", "{:.3f}"),
    ("bias_range", "router bias, range", "{:.4f}"),
)


def progress_text(scalars: Scalars, *, num_steps: int = 1) -> str:
    """Returns the main metrics of a step as one line.

    Args:
        scalars: Metrics by name; `loss` and `cross_entropy` are means over the last steps.
        num_steps: Number of steps that these means are over.
    """
    shown = [form.format(scalars[name]) for name, form in _SHOWN if name in scalars]
    if scalars.get("cross_entropy") == scalars.get("loss"):
        shown = [text for text in shown if not text.startswith("ce ")]
    if num_steps > 1:
        shown.insert(1, f"(mean of {num_steps} steps)")
    return "  ".join(shown)


def evaluation_text(scalars: Scalars) -> str:
    """Returns the metrics of an evaluation as one line."""
    text = f"{progress_text(scalars)}  perplexity {scalars['perplexity']:.2f}"
    if "bits_per_byte" in scalars:
        text += f"  bits/byte {scalars['bits_per_byte']:.4f}"
    return text


def expert_health(scalars: Scalars) -> list[tuple[str, str]]:
    """Returns (title, "mean (worst layer ...)") of each routing metric."""
    rows = []
    for suffix, title, form in _EXPERT_HEALTH:
        values = [value for name, value in scalars.items() if _is_layer_metric(name, suffix)]
        if values:
            mean, worst = sum(values) / len(values), (min if suffix == "entropy" else max)(values)
            rows.append((title, f"{form.format(mean)} (worst layer {form.format(worst)})"))
    return rows


def _is_layer_metric(name: str, suffix: str) -> bool:
    """Returns whether the last part of a metric's name that is not a layer's index is `suffix`."""
    return [part for part in name.split("/") if not part.isdigit()][-1] == suffix


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """Outcome of a run, for its final table.

    Attributes:
        name: Name of the trainer.
        step: Last step taken.
        max_step: Step at which the run was to end.
        start_step: Step that the run resumed from; 0 for a new run.
        stopped_by: Reason for an earlier end, or None.
        loss: Mean loss over the last steps, nats per token; None if no step was taken.
        num_loss_steps: Number of these steps.
        metrics: Metrics of the last step.
        evaluations: Latest metrics of each evaler, by its name.
        rates: Mean rates of the steps (`Throughput.overall`), and `device_memory_gb`.
        seconds: Time spent on each kind of work, in seconds.
        wall_seconds: Duration of the run.
        files: (kind, path) of everything that the run wrote.
    """

    name: str
    step: int
    max_step: int
    start_step: int = 0
    stopped_by: str | None = None
    loss: float | None = None
    num_loss_steps: int = 0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluations: Mapping[str, Scalars] = dataclasses.field(default_factory=dict)
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    wall_seconds: float = 0.0
    files: Sequence[tuple[str, str]] = ()

    def table(self) -> Table:
        """Returns the final table: progress, speed, files, and the health of the experts."""
        steps = f"{self.step} of {self.max_step}"
        if self.start_step:
            steps += f", from {self.start_step}"
        if self.stopped_by:
            steps += f" ({self.stopped_by})"
        rows = [("steps", steps)]
        if self.loss is not None:
            over = f" (mean of the last {self.num_loss_steps} steps)"
            rows.append(("loss", f"{self.loss:.4f}{over if self.num_loss_steps > 1 else ''}"))
        rows += [(name, evaluation_text(found)) for name, found in self.evaluations.items()]
        rows += [
            (title, form(self.rates[name])) for name, title, form in _RATES if name in self.rates
        ]
        split = ", ".join(
            f"{part} {format_seconds(s)}" for part, s in self.seconds.items() if s >= 0.05
        )
        rows.append(("wall", format_seconds(self.wall_seconds) + (f" ({split})" if split else "")))
        rows += self.files
        if health := expert_health(dict(self.metrics)):
            rows += [(), *health]
        return Table(f"{self.name}: {steps}", ("", ""), rows)


_RATES = (  # (metric, title, format)
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("tflops_per_second", "TFLOP/s per device", "{:.3g}".format),
    ("mfu", "MFU", "{:.1%}".format),
    ("device_memory_gb", "device memory", "{:.2f} GB at most".format),
)
