"""Dumps of a compiled step: its form at each stage of compilation, its report, and plots.

`jaxpr.txt`, `stablehlo.txt`, `hlo_before.txt` and `hlo_optimized.txt` are the stages, `report.json`
and `report.md` the figures and findings.
"""

import json
import os
import pathlib
from typing import Any

import jax

from moelib.core.errors import UserError
from moelib.planning.compiled.examine import Step, examine
from moelib.planning.hardware.topologies import present
from moelib.planning.report.plots import plot_amounts
from moelib.planning.report.step_report import StepReport
from moelib.planning.report.tables import memory_by_content, report_text
from moelib.runtime.processes import on_process_0


def make_folder(folder: str) -> pathlib.Path:
    """Returns the folder, created if necessary. Raises UserError if it cannot be written to."""
    path = pathlib.Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder.") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"{folder}: the folder is not writable; name another folder.")
    return path


def write_dump(folder: str, step: Step, report: StepReport) -> pathlib.Path:
    """Writes all stages of a step and its report; returns the path of report.md.

    The folder is created if necessary, and files of an older dump are replaced.
    """
    path = make_folder(folder)
    texts = {
        "jaxpr.txt": str(step.traced.jaxpr),
        "stablehlo.txt": step.lowered.as_text(),
        "hlo_before.txt": step.hlo_before(),
        "hlo_optimized.txt": step.compiled.as_text(),
        "report.json": json.dumps(report.to_json(), indent=1),
    }
    for name, text in texts.items():
        (path / name).write_text(text, encoding="utf-8")
    return write_report(path, report)


def write_report(folder: pathlib.Path, report: StepReport) -> pathlib.Path:
    """Writes report.md and its plots to an existing folder; returns the path of report.md."""
    memory = {(name, ""): size / 2**30 for name, size in memory_by_content(report).items()}
    cycles = {(row["kind"], row["phase"]): row["cycles"] / 1e6 for row in report.cycles}
    plots = {}
    for name, amounts, unit in (("memory", memory, "GiB"), ("time", cycles, "Mcycles")):
        if any(amounts.values()):
            plots[name] = f"{name}.png"
            plot_amounts(str(folder / plots[name]), f"{report.name}: {name}", amounts, unit)
    path = folder / "report.md"
    path.write_text(report_text(report, plots), encoding="utf-8")
    return path


def dump_when_compiled(trainer: Any, folder: str, *, name: str) -> None:
    """Makes a `SpmdTrainer` that has not run dump its step after compiling it, on process 0."""
    on_process_0(lambda: str(make_folder(folder)))
    if jax.process_index() != 0:
        return

    def write(*stages: Any) -> None:
        shape = present(trainer.mesh().devices)
        devices = trainer.mesh().devices.flat
        topology = f"{len(devices)} x {devices[0].device_kind}"
        report = examine(trainer, Step(*stages), name=name, topology=topology, shape=shape)
        write_dump(folder, Step(*stages), report)

    trainer.on_compiled = write
