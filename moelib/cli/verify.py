"""`moelib verify`: checks on this machine that a config computes the same numbers on every mesh.

moelib verify --module=experiments.flame_moe --config=flame-moe-38m-100m

The config is made small, with every kind of layer kept, and runs in float32 on one device and on
every mesh of simulated devices. The command stops at the first difference unless --keep_going is
set, names it, and exits with 1. It always writes a report.
"""

import dataclasses
import os
from collections.abc import Sequence

from moelib import launch
from moelib.runtime.command_line import check_file, flag, no_arguments
from moelib.runtime.compilation_cache import use_compilation_cache
from moelib.runtime.table import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.ConfigFlags):
    """Flags of the command."""

    devices: int = flag(8, "Number of simulated devices, 2 to 256.", lower_bound=2)
    meshes: str = flag(
        "auto",
        "Meshes to check: auto (each axis alone, each pair together with as many others as "
        "possible, and those of the config), all, or a list such as 'fsdp=8;data=2,model=4'.",
    )
    full_size: bool = flag(False, "Keep the config's own sizes and data.")
    keep_going: bool = flag(False, "Run the checks after a failure too.")
    without: tuple[str, ...] = flag((), "Check to leave out; repeatable.")
    thorough: bool = flag(False, "Check more meshes than auto.")
    report: str = flag("verify.md", "File for the report.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Checks the config, prints tables, and writes a report. Exits with 1 if a check failed."""
    no_arguments(arguments, Flags)
    check_file("report", flags.report)
    cfg = flags.load()
    if flags.full_size:
        launch.check_data_dir(cfg)
    os.environ["JAX_PLATFORMS"] = "cpu"  # Simulated devices only: no accelerator is taken.
    import jax

    jax.config.update("jax_platforms", "cpu")
    use_compilation_cache()
    from moelib.verify.outcome import Status
    from moelib.verify.run import verify_config

    report = verify_config(
        cfg,
        num_devices=flags.devices,
        meshes=flags.meshes,
        full_size=flags.full_size,
        name=flags.config or "config",
        show_progress=True,
        keep_going=flags.keep_going,
        without=flags.without,
        thorough=flags.thorough,
    )
    for table in report.tables():
        print_table(table)
    print("\n".join(report.lines()))
    with open(flags.report, "w", encoding="utf-8") as file:
        file.write(report.to_markdown())
    print(f"The report is in {flags.report}.")
    if report.status is not Status.PASSED:
        raise SystemExit(1)
