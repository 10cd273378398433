"""`moelib drill`: breaks runs of a config on this machine, and checks that they recover.

moelib drill --module=experiments.flame_moe --config=flame-moe-tiny

The config is made small, as by `moelib verify`, and runs in several processes. Each run loses a
process, a file or data; it must end with the losses of an undisturbed run. The command prints a
table, and exits with 1 if a promise is broken.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moelib import launch
from moelib.core.config import config_for_function
from moelib.core.errors import UsageError
from moelib.core.module_names import find_module
from moelib.runtime import storage
from moelib.runtime.command_line import flag, no_arguments
from moelib.runtime.lock import directory_lock
from moelib.runtime.progress import Progress
from moelib.runtime.table import print_table

if TYPE_CHECKING:
    from moelib.operations.drill import Outcome, Scenario


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.ConfigFlags):
    """Flags of the command."""

    num_processes: int = flag(2, "Number of processes.", lower_bound=2)
    devices: int = flag(2, "Number of simulated devices of all processes.", lower_bound=2)
    mesh: str = flag("fsdp=-1", "Sizes of mesh axes, such as fsdp=2,expert=2.")
    interval: int = flag(4, "Steps between checkpoints; a run has four intervals.", lower_bound=2)
    only: tuple[str, ...] = flag((), "Part of the name of a fault to inject; repeatable.")
    random_kills: int = flag(
        0, "Number of random processes to kill in random steps, up to four per run."
    )
    folder: str = flag("runs/drill", "New folder for the runs.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Injects the faults, and prints a table. Exits with 1 if a promise is broken."""
    no_arguments(arguments, Flags)
    if flags.devices % flags.num_processes:
        raise UsageError(f"--devices={flags.devices}: set a multiple of {flags.num_processes}.")
    if os.path.isdir(flags.folder) and os.listdir(flags.folder):
        raise UsageError(f"--folder={flags.folder}: it is not empty; name a new one.")
    cfg = flags.load()
    os.environ["JAX_PLATFORMS"] = "cpu"  # Simulated devices only: no accelerator is taken.
    from moelib.checkpoint.checkpointer import Checkpointer
    from moelib.checkpoint.policy import every_n_steps_and_last_policy
    from moelib.operations.drill import drill_table, random_kills, scenarios
    from moelib.verify.shrink import shrink

    cfg, _ = shrink(cfg, flags.devices)
    launch.set_field(cfg, f"mesh_shape={flags.mesh}", flag="--mesh")
    policy = config_for_function(every_n_steps_and_last_policy).set(n=flags.interval)
    cfg.set(
        checkpointer=Checkpointer.default_config().set(save_policy=policy),
        max_step=4 * flags.interval,
        phases={},  # All steps have the settings of one.
        phase=None,
        log_every_n_steps=1,
        skip_kernel_check=True,
    )
    if flags.random_kills:
        chosen = random_kills(flags.random_kills, flags.interval, flags.num_processes)
    else:
        every = scenarios(flags.interval, flags.num_processes)
        chosen = [x for x in every if not flags.only or any(part in x.name for part in flags.only)]
    if not chosen:
        names = ", ".join(x.name for x in scenarios(flags.interval, flags.num_processes))
        raise UsageError(f"--only={','.join(flags.only)}: no fault has this in its name ({names}).")
    storage.require_local("--folder", flags.folder, "the processes of the drill run here")
    with directory_lock(flags.folder, setting="--folder"):
        outcomes = _outcomes(flags, cfg, chosen)
    print_table(drill_table(outcomes, flags.interval))
    if not all(outcome.is_kept for outcome in outcomes):
        sys.exit(1)


def _outcomes(flags: Flags, cfg: Any, chosen: "Sequence[Scenario]") -> "list[Outcome]":
    """Returns the outcomes of scenarios. Exits with 130 after Ctrl-C or SIGTERM."""
    from moelib.operations.drill import run_drill

    module = importlib.import_module(find_module("cloud.local") or "cloud.local")
    job = module.LocalJob.default_config().set(
        program=[sys.executable, "-m", "moelib.operations.drill_process"],
        num_processes=flags.num_processes,
        grace_seconds=20,
        echo=False,
        max_restarts=20,
        env={
            "JAX_NUM_CPU_DEVICES": str(flags.devices // flags.num_processes),
            # A start is mostly compilation. JAX's cache on disk serves process 0 only: it would
            # wait for the others longer than the 30 s after which collectives on CPUs fail.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    )

    def start(folder: str) -> int:
        one = job.clone(arguments=[folder], folder=os.path.join(folder, "job")).instantiate()
        status = one.launch()
        if one.is_stopped:
            raise KeyboardInterrupt
        return status

    outcomes = []
    try:
        with Progress("fault", len(chosen)) as progress:
            for outcome in run_drill(cfg, os.path.abspath(flags.folder), chosen, start):
                outcomes.append(outcome)
                progress.update(len(outcomes))
    except KeyboardInterrupt:
        print(f"The drill was stopped; its runs are in {flags.folder}.", file=sys.stderr)
        sys.exit(130)
    return outcomes
