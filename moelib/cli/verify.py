"""`moelib verify`: checks on this machine that a config computes the same numbers on every mesh.

    moelib verify --module=experiments.flame_moe --config=flame-moe-38m-100m

The config is made small, with every kind of layer kept, and runs in float32 on one device and on
every mesh of simulated devices. The command stops at the first difference, names it, and exits
with 1. It always writes a report.
"""

import os
from collections.abc import Sequence

from absl import flags

from moelib import launch
from moelib.cli.files import check_file
from moelib.core.errors import UsageError
from moelib.core.table import print_table

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_config_flags()
    flags.DEFINE_integer("devices", 8, "Number of simulated devices, 2 or more.", lower_bound=2)
    flags.DEFINE_string(
        "meshes",
        "auto",
        "auto: each axis alone, as many axes as possible together, and those of the config; "
        "all: every mesh; or a list such as 'fsdp=8;data=2,model=4'.",
    )
    flags.DEFINE_bool("full_size", False, "Keeps the config's own sizes and data.")
    flags.DEFINE_string("report", "verify.md", "File for the report.")


def run(args: Sequence[str]) -> None:
    """Checks the config, prints tables, and writes a report.

    Raises:
        UsageError: If a flag cannot be used; the message says why.
        SystemExit: With 1 if a check failed.
    """
    if args:
        raise UsageError(f"unknown argument {args[0]!r}; --module and --config name the config.")
    check_file("report")
    cfg = launch.config_from_flags()
    if FLAGS.full_size:
        launch.check_data_dir(cfg)
    os.environ["JAX_PLATFORMS"] = "cpu"  # Simulated devices only: no accelerator is taken.
    import jax

    jax.config.update("jax_platforms", "cpu")
    from moelib.verify.outcome import Status
    from moelib.verify.run import verify_config

    report = verify_config(
        cfg,
        num_devices=FLAGS.devices,
        meshes=FLAGS.meshes,
        full_size=FLAGS.full_size,
        name=FLAGS.config,
        show_progress=True,
    )
    for table in report.tables():
        print_table(table)
    print("\n".join(report.lines()))
    with open(FLAGS.report, "w", encoding="utf-8") as file:
        file.write(report.to_markdown())
    print(f"The report is in {FLAGS.report}.")
    if report.status is not Status.PASSED:
        raise SystemExit(1)
