"""The table at the end of a run."""

import os
from typing import TYPE_CHECKING

from moelib.train import progress
from moelib.train.progress import seconds_text

if TYPE_CHECKING:
    from moelib.train.loop import TrainLoop


def report_run(loop: "TrainLoop", *, wall_seconds: float) -> None:
    """Prints how far a run came, how fast, how healthy its experts are, and what it wrote."""
    trainer, cfg = loop.trainer, loop.trainer.config
    steps = f"{trainer.step} of {cfg.max_step}"
    if loop.start_step:
        steps += f", from {loop.start_step}"
    if loop.stopped_by:
        steps += f" ({loop.stopped_by})"
    rows = [("steps", steps)]
    if "loss" in loop.last:
        rows.append(("loss", f"{loop.last['loss']:.4f}"))
    for name, scalars in loop.evaler_summaries.items():
        text = f"loss {scalars['loss']:.4f}, perplexity {scalars['perplexity']:.2f}"
        if "bits_per_byte" in scalars:
            text += f", bits/byte {scalars['bits_per_byte']:.4f}"
        rows.append((name, text))
    rows += _speed(loop, wall_seconds)
    rows += _files(loop)
    progress.print_summary(f"{cfg.name}: {steps}", rows, progress.expert_health(loop.last))


def _speed(loop: "TrainLoop", wall_seconds: float) -> list[tuple[str, str]]:
    rows = []
    speed = loop.throughput.overall()
    if loop.throughput.total_tokens:
        rows.append(("tokens/s", f"{speed['tokens_per_second']:,.0f}"))
        if "tflops_per_second" in speed:
            rows.append(("TFLOP/s a device", f"{speed['tflops_per_second']:.3g}"))
        if "mfu" in speed:
            rows.append(("MFU", f"{speed['mfu']:.1%}"))
    if "device_memory_gb" in loop.last_report:
        rows.append(("device memory", f"{loop.last_report['device_memory_gb']:.2f} GB at most"))
    parts = loop.throughput.total_seconds.items()
    split = ", ".join(f"{part} {seconds_text(s)}" for part, s in parts if s >= 0.05)
    rows.append(("wall", seconds_text(wall_seconds) + (f" ({split})" if split else "")))
    return rows


def _files(loop: "TrainLoop") -> list[tuple[str, str]]:
    trainer = loop.trainer
    files = [("config", loop.config_path)]
    writer = trainer.summary_writer.config
    if "json_lines" in writer.formats:
        files.append(("metrics", writer.jsonl_path))
    if "tensorboard" in writer.formats:
        files.append(("TensorBoard", writer.dir))
    if trainer.config.checkpointer is not None and trainer.checkpointer.latest_step() is not None:
        newest = f"step {trainer.checkpointer.latest_step()} in {trainer.checkpointer.config.dir}"
        files.append(("checkpoint", newest))
    if trainer.config.start_trace_steps:
        files.append(("traces", os.path.join(trainer.config.dir, "profile")))
    return files
