"""Schedules of pipelines, idle and compiled: `python -m benchmarks.pipelines [SCHEDULE...]`.

Idle time is simulated, for the times of passes of three kinds of layers; a compiled step waits as
"lockstep" says. The rest is of programs: a step with the widths of Qwen3-30B-A3B, four layers over
two pipeline ranks and two expert ranks, compiled for four v6e, which takes minutes per schedule.
"""

import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from experiments import open_models
from moelib.core.config import did_you_mean
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.parallel.pipeline.pair import SCOPES
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from moelib.planning.hlo.program import parse
from moelib.planning.schedules import Costs, lockstep_time, simulate
from moelib.runtime.table import Table, print_table

_RANKS, _MICROBATCHES = 4, 64
# Times of F, I and W: equal; with attention, which computes scores again; with recomputed blocks.
_COSTS = Costs(), Costs(1.0, 1.5, 0.7), Costs(1.0, 2.5, 0.7)
_COMPUTE = "fusion", "custom-call"  # Other instructions forward results.


def idle_table() -> Table:
    """Returns the idle share of each schedule where ranks wait for inputs, and in lockstep."""
    sizes = _RANKS, _MICROBATCHES
    rows = []
    for schedule in Schedule:
        cells = []
        for costs in _COSTS:
            work = (
                schedule.num_chunks * _MICROBATCHES * (costs.forward + costs.input + costs.weight)
            )
            times = simulate(schedule, *sizes, costs).end, lockstep_time(schedule, *sizes, costs)
            cells.append(" / ".join(f"{1 - work / time:.1%}" for time in times))
        ticks = ticks_of(schedule, *sizes)
        kept = [n / schedule.num_chunks for n in (ticks.num_saved, ticks.num_deferred)]
        rows.append([schedule.value, *cells, *(f"{n:g}" for n in kept), f"{len(ticks.slots)}"])
    names = [f"F {x.forward:g}, I {x.input:g}, W {x.weight:g}>" for x in _COSTS]
    columns = ["schedule", *names, "saved>", "deferred>", "ticks>"]
    footnotes = (
        "Idle share where ranks wait for their inputs / for the longest slot of every tick.",
        "Saved activations and deferred weight gradients of a rank, in layers of a rank.",
    )
    return Table(f"{_RANKS} ranks, {_MICROBATCHES} micro-batches", columns, rows, footnotes)


def step(schedule: Schedule) -> Any:
    """Returns the config to compile: with smaller widths, XLA expects no time to be gained."""
    cfg = open_models.named_trainer_configs()["qwen3-30b-a3b"]()
    cfg.model.decoder.set(num_layers=4, remat=None)
    cfg.model.vocab_size = 4096
    cfg.input.set(seq_len=4096, vocab_size=4096, global_batch_size=8)
    cfg.set(evalers={}, checkpointer=None, mesh_rules=(), dir="unused", num_microbatches=4)
    cfg.mesh_shape = mesh_shape_from_axes(pipeline=2, expert=2)
    return cfg.set(pipeline_schedule=schedule)


def matmuls_under_exchanges(text: str) -> dict[str, list[list[str]]]:
    """Returns, per pass of a pair, the matmuls of the other pass under each of its all-to-alls."""
    found = {scope: list[list[str]]() for scope in SCOPES}
    scope_of = lambda each: next((scope for scope in SCOPES if scope in each.op_name), None)
    for computation in parse(text).computations.values():
        begun, under = {}, {}
        for each in computation.instructions.values():
            if each.opcode == "ragged-all-to-all-start" and scope_of(each):
                begun[each.name], under[each.name] = scope_of(each), []
            elif each.opcode == "ragged-all-to-all-done" and each.operands[0] in begun:
                found[begun.pop(each.operands[0])].append(under.pop(each.operands[0]))
            elif each.op_name.endswith(("/pallas_call", "/dot_general")):
                for start, scope in begun.items():
                    if each.opcode in _COMPUTE and scope_of(each) not in (None, scope):
                        under[start].append(each.name)
    return found


def _compiled(schedule: Schedule) -> list[str]:
    """Returns the row of a schedule's program."""
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(dump_dir=folder)
        outcome = compile_in_subprocess(step(schedule), "v6e:2x2", options, name=schedule.value)
        if outcome.report is None:
            raise SystemExit(f"{schedule.value}: {outcome.failure}")
        text = (pathlib.Path(folder) / "hlo_optimized.txt").read_text()
    figures = outcome.report.figures
    exchanges = [each for of_pass in matmuls_under_exchanges(text).values() for each in of_pass]
    kind = "ragged-all-to-all"
    return [
        schedule.value,
        f"{figures['memory.peak'] / 2**30:.2f}",
        f"{figures['memory.temporaries'] / 2**30:.2f}",
        f"{1e3 * figures['played.seconds']:.0f}",
        f"{figures['played.waits'] / figures['played.seconds']:.1%}",
        f"{figures['copy.bytes'] / 2**30:.1f}",
        f"{figures[f'{kind}.asynchronous']:.0f} of {figures[f'{kind}.count']:.0f}",
        f"{sum(map(bool, exchanges))} of {len(exchanges)}" if exchanges else "-",
    ]


def main(names: Sequence[str]) -> None:
    """Prints the tables; compiles the named schedules, or all."""
    known = {each.value: each for each in Schedule}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"There is no schedule {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is used.
    print_table(idle_table())
    rows = [_compiled(known[name]) for name in names or known]
    columns = ["schedule", "peak, GiB>", "temporaries>", "played, ms>", "waits>", "copies, GiB>"]
    columns += ["asynchronous all-to-alls>", "of pairs, over matmuls of the other pass>"]
    print_table(Table("Compiled for v6e:2x2, 2 ranks, 4 micro-batches", columns, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
