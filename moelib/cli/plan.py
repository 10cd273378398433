"""`moelib plan`: what a config's training step will be on hardware that is not here.

    moelib plan --module=experiments.open_models --config=qwen3-30b-a3b \
        --topology=v6e:8x8,v5p:4x4x4,h100:8x8 --tokens=1e12

Without --compile every legal mesh, rows at a time and remat are estimated in seconds: memory, time
as a range, cost. With it the best are compiled, the step that `moelib train` runs; bytes and counts
are then the program's, cycles the compiler's estimate, without kernels and collectives.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from moelib import launch
from moelib.cli import plan_compiling, plan_rows
from moelib.cli.files import check_file
from moelib.core.errors import UsageError
from moelib.planning.report import tables as plan_tables

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_config_flags()
    flags.DEFINE_list("topology", [], "Devices, such as v6e:2x2,2*v5p:4x4x4,h100:2x8.")
    flags.DEFINE_string("mesh", None, "Sizes of mesh axes, such as fsdp=2,expert=-1; all if unset.")
    flags.DEFINE_bool("as_is", False, "The config as it stands, and nothing else.")
    flags.DEFINE_float("tokens", None, "Tokens of the whole run: adds its days and dollars.")
    flags.DEFINE_float("budget", None, "Dollars of the whole run: leaves out what costs more.")
    flags.DEFINE_string("prices", None, "JSON file: dollars per device-hour by accelerator.")
    flags.DEFINE_integer("rows", 20, "The most rows shown.", lower_bound=1)
    flags.DEFINE_integer("compile", 0, "Compiles so many of the best that fit.", lower_bound=0)
    flags.DEFINE_float("timeout", None, "Seconds that compiling one step may take.")
    flags.DEFINE_string(
        "cache_dir", None, "Keeps reports of compiled steps; by default ~/.cache/moelib/plan."
    )
    flags.DEFINE_string(
        "dump", None, "Writes each stage of a compiled step, and a report, to this folder."
    )
    flags.DEFINE_multi_string(
        "compiler_option", [], "name=value: for the compiler, over those that training takes."
    )
    flags.DEFINE_integer("top", 0, "Lists so many of the costliest instructions and places.")
    flags.DEFINE_string("json", None, "Writes rows and reports to this file.")
    flags.DEFINE_multi_string(
        "beside", [], "A report, or a JSON object of the same figures, shown beside ours."
    )


def run(args: Sequence[str]) -> None:
    """Prints the estimates, and the figures of steps that were to be compiled.

    Raises:
        UsageError: If something is asked for that cannot be: the message says what.
        SystemExit: With code 1, if a step of several did not compile.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; --topology and --config say what to plan.")
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device is used, and none is to be taken.
    from moelib.planning.hardware.topologies import PlanError

    try:
        _plan()
    except PlanError as error:
        raise UsageError(str(error)) from None


def _plan() -> None:
    beside = _check_flags()
    from moelib.planning.estimate.sweep import read_prices, sweep

    prices = read_prices(FLAGS.prices) if FLAGS.prices else {}
    cfg = launch.config_from_flags()
    with _progress() as say:
        found = sweep(
            cfg,
            FLAGS.topology,
            mesh=FLAGS.mesh,
            as_is=FLAGS.as_is,
            prices=prices,
            on_progress=say,
        )
    for reason in found.refused:
        print(f"Left out: {reason}", file=sys.stderr)
    whole = plan_rows.Whole(FLAGS.tokens, FLAGS.budget)
    rows = [each for each in found.rows if whole.allows(each)]
    if not rows:
        dollars = [each.whole_run(FLAGS.tokens)[1][0] for each in found.rows if each.fits]
        raise UsageError(
            f"--budget {FLAGS.budget:g}: none of {found.num_candidates} candidates may keep to it; "
            + (f"the cheapest that fits costs {min(dollars):,.0f}." if dollars else "none fits.")
        )
    shown = rows[: FLAGS.rows]
    title = f"{FLAGS.config}: {len(shown)} of {len(rows)} meshes, {found.num_candidates} candidates"
    plan_rows.print_rows(shown, whole, title)
    if len(rows) < len(found.rows):
        print(f"{len(found.rows) - len(rows)} meshes over the budget are left out.")
    compiled = plan_compiling.compile_best(cfg, rows, found.estimator, beside, _progress)
    if FLAGS.json:
        held = [plan_rows.as_json(each, found.estimator.results(each.candidate)) for each in shown]
        with open(FLAGS.json, "w", encoding="utf-8") as file:
            json.dump({"rows": held, **compiled.as_json()}, file, indent=1)
    if compiled.failures and not compiled.reports:
        raise UsageError(compiled.failures[-1]["failure"])
    if compiled.failures:
        raise SystemExit(1)


def _check_flags() -> list[list[plan_tables.Column]]:
    """Checks the flags of a plan; returns the columns to stand beside ours."""
    if not FLAGS.topology:
        raise UsageError("--topology says for what to plan, such as v6e:2x2,h100:1x8.")
    if FLAGS.as_is and FLAGS.mesh:
        raise UsageError("--as_is takes the config's own mesh; leave --mesh out, or --as_is.")
    if FLAGS.budget is not None and FLAGS.tokens is None:
        raise UsageError("--budget is of a whole run: say by --tokens how long it is.")
    for flag in ("tokens", "budget", "timeout"):
        value = getattr(FLAGS, flag)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{flag} is {value:g}; set it above 0.")
    if FLAGS.beside and FLAGS.compile != 1:
        raise UsageError(f"--beside is for one compiled step; --compile is {FLAGS.compile}, set 1.")
    for flag in ("dump", "top", "compiler_option", "timeout"):
        if getattr(FLAGS, flag) and not FLAGS.compile:
            raise UsageError(f"--{flag} is for compiled steps; set --compile=1.")
    check_file("json")
    if FLAGS.dump:
        _make_dump_folder()
    plan_compiling.compiler_options()
    return [plan_tables.read_beside(path) for path in FLAGS.beside]


def _make_dump_folder() -> None:
    from moelib.planning.compiled.dump import DumpError, make_folder

    try:
        make_folder(FLAGS.dump)
    except DumpError as error:
        raise UsageError(f"--dump {error}") from None


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is done: in place on a terminal, as lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(escape(text))
