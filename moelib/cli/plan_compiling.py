"""The compiled steps of `moelib plan`: the best candidates, one after the other; what failed."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from absl import flags

from moelib.cli import plan_rows
from moelib.core.errors import UsageError
from moelib.planning.report import tables as plan_tables

FLAGS = flags.FLAGS

Progress = Callable[[], AbstractContextManager[Callable[[str], None]]]


@dataclasses.dataclass
class Compiled:
    """What came of it.

    Attributes:
        reports: A `StepReport` and the candidate that it is of, for each step that compiled.
        failures: For each that did not, its topology, mesh, what was said, and seconds by stage.
    """

    reports: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the reports, the figures of each as the tables have them, and the failures."""
        reports = [report for report, _ in self.reports]
        return {
            "compiled": [json.loads(report.to_json()) for report in reports],
            "figures": [plan_tables.figures(report) for report in reports],
            "failures": self.failures,
        }


def compiler_options() -> dict[str, str]:
    """Returns what --compiler_option says. Raises UsageError if it is not written name=value."""
    options = {}
    for text in FLAGS.compiler_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--compiler_option {text}: write it as name=value.")
        options[name.lstrip("-")] = value
    return options


def compile_best(
    cfg: Any,
    rows: Sequence[Any],
    estimator: Any,
    beside: Sequence[Sequence[plan_tables.Column]],
    progress: Progress,
) -> Compiled:
    """Compiles the best rows and prints what came out, until all are done or Ctrl-C.

    A failure is printed too, but not the last if nothing compiled: it is the caller's to raise.
    """
    done = Compiled()
    chosen = [each for each in rows if each.fits][: FLAGS.compile]
    if not chosen and FLAGS.compile:
        print("None fits; the nearest is compiled.", file=sys.stderr)
        chosen = rows[: FLAGS.compile]
    for number, estimate in enumerate(chosen, start=1):
        folder = FLAGS.dump and (FLAGS.dump if len(chosen) == 1 else f"{FLAGS.dump}/{number}")
        candidate = estimate.candidate
        outcome = _compiled(cfg, candidate, folder, progress)
        last = number == len(chosen) or outcome.interrupted
        if outcome.report is not None:
            done.reports.append((outcome.report, candidate))
            _print_compiled(outcome, estimate, estimator, beside)
        else:
            mesh = {"inside": candidate.mesh.inside, "across": candidate.mesh.across}
            where = {"topology": candidate.topology.name, "mesh": mesh}
            said = {"failure": outcome.failure, "stages": dict(outcome.stages)}
            done.failures.append(where | said)
            if done.reports or not last:
                print(outcome.failure, file=sys.stderr)
            if outcome.out_of_memory:
                plan_rows.print_memory(estimate)
        if last:
            break
    _print_what_does_not_fall(done)
    return done


def _compiled(cfg: Any, candidate: Any, dump_dir: str | None, progress: Progress) -> Any:
    """Returns the `Outcome` of compiling a candidate in a process of its own."""
    import os

    from moelib.planning.compiled.cache import DEFAULT_DIR
    from moelib.planning.compiled.in_subprocess import compile_apart

    with progress() as say:
        say(f"compiling for {candidate.topology.name}, {candidate.mesh}; it may take minutes")
        return compile_apart(
            candidate.apply(cfg),
            candidate.topology.name,
            name=FLAGS.config,
            compiler_options=compiler_options(),
            timeout_seconds=FLAGS.timeout,
            cache_dir=os.path.expanduser(FLAGS.cache_dir or DEFAULT_DIR),
            dump_dir=dump_dir,
            on_progress=say,
        )


def _print_compiled(
    outcome: Any, estimate: Any, estimator: Any, beside: Sequence[Sequence[plan_tables.Column]]
) -> None:
    report, candidate = outcome.report, estimate.candidate
    accelerator = candidate.topology.accelerator
    plan_tables.print_report(report, accelerator, beside)
    plan_tables.print_prediction(report, estimate.bytes_held, estimator.results(candidate))
    plan_tables.print_findings(report)
    if outcome.from_cache:
        print("The report is of an earlier run, of the same config, mesh and versions.")
    if FLAGS.top:
        plan_tables.print_costliest(report, FLAGS.top, accelerator.cycles_per_second)


def _print_what_does_not_fall(done: Compiled) -> None:
    """Prints what of a device's memory is no less with more devices of the same kind."""
    from moelib.planning.lint.arrays import memory_that_does_not_fall
    from moelib.planning.report.markdown import finding_lines

    ordered = sorted(done.reports, key=lambda each: each[1].topology.num_devices)
    for (few, one), (many, other) in itertools.combinations(ordered, 2):
        if one.topology.accelerator != other.topology.accelerator:
            continue
        if one.topology.num_devices == other.topology.num_devices:
            continue
        # What is kept for the backward pass differs by itself where these do.
        alike = (one.remat, one.num_microbatches) == (other.remat, other.num_microbatches)
        for finding in memory_that_does_not_fall(few, many):
            if alike or finding.instruction == "arguments":
                lines = finding_lines(finding)
                print("\n  ".join((f"{few.topology} to {many.topology}: {lines[0]}", *lines[1:])))
