"""`moelib plan`: memory, time and cost of a config's training step on hardware that is not present.

    moelib plan --module=experiments.open_models --config=qwen3-30b-a3b \
        --topology=v6e:8x8,v5p:4x4x4,h100:8x8 --tokens=1e12

Every legal mesh, batch per device and remat is estimated in seconds. With --compile the best ones
are compiled, as the step that `moelib train` runs: bytes and counts are then the program's, and
cycles the compiler's estimate, without kernels and collectives.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from moelib import launch
from moelib.cli.files import check_file
from moelib.cli.flag_names import define_renamed
from moelib.core.errors import UsageError
from moelib.core.table import print_table

if TYPE_CHECKING:
    from moelib.planning.plan import CompiledStep, CompileOptions
    from moelib.planning.report.figures import Column

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_config_flags()
    flags.DEFINE_list("topology", [], "Topologies, such as v6e:2x2,2*v5p:4x4x4,h100:2x8.")
    flags.DEFINE_string("mesh", None, "Sizes of mesh axes, such as fsdp=2,expert=-1; default: all.")
    flags.DEFINE_bool("current_mesh", False, "Plans the config's own mesh, batch and remat only.")
    flags.DEFINE_float("tokens", None, "Tokens of the whole run, for its days and dollars.")
    flags.DEFINE_float("budget", None, "Dollars of the whole run; excludes meshes that cost more.")
    flags.DEFINE_string("prices", None, "JSON file of dollars per device-hour by accelerator.")
    flags.DEFINE_integer("rows", 20, "Largest number of rows shown.", lower_bound=1)
    flags.DEFINE_integer("compile", 0, "Number of the best meshes to compile.", lower_bound=0)
    flags.DEFINE_float("timeout", None, "Time limit for compiling one step, in seconds.")
    flags.DEFINE_string(
        "cache_dir", None, "Folder for reports of compiled steps; default: ~/.cache/moelib/plan."
    )
    flags.DEFINE_string(
        "dump", None, "Folder for a compiled step at each stage, and a readable report."
    )
    flags.DEFINE_multi_string(
        "compiler_option", [], "name=value: a compiler option in addition to those of training."
    )
    flags.DEFINE_integer("top", 0, "Number of costliest functions and instructions to list.")
    flags.DEFINE_string("json", None, "File for rows and reports.")
    flags.DEFINE_multi_string(
        "compare", [], "File of a report, or of figures by key, to show in another column."
    )
    define_renamed("as_is", "current_mesh")
    define_renamed("beside", "compare")


def run(args: Sequence[str]) -> None:
    """Prints the estimates, and the figures of compiled steps.

    Raises:
        UserError: If a flag or the config cannot be used; the message says why.
        SystemExit: With code 1, if one of several steps did not compile.
    """
    if args:
        raise UsageError(f"unknown argument {args[0]!r}; --topology and --config say what to plan.")
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is used.
    options, columns = _check_flags()
    from moelib.planning.estimate.sweep import read_prices
    from moelib.planning.plan import plan

    found = plan(
        launch.config_from_flags(),
        FLAGS.topology,
        mesh=FLAGS.mesh,
        current_mesh=FLAGS.current_mesh,
        tokens=FLAGS.tokens,
        budget=FLAGS.budget,
        prices=read_prices(FLAGS.prices) if FLAGS.prices else None,
        name=FLAGS.config,
        show_progress=True,
    )
    for reason in found.refused:
        print(f"Excluded: {reason}", file=sys.stderr)
    print_table(found.table(FLAGS.rows))
    if FLAGS.compile and not found.rows[0].fits:
        print("No mesh fits; the nearest is compiled.", file=sys.stderr)
    steps = list[Any]()
    for step in found.compile_best(FLAGS.compile, options, show_progress=True):
        steps.append(step)
        _print_step(step, columns)
    found = dataclasses.replace(found, compiled=tuple(steps))
    for topologies, finding in found.scaling_findings():
        _print_finding(finding, f"{topologies}: ")
    if FLAGS.json:
        with open(FLAGS.json, "w", encoding="utf-8") as file:
            json.dump(found.to_json(FLAGS.rows), file, indent=1)
    failures = [step.outcome.failure for step in steps if step.report is None]
    if failures and len(failures) == len(steps):
        raise UsageError("\n".join(failures))
    if failures:
        print("\n".join(failures), file=sys.stderr)
        raise SystemExit(1)


def _check_flags() -> tuple["CompileOptions", list["Column"]]:
    """Returns the compile options and the columns to compare; checks the other flags."""
    if not FLAGS.topology:
        raise UsageError("--topology names the hardware, such as v6e:2x2,h100:1x8.")
    if FLAGS.compare and FLAGS.compile != 1:
        raise UsageError(f"--compile={FLAGS.compile}: --compare needs --compile=1.")
    for flag in ("dump", "top", "compiler_option", "timeout"):
        if getattr(FLAGS, flag) and not FLAGS.compile:
            raise UsageError(f"--{flag} is for compiled steps; set --compile=1.")
    if FLAGS.timeout is not None and not FLAGS.timeout > 0:
        raise UsageError(f"--timeout={FLAGS.timeout:g}: set it above 0.")
    check_file("json")
    from moelib.planning.compiled.cache import DEFAULT_DIR
    from moelib.planning.compiled.dump import make_folder
    from moelib.planning.plan import CompileOptions
    from moelib.planning.report.figures import read_columns

    if FLAGS.dump:
        make_folder(FLAGS.dump)
    compiler_options = {}
    for text in FLAGS.compiler_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--compiler_option {text}: write it as name=value.")
        compiler_options[name.lstrip("-")] = value
    options = CompileOptions(
        compiler_options, FLAGS.timeout, FLAGS.cache_dir or DEFAULT_DIR, FLAGS.dump
    )
    return options, [column for path in FLAGS.compare for column in read_columns(path)]


def _print_step(step: "CompiledStep", columns: Sequence["Column"]) -> None:
    from moelib.planning.report.tables import costliest_table, sources_table

    for table in step.tables(columns):
        print_table(table)
    report = step.report
    if report is None:
        return
    if not report.findings:
        print("Lint has no findings.")
    for finding in report.findings:
        _print_finding(finding)
    if step.outcome.from_cache:
        print("The report is from the cache: same config, mesh and versions.")
    if FLAGS.top and not report.costliest:
        print(f"--top={FLAGS.top}: this compiler does not estimate cycles.")
    elif FLAGS.top:
        clock = step.estimate.candidate.topology.accelerator.cycles_per_second
        print_table(sources_table(report, FLAGS.top))
        print_table(costliest_table(report, FLAGS.top, clock))


def _print_finding(finding: Any, prefix: str = "") -> None:
    from moelib.planning.report.tables import finding_lines

    head, *rest = finding_lines(finding)
    print("\n  ".join((prefix + head, *rest)))
