"""`moelib config`: prints, explains, compares or counts a named config."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from moelib import launch
from moelib.core import config_paths
from moelib.core.config import InvalidConfigNameError, did_you_mean

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    launch.define_config_flags()
    flags.DEFINE_string("diff", None, "Name of another config of the module to compare with.")
    flags.DEFINE_bool("explain", False, "Shows beside each value where it was set.")
    flags.DEFINE_bool("count", False, "Prints parameters, FLOPs and bytes as JSON.")


def run(args: Sequence[str]) -> None:
    """Prints what the flags ask for. Arguments are paths below which values are shown.

    Raises:
        UsageError: If a flag is missing that another needs.
        InvalidConfigNameError: If the module has no configs, or not one of that name.
    """
    if FLAGS.module and not FLAGS.config:
        _check_only_lists(args)
        print("\n".join(_names(FLAGS.module)))
        return
    cfg = launch.config_from_flags()
    if FLAGS.count:
        print(json.dumps(count(cfg), indent=2))
    elif FLAGS.diff:
        other = launch.load_config(FLAGS.module, FLAGS.diff)
        print_diff(cfg, other, FLAGS.config, FLAGS.diff)
    elif FLAGS.explain:
        print_origins(cfg, args)
    else:
        lines = cfg.debug_string().splitlines()
        print("\n".join(_below(lines, args, key=lambda line: line.partition(": ")[0])))


def _check_only_lists(args: Sequence[str]) -> None:
    """Raises UsageError if something is asked for that needs --config."""
    asked = [f"--{name}" for name in ("diff", "explain", "count") if FLAGS[name].value]
    if asked or args:
        raise launch.UsageError(
            f"{' and '.join([*asked, *args])} needs --config; without it, --module {FLAGS.module} "
            "lists the names."
        )


def _names(module_name: str) -> list[str]:
    """Returns the names of a module's configs. Raises InvalidConfigNameError if it has none."""
    module = launch.import_module(module_name)
    if not hasattr(module, "named_trainer_configs"):
        raise InvalidConfigNameError(
            f"--module {module_name}: {module.__name__} defines no named_trainer_configs(); name a "
            "module of experiments, such as experiments.flame_moe."
        )
    return list(module.named_trainer_configs())


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


def print_diff(a: Any, b: Any, name_a: str, name_b: str) -> None:
    """Prints the lines in which two configs differ."""
    rows = config_paths.diff(a, b)
    print(f"--- {name_a}\n+++ {name_b}")
    for path, text_a, text_b in rows:
        if text_a is not None:
            print(f"- {path}: {text_a}")
        if text_b is not None:
            print(f"+ {path}: {text_b}")
    if not rows:
        print("(the same)")


def print_origins(cfg: Any, paths: Sequence[str]) -> None:
    """Prints every value below the paths with the place that set it."""
    rows = [(line.path, line.text, line.origin) for line in config_paths.leaves(cfg)]
    rows = _below(rows, paths, key=lambda row: row[0])
    width = max(len(f"{path}: {text}") for path, text, _ in rows)
    for path, text, origin in rows:
        print(f"{f'{path}: {text}':<{min(width, 72)}}  # {_relative(origin)}")


def _relative(origin: str) -> str:
    """Returns a place with its file as seen from the current folder."""
    return origin.removeprefix(os.getcwd() + os.sep)


def _below(rows: list[Any], paths: Sequence[str], *, key: Any) -> list[Any]:
    """Returns the rows at or below one of the paths; all if there are none."""
    if not paths:
        return rows
    chosen = [
        row
        for row in rows
        if any(key(row) == path or key(row).startswith((path + ".", path + "[")) for path in paths)
    ]
    if not chosen:
        known = {key(row) for row in rows}
        print(f"nothing at {' or '.join(paths)}; {did_you_mean(paths[0], known)}", file=sys.stderr)
        sys.exit(2)
    return chosen
