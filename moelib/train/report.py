"""Metrics as text: the progress line, the line of an evaluation, rows of the final table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moelib.core.metrics import Scalars
from moelib.runtime.progress import format_seconds

if TYPE_CHECKING:  # Needs Orbax, and the status page does not.
    from moelib.train.watcher import Run

_SHOWN = (  # (metric, format)
    ("loss", "loss {:.4f}"),
    ("cross_entropy", "ce {:.4f}"),
    ("learning_rate", "lr {:.2e}"),
    ("gradient_norm", "grad {:.2f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("examples_per_second", "{:,.0f} examples/s"),
    ("tflops_per_second", "{:.3g} TFLOP/s"),
    ("mfu", "MFU {:.1%}"),
)

EXPERT_HEALTH = (  # (last part of the metric's name, title, format)
    ("load_max_over_mean", "busiest expert / mean load", "{:.2f}"),
    ("dead_experts", "experts without a token", "{:.1f}"),
    ("entropy", "router entropy, nats", "{:.3f}"),
    ("drop_rate", "dropped / all assignments", "{:.4f}"),
    ("logit_rms", "router logits, RMS", "{:.3f}"),
    ("bias_range", "router bias, range", "{:.4f}"),
)


def progress_text(scalars: Scalars, *, num_steps: int = 1) -> str:
    """Returns the main metrics of a step as one line.

    `loss` and `cross_entropy` are means over the last `num_steps` steps.
    """
    shown = [form.format(scalars[name]) for name, form in _SHOWN if name in scalars]
    if scalars.get("cross_entropy") == scalars.get("loss"):
        shown = [text for text in shown if not text.startswith("ce ")]
    if num_steps > 1:
        shown.insert(1, f"(mean of {num_steps} steps)")
    if skipped := scalars.get("skipped_steps"):
        shown.append(f"{skipped:.0f} steps skipped")
    return "  ".join(shown)


def evaluation_text(scalars: Scalars) -> str:
    """Returns the metrics of an evaluation as one line."""
    if "perplexity" not in scalars:
        return "  ".join(f"{name} {value:.4g}" for name, value in scalars.items())
    text = f"{progress_text(scalars)}  perplexity {scalars['perplexity']:.2f}"
    if "bits_per_byte" in scalars:
        text += f"  bits/byte {scalars['bits_per_byte']:.4f}"
    return text


def expert_health(scalars: Scalars) -> list[tuple[str, str]]:
    """Returns (title, "mean (worst layer ...)") of each routing metric."""
    rows = []
    for suffix, title, form in EXPERT_HEALTH:
        values = [value for name, value in scalars.items() if _is_layer_metric(name, suffix)]
        if values:
            mean, worst = sum(values) / len(values), (min if suffix == "entropy" else max)(values)
            rows.append((title, f"{form.format(mean)} (worst layer {form.format(worst)})"))
    return rows


def _is_layer_metric(name: str, suffix: str) -> bool:
    """Returns whether a metric of a layer, "path/name" or "path/name/index", is named `suffix`."""
    parts = [part for part in name.split("/") if not part.isdigit()]
    return len(parts) > 1 and parts[-1] == suffix


_RATES = (  # (metric, title, format)
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("examples_per_second", "examples/s", "{:,.0f}"),
    ("tflops_per_second", "TFLOP/s per device", "{:.3g}"),
    ("mfu", "MFU", "{:.1%}"),
    ("device_memory_gb", "device memory", "{:.2f} GB at most"),
)


def rates(scalars: Scalars) -> list[tuple[str, str]]:
    """Returns (title, text) of each rate of a run, and of the peak memory of a device."""
    return [(title, form.format(scalars[name])) for name, title, form in _RATES if name in scalars]


def wall_time(wall_seconds: float, seconds: Mapping[str, float]) -> str:
    """Returns the duration of a run, with the seconds spent on each kind of work."""
    parts = [f"{part} {format_seconds(time)}" for part, time in seconds.items() if time >= 0.05]
    return format_seconds(wall_seconds) + (f" ({', '.join(parts)})" if parts else "")


def steps_text(run: "Run") -> str:
    """Returns the steps of a run that has ended, and what stopped it."""
    text = f"{run.step} of {run.config.max_step}"
    if run.start.step:
        text += f", from {run.start.step}"
    return f"{text} ({run.stopped_by})" if run.stopped_by else text


def files(run: "Run", writer: Any, saved_step: int | None) -> list[tuple[str, str]]:
    """Returns (kind, path) of everything that a run wrote.

    `writer` is the config of its `SummaryWriter`; `saved_step` that of its last checkpoint.
    """
    found = [("config", run.folder.config_file)]
    if "json_lines" in writer.formats:
        found.append(("metrics", writer.jsonl_path))
    if "tensorboard" in writer.formats:
        found.append(("TensorBoard", writer.dir))
    if run.checkpointer is not None and saved_step is not None:
        found.append(("checkpoint", f"step {saved_step} in {run.checkpointer.config.dir}"))
    return found
