"""`moelib plan`: memory, time and cost of a config's training step on hardware that is not present.

moelib plan --module=experiments.open_models --config=qwen3-30b-a3b --topology=v6e:8x8,h100:8x8

Every legal mesh, batch per device and remat is estimated in seconds. With --compile the best ones
are compiled, as the step that `moelib train` runs: bytes and counts are then the program's, and
cycles the compiler's estimate, without kernels and collectives.
"""

import dataclasses
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moelib import launch
from moelib.core.errors import UsageError
from moelib.runtime.command_line import check_file, flag, no_arguments
from moelib.runtime.storage import write_json
from moelib.runtime.table import print_table

if TYPE_CHECKING:
    from moelib.planning.plan import CompiledStep, Plan
    from moelib.planning.report.figures import Column
    from moelib.planning.report.step_report import Finding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.ConfigFlags):
    """Flags of the command."""

    topology: tuple[str, ...] = flag(
        (), "Hardware, such as v6e:2x2,2*v5p:4x4x4,h100:2x8.", split=True
    )
    mesh: str | None = flag(
        None, "Sizes of mesh axes, such as fsdp=2,expert=-1, or auto; by default all meshes."
    )
    model_shards: int | None = flag(None, launch.MODEL_SHARDS, lower_bound=1)
    current_mesh: bool = flag(False, "Plan the config's own mesh, micro-batches and remat only.")
    tokens: float | None = flag(None, "Tokens of the whole run, for its days and dollars.")
    budget: float | None = flag(None, "Dollars of the whole run; excludes meshes that cost more.")
    prices: str | None = flag(None, "JSON file of dollars per device-hour by accelerator.")
    rows: int = flag(20, "Largest number of rows.", lower_bound=1)
    json: str | None = flag(None, "File for rows and reports.")
    schedule: tuple[str, ...] = flag(
        (), "Pipeline schedules to draw instead, such as zb-v:4x8,dualpipe-v:4x8.", split=True
    )
    goodput: tuple[str, ...] = flag(
        (), "Numbers of devices, such as 256,16384, whose goodput to estimate instead.", split=True
    )
    device_mtbf: float = flag(50_000.0, "Hours between failures of a device, with --goodput.")
    restart: float = flag(600.0, "Seconds from a failure to the next step, with --goodput.")
    save: float = flag(5.0, "Seconds that a checkpoint stops the steps, with --goodput.")
    write: float = flag(60.0, "Seconds until a checkpoint is complete, with --goodput.")
    interval: float | None = flag(
        None, "Seconds between checkpoints, with --goodput; by default the best."
    )
    compile: int = flag(0, "Number of the best meshes to compile.", lower_bound=0)
    timeout: float | None = flag(None, "Time limit for compiling one step, in seconds.")
    compiler_option: tuple[str, ...] = flag(
        (), "Compiler option in addition to those of training, as name=value."
    )
    dump: str | None = flag(None, "Folder for a compiled step at each stage, with a report.")
    top: int = flag(0, "Number of costliest functions and instructions to list.", lower_bound=0)
    compare: tuple[str, ...] = flag(
        (), "File of a report, or of figures by key, to show in another column."
    )

    def check(self) -> None:
        """Raises UsageError if flags contradict each other, or a file cannot be written."""
        if self.schedule or self.goodput:
            return
        if not self.topology:
            raise UsageError("--topology is required: the hardware, such as v6e:2x2,h100:1x8.")
        if self.compare and self.compile != 1:
            raise UsageError(f"--compile={self.compile}: --compare requires --compile=1.")
        for name in ("dump", "top", "compiler_option", "timeout"):
            if getattr(self, name) and not self.compile:
                raise UsageError(f"--{name} requires --compile=1 or more.")
        check_file("json", self.json)

    def compiler_options(self) -> dict[str, str]:
        """Returns the compiler options. Raises UsageError if one is not name=value."""
        pairs = [text.lstrip("-").partition("=") for text in self.compiler_option]
        for name, equals, _ in pairs:
            if not equals:
                raise UsageError(f"--compiler_option={name}: write it as name=value.")
        return {name: value for name, _, value in pairs}


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints estimates and figures of compiled steps. Exits with 1 if a step did not compile."""
    no_arguments(arguments, Flags)
    flags.check()
    if flags.schedule:
        _print_schedules(flags.schedule)
        return
    if flags.goodput:
        _print_goodput(flags)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is used.
    gc.set_threshold(50_000)  # Searches through JAX's objects for cycles take a tenth of a sweep.
    from moelib.planning.report.figures import read_columns
    from moelib.runs import phases

    columns = [column for path in flags.compare for column in read_columns(path)]
    cfg = flags.load()
    parts = phases.each(cfg)
    if len(parts) > 1:
        phases.check_ends(cfg)
    plans = {}
    for name, of_phase in parts.items():
        phase_flags = flags
        if len(parts) > 1:
            print(f"\n{phases.steps_text(of_phase)}")
            share = phases.num_tokens(of_phase) / sum(map(phases.num_tokens, parts.values()))
            phase_flags = dataclasses.replace(
                flags,
                dump=flags.dump and os.path.join(flags.dump, name),
                tokens=flags.tokens and flags.tokens * share,
            )
        plans[name] = _plan(phase_flags, of_phase, columns)
    if flags.json:
        found = {name: plan.to_json(flags.rows) for name, plan in plans.items()}
        write_json(flags.json, found if len(parts) > 1 else next(iter(found.values())), indent=1)
    if any(step.report is None for plan in plans.values() for step in plan.compiled):
        raise SystemExit(1)


def _plan(flags: Flags, cfg: Any, columns: Sequence["Column"]) -> "Plan":
    """Prints and returns the plan of a config, with the steps that are compiled."""
    from moelib.planning.compiled.dump import make_folder
    from moelib.planning.compiled.in_subprocess import CompileOptions
    from moelib.planning.estimate.estimate import MEMORY_ERROR
    from moelib.planning.estimate.sweep import read_prices
    from moelib.planning.plan import plan

    options = CompileOptions(flags.compiler_options(), flags.timeout, flags.dump)
    if flags.dump:
        make_folder(flags.dump)
    found = plan(
        cfg,
        flags.topology,
        mesh=launch.mesh_of_flags(cfg, flags.mesh, flags.model_shards),
        current_mesh=flags.current_mesh,
        tokens=flags.tokens,
        budget=flags.budget,
        prices=read_prices(flags.prices) if flags.prices else None,
        name=flags.config or "config",
        show_progress=True,
    )
    for reason in found.refused:
        print(f"Excluded: {reason}", file=sys.stderr)
    print_table(found.table(flags.rows))
    if flags.compile and not found.rows[0].fits:
        print(
            f"By the estimate, with {MEMORY_ERROR:.0%} for its error, no mesh is sure to fit; the "
            "compiled figure of the nearest decides.",
            file=sys.stderr,
        )
    steps = []
    for step in found.compile_best(flags.compile, options, show_progress=True):
        steps.append(step)
        _print_step(step, columns, flags.top)
    found = dataclasses.replace(found, compiled=tuple(steps))
    for topologies, finding in (*found.mesh_findings(), *found.scaling_findings()):
        _print_finding(finding, f"{topologies}: ")
    return found


def _print_schedules(texts: Sequence[str]) -> None:
    from moelib.planning.schedules import schedule_timelines, schedules_table

    timelines = schedule_timelines(texts)
    print_table(schedules_table(timelines))
    for text, timeline in timelines.items():
        print(f"\n{text}\n{timeline.chart()}")


def _print_goodput(flags: Flags) -> None:
    from moelib.operations.goodput_forecast import Failures, goodput_table

    if wrong := [text for text in flags.goodput if not text.isdecimal()]:
        raise UsageError(f"--goodput={wrong[0]}: write numbers of devices, such as 256,16384.")
    costs = Failures(mtbf=1.0, restart=flags.restart, save=flags.save, write=flags.write)
    numbers = list(map(int, flags.goodput))
    print_table(goodput_table(numbers, flags.device_mtbf * 3600, costs, flags.interval))


def _print_step(step: "CompiledStep", columns: Sequence["Column"], top: int) -> None:
    from moelib.planning.report.tables import costliest_table, sources_table

    for table in step.tables(columns):
        print_table(table)
    report = step.report
    if report is None:
        print(f"moelib plan: {step.outcome.failure}", file=sys.stderr)
        return
    if not report.findings:
        print("Lint has no findings.")
    for finding in report.findings:
        _print_finding(finding)
    if top and not report.costliest:
        print(f"--top={top}: this compiler does not estimate cycles.")
    elif top:
        clock = step.estimate.candidate.topology.accelerator.cycles_per_second
        print_table(sources_table(report, top))
        print_table(costliest_table(report, top, clock))


def _print_finding(finding: "Finding", prefix: str = "") -> None:
    from moelib.planning.report.tables import finding_lines

    head, *rest = finding_lines(finding)
    print("\n  ".join((prefix + head, *rest)))
