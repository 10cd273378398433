"""Tiny runs of FLAME-MoE's models and dense baselines: `python -m benchmarks.tiny_runs`.

Each run is of the model's own config, made small as by `moelib verify`: heads, vocabulary and batch
are small, and widths a 32nd, on synthetic data; the layers, their kinds and number, the experts and
the schedule's shape are those of the config. The routing of those with experts is logged and
analyzed. A command that is stopped resumes when it is run again.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.flame_moe import DENSE_SIZES, MOE_SIZES, named_trainer_configs
from moelib.cli import analyze
from moelib.core.config_text import set_at
from moelib.core.errors import UsageError
from moelib.data.batches.lm_input import InputMode
from moelib.launch import DeviceFlags
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.table import Table, print_table
from moelib.train.evaler import SpmdEvaler
from moelib.train.routing_log import RoutingEvaler
from moelib.verify.shrink import shrink

NAMES = [f"flame-moe-{name}" for name in MOE_SIZES] + [f"dense-{name}" for name in DENSE_SIZES]
# Sizes that keep their values: the analyses of routing are about them.
_KEPT = ("num_layers", "num_experts", "num_experts_per_token")
_WIDTHS = ("dim", "input_dim", "hidden_dim")
_DIVISOR = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    folder: str = flag("runs/tiny", "Folder of the runs, each in a folder of its config's name.")
    steps: int = flag(8, "Number of steps of each run.", lower_bound=8)
    only: tuple[str, ...] = flag((), "Part of the names of the configs to train; repeatable.")


def tiny_config(name: str, folder: str, *, steps: int, num_devices: int) -> Any:
    """Returns the config of a tiny run of the model of a name, in a folder of this name."""
    cfg = named_trainer_configs()[name]()
    small, changes = shrink(cfg, num_devices)
    for path, before, _ in changes:
        field = path.rpartition(".")[2]
        if path.startswith("model.") and field in (*_KEPT, *_WIDTHS):
            set_at(small, path, before // _DIVISOR if field in _WIDTHS else before)
    small.set(
        dir=os.path.join(folder, name), max_step=steps, log_every_n_steps=1, skip_kernel_check=True
    )
    small.checkpointer.save_policy.set(n=steps)
    data = small.input.clone(mode=InputMode.EVALUATE, max_batches=1)
    evaler = SpmdEvaler.default_config().set(input=data)
    evaler.eval_policy.set(n=steps)
    small.evalers = {"validation": evaler}
    if name.startswith("flame-moe"):
        log = RoutingEvaler.default_config()
        log.eval_policy.set(num=2)
        small.watchers["routing_log"] = log
    return small


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Trains the models, analyzes their routing, and prints a table."""
    no_arguments(arguments, Flags)
    names = [x for x in NAMES if not flags.only or any(part in x for part in flags.only)]
    if not names:
        raise UsageError(f"--only={','.join(flags.only)}: none of {', '.join(NAMES)} has it.")
    flags.set_up()
    import jax

    rows = []
    for name in names:
        begin = time.perf_counter()
        size = {"steps": flags.steps, "num_devices": len(jax.devices())}
        trainer = tiny_config(name, flags.folder, **size).instantiate(parent=None)
        trainer.run()
        losses = [x["loss"] for x in read_metrics(trainer.config.dir, ["loss"]) if "loss" in x]
        seconds = time.perf_counter() - begin
        decoder = trainer.config.model.decoder
        experts = getattr(decoder.block[0].feed_forward, "num_experts", 0)
        cells = (decoder.num_layers, experts or "-", f"{losses[0]:.3f}", f"{losses[-1]:.3f}")
        rows.append([name, *map(str, cells), f"{seconds:.0f}"])
        if "routing_log" in trainer.config.watchers:
            analyze.run(analyze.Flags(trainer_dir=trainer.config.dir), ["routing"])
    columns = ["config", "layers>", "experts>", "first loss>", "last loss>", "seconds>"]
    note = f"{flags.steps} steps each, compilation included; runs in {flags.folder}."
    print_table(Table("Tiny runs", columns, rows, [note]))


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.tiny_runs", Flags, run, sys.argv[1:], __doc__ or ""))
