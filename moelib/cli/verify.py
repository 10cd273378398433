"""`moelib verify`: whether a config computes the same on every mesh, checked on this machine.

    moelib verify --module=experiments.flame_moe --config=flame-moe-38m-100m

The config is made small first, every kind of layer kept; it then runs in float32 on one device and
on every mesh of simulated ones. It stops at the first number that is not the same, says which, and
exits with 1. A report is written in any case.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from moelib import launch
from moelib.cli.files import check_file
from moelib.core.errors import UsageError
from moelib.core.table import show

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_config_flags()
    flags.DEFINE_integer("devices", 8, "Simulated devices; 2 or more.", lower_bound=2)
    flags.DEFINE_string(
        "meshes",
        "auto",
        "auto: each axis alone, as many as fit together, and the config's own; all: every mesh; or "
        "a list such as 'fsdp=8;data=2,model=4'.",
    )
    flags.DEFINE_bool("full_size", False, "Runs the config's own sizes, without making it small.")
    flags.DEFINE_string("report", "verify.md", "Where to write the report.")


def run(args: Sequence[str]) -> None:
    """Checks the config, prints a table, and writes a report.

    Raises:
        UsageError: If something is asked for that cannot be: the message says what.
        SystemExit: With 1 if a check failed.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; --module and --config say what to verify.")
    check_file("report")
    cfg = launch.config_from_flags()
    if FLAGS.full_size:
        launch.check_data_dir(cfg)
    os.environ["JAX_PLATFORMS"] = "cpu"  # Numbers are compared, and no device is to be taken.
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    from moelib.parallel.mesh import describe_mesh
    from moelib.verify import Status, verify
    from moelib.verify.meshes import meshes
    from moelib.verify.report import Report
    from moelib.verify.shrink import runnable, shrink

    small, changes = runnable(cfg) if FLAGS.full_size else shrink(cfg, FLAGS.devices)
    try:
        axes = meshes(small, FLAGS.devices, FLAGS.meshes)
    except ValueError as error:
        raise UsageError(f"--meshes: {error}") from None
    asked = FLAGS.meshes not in ("auto", "all")
    names = [describe_mesh(each) for each in axes]
    report = Report(FLAGS.config, FLAGS.devices, changes, names, asked)
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, _progress(len(axes) + 1) as show:
            for outcome in verify(small, axes, jax.devices()[: FLAGS.devices], folder):
                report.add(outcome)
                show(outcome.mesh, outcome.check)
    finally:
        report.seconds = time.perf_counter() - begin
        _print(report)
        with open(FLAGS.report, "w", encoding="utf-8") as file:
            file.write(report.to_markdown())
        print(f"The report is in {FLAGS.report}.")
    if report.status is not Status.PASSED:
        raise SystemExit(1)


def _print(report: Any) -> None:
    from rich.table import Table

    for title, columns, rows in report.tables():
        table = Table(title=title)
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=column == "mesh")
        for row in rows:
            table.add_row(*row)
        show(table)
    for line in report.lines():
        print(line)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, str], None]]:
    """Yields what is told where and what has been checked: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    from rich import console, progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    seen: list[str] = []
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("1 device: compiling", total=total)

        def show(mesh: str, check: str) -> None:
            if mesh not in seen:
                seen.append(mesh)
            bar.update(task, completed=len(seen) - 1, description=f"{mesh}: {check}")

        yield show
        bar.update(task, completed=len(seen))


def _lines(total: int) -> Callable[[str, str], None]:
    seen: list[str] = []

    def show(mesh: str, check: str) -> None:
        del check
        if mesh not in seen:
            seen.append(mesh)
            print(f"verify: {len(seen)} of {total}: {mesh}", file=sys.stderr, flush=True)

    return show
