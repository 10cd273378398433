"""Training steps compiled for four v6e, compared with MaxText's: `python -m benchmarks.compiled`.

Named configs, cut to four layers where a column of MaxText was made so, are compiled ahead of time
as `moelib plan --current_mesh --compile=1` does. A step takes minutes. The
MaxText columns are files in `experiments/`: its main branch of 2026-11-22, compiled by the same
compiler with the same options, counted by `moelib.planning`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import gpt_oss, open_models
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.planning.compiled.in_subprocess import CompileOptions
from moelib.planning.plan import plan
from moelib.planning.report.figures import Column, read_columns
from moelib.runtime.table import Table, print_table

_EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"
_TOPOLOGY = "v6e:2x2"
_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
_HEADER = ("per device and step", "moelib>", "MaxText>", "ratio>")


@dataclasses.dataclass(frozen=True)
class Job:
    """A config, and the file of MaxText's figures, if there is one."""

    name: str
    trainer_config: Any
    maxtext: str | None


def _cut(name: str, **mesh_axes: int) -> Any:
    """Returns a named config with four layers, one sequence of 4,096 tokens per device."""
    cfg = open_models.named_trainer_configs()[name]()
    cfg.model.decoder.num_layers = 4
    cfg.input.set(seq_len=4096, global_batch_size=4)
    cfg.mesh_shape = mesh_shape_from_axes(**mesh_axes)
    return cfg


def jobs() -> list[Job]:
    """Returns the jobs; nothing was tuned on the last."""
    return [
        Job("gpt-oss-3b-v6e4", gpt_oss.named_trainer_configs()["gpt-oss-3b-v6e4"](), "gpt_oss"),
        Job("qwen3-30b-a3b, 4 layers", _cut("qwen3-30b-a3b", fsdp=2, expert=2), "qwen"),
        Job("llama-3.1-8b, 4 layers", _cut("llama-3.1-8b", fsdp=4), "llama"),
        Job("deepseek-v2-lite, 4 layers", _cut("deepseek-v2-lite", fsdp=2, expert=2), None),
    ]


def table(name: str, ours: Mapping[str, Any], others: Sequence[Column]) -> Table:
    """Returns the figures of a step next to MaxText's, and their ratios."""
    theirs = others[0].figures if others else {}
    sent = lambda values: sum(values.get(f"{kind}.bytes", 0) for kind in _COLLECTIVES)
    kinds = (*_COLLECTIVES, "ragged-all-to-all")
    pairs = [
        ("peak memory, GiB", "memory.peak", 2**30, "{:.3f}"),
        ("ragged-all-to-all, MiB", "ragged-all-to-all.bytes", 2**20, "{:,.1f}"),
        ("rows computed / routed", "rows_computed_over_routed", 1, "{:.2f}"),
        ("Mcycles", "cycles", 1e6, "{:.1f}"),
        ("XLA's matmul, TFLOP", "matmul_flops", 1e12, "{:.3f}"),
        ("kernels, TFLOP", "kernel_flops", 1e12, "{:.3f}"),
        ("compile, CPU s", "seconds.compile_cpu", 1, "{:.0f}"),
    ]
    rows = [
        _row(label, ours.get(key), theirs.get(key), scale, text)
        for label, key, scale, text in pairs
    ]
    rows[1:1] = [_row("other collectives, MiB", sent(ours), sent(theirs), 2**20, "{:,.1f}")]
    rows += [_async_row(kind, ours, theirs) for kind in kinds if f"{kind}.count" in ours]
    return Table(name, _HEADER, rows)


def _row(label: str, ours: Any, theirs: Any, scale: float, text: str) -> tuple[str, ...]:
    cells = [text.format(value / scale) if value else "-" for value in (ours, theirs)]
    return (label, *cells, f"{ours / theirs:.2f}" if ours and theirs else "-")


def _async_row(
    kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[str, str, str, str]:
    def cell(values: Mapping[str, Any]) -> str:
        if f"{kind}.asynchronous" not in values:
            return "-"
        return f"{values[f'{kind}.asynchronous']} of {values[f'{kind}.count']}"

    return f"{kind}, asynchronous", cell(ours), cell(theirs), ""


def main() -> None:
    """Compiles every job and prints its table."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is used.
    for job in jobs():
        found = plan(job.trainer_config, _TOPOLOGY, current_mesh=True, name=job.name)
        (step,) = found.compile_best(1, CompileOptions(), show_progress=True)
        if step.report is None:
            raise SystemExit(f"{job.name}: {step.outcome.failure}")
        path = _EXPERIMENTS / f"{job.maxtext}_maxtext.json"
        others = read_columns(str(path)) if job.maxtext else []
        print_table(table(job.name, step.report.figures, others))


if __name__ == "__main__":
    main()
