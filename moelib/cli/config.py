"""`moelib config`: prints, explains, compares or counts a named config.

moelib config --module=experiments.flame_moe                    # names of its configs
moelib config --module=M --config=C                             # all values
moelib config --module=M --config=C model.decoder learner       # values below these paths
moelib config --module=M --config=C --explain                   # where each value was set
moelib config --module=M --config=C --diff=OTHER                # differences
moelib config --module=M --config=C --count                     # parameters, FLOPs and bytes
moelib config --module=M --config=C --shardings --mesh=fsdp=4   # sharding of each parameter
moelib config --module=M --config=C --twin=flops                # its dense twin, of equal FLOPs
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from moelib import launch
from moelib.core import config_text
from moelib.core.config import named_trainer_configs
from moelib.core.errors import UsageError
from moelib.runtime.command_line import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.ConfigFlags):
    """Flags of the command."""

    diff: str | None = flag(None, "Name of another config of the module to compare with.")
    explain: bool = flag(False, "Show where each value was set.")
    count: bool = flag(False, "Print the numbers of parameters, FLOPs and bytes as JSON.")
    shardings: bool = flag(
        False, "Show the sharding of every parameter, its bytes per device, and the reason."
    )
    mesh: str | None = flag(
        None,
        "With --shardings: sizes of all mesh axes above 1, or auto, which counts local devices; by "
        "default the config's.",
    )
    model_shards: int | None = flag(None, launch.MODEL_SHARDS, lower_bound=1)
    twin: Literal["flops", "time"] | None = flag(
        None, "Show the dense twin instead: of equal FLOPs, or of equal step time, measured here."
    )

    def load(self) -> Any:
        """Returns the config that the flags describe."""
        cfg = super().load()
        return cfg if self.twin is None else twin_of(cfg, self.twin)


def run(flags: Flags, paths: Sequence[str]) -> None:
    """Prints the names of configs, or a config as the flags ask, below the paths if any."""
    if flags.module and not flags.config:
        actions = ("diff", "explain", "count", "shardings", "twin")
        used = [f"--{name}" for name in actions if getattr(flags, name)]
        if used or paths:
            raise UsageError(
                f"{' and '.join([*used, *paths])}: --config is required; without these, "
                f"--module={flags.module} lists its configs."
            )
        print("\n".join(config_names(flags.module)))
        return
    _refuse_unused(flags, paths)
    cfg, name = flags.load(), flags.config or ""
    if flags.count:
        print(json.dumps(count(cfg), indent=2))
    elif flags.shardings:
        from moelib.runtime.table import print_table
        from moelib.train.shardings import shardings_table

        if mesh := launch.mesh_of_flags(cfg, flags.mesh, flags.model_shards):
            launch.set_field(cfg, f"mesh_shape={mesh}", flag="--mesh")
        print_table(shardings_table(cfg.clone(dir=cfg.dir or "unused").instantiate(parent=None)))
    elif flags.diff:
        # --set and --twin change the first config alone.
        same = {name: getattr(flags, name) for name in ("data_dir", "max_step", "mesh_selector")}
        other = launch.load_config(flags.module, flags.diff, **same)
        print_diff(cfg, other, name, flags.diff, paths)
    elif flags.explain:
        print_origins(cfg, paths)
    else:
        print("\n".join(f"{line.path}: {line.text}" for line in _below(cfg, paths)))


def _refuse_unused(flags: Flags, paths: Sequence[str]) -> None:
    """Raises UsageError if a flag or path has no effect with the other flags."""
    for unused in ("mesh", "model_shards"):
        if (value := getattr(flags, unused)) is not None and not flags.shardings:
            raise UsageError(f"--{unused}={value} requires --shardings.")
    if paths and (flags.count or flags.shardings):
        used = "count" if flags.count else "shardings"
        raise UsageError(f"{' '.join(paths)}: --{used} is of the whole config; remove the paths.")


def twin_of(cfg: Any, kind: str) -> Any:
    """Returns the dense twin of a config, and prints its sizes and what differs to stderr.

    Raises:
        UserError: If the model has no MoE layer, or no twin takes as long.
    """
    from moelib.operations.dense_twin import dense_twin
    from moelib.operations.time_twin import time_twin

    times = ""
    if kind == "time":
        found = time_twin(cfg)
        twin = found.twin
        times = f"; {found.dense_seconds:.4g} s per step, of {found.moe_seconds:.4g} s"
    else:
        twin = dense_twin(cfg)
    sizes = ", ".join(f"{path} {size}" for path, size in twin.hidden_dims.items())
    print(
        f"dense twin: hidden_dim of {sizes}; {twin.dense_flops:,.0f} FLOPs per token, of "
        f"{twin.moe_flops:,.0f} ({twin.difference:+.2%}){times}",
        file=sys.stderr,
    )
    return twin.config


def config_names(module_name: str) -> list[str]:
    """Returns the names of a module's configs. Raises InvalidConfigNameError if it has none."""
    return list(named_trainer_configs(launch.import_module(module_name)))


def count(cfg: Any) -> dict[str, float]:
    """Returns the counts of a trainer config; nothing is allocated.

    Keys: total_parameters, active_parameters, active_non_embedding_parameters,
    train_flops_per_token, parameter_bytes, learner_bytes (optimizer moments and averages),
    state_bytes (all of a checkpoint).
    """
    from moelib.core import tree
    from moelib.models.cost import model_cost

    trainer = cfg.clone(dir=cfg.dir or "unused").instantiate(parent=None)
    counts = dataclasses.asdict(model_cost(trainer.model, seq_len=cfg.input.seq_len))
    counts["learner_bytes"] = tree.count_bytes(trainer.trainer_state_specs.learner)
    counts["state_bytes"] = tree.count_bytes(trainer.trainer_state_specs)
    return counts


def print_diff(a: Any, b: Any, name_a: str, name_b: str, paths: Sequence[str] = ()) -> None:
    """Prints the lines in which two configs differ, below the paths if any."""
    rows = config_text.diff(a, b)
    for path in paths:
        if not any(_is_below(row[0], path) for row in rows):
            config_text.get(a, path)  # Raises if neither has it.
    rows = [row for row in rows if not paths or any(_is_below(row[0], path) for path in paths)]
    print(f"--- {name_a}\n+++ {name_b}")
    for path, text_a, text_b in rows:
        if text_a is not None:
            print(f"- {path}: {text_a}")
        if text_b is not None:
            print(f"+ {path}: {text_b}")
    if not rows:
        print("(no difference)")


def print_origins(cfg: Any, paths: Sequence[str]) -> None:
    """Prints every value below the paths with the file and line, or the flag, that set it."""
    lines = _below(cfg, paths)
    width = min(max(len(f"{line.path}: {line.text}") for line in lines), 72)
    for line in lines:
        origin = line.origin.removeprefix(os.getcwd() + os.sep)
        print(f"{f'{line.path}: {line.text}':<{width}}  # {origin}")


def _below(cfg: Any, paths: Sequence[str]) -> list[Any]:
    """Returns the values of a config at or below one of the paths; all values without paths.

    Raises:
        UnknownFieldError: If there is nothing at one of the paths.
    """
    lines = list(config_text.lines(cfg))
    if not paths:
        return lines
    chosen: set[str] = set()
    for path in paths:
        below = {x.path for x in lines if _is_below(x.path, path)}
        if not below:
            config_text.get(cfg, path)  # Raises the error with the nearest name.
        chosen |= below
    return [line for line in lines if line.path in chosen]


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith((f"{top}.", f"{top}["))
