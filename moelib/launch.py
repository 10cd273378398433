"""From flags to a running trainer: `python -m moelib.launch --module M --config C --trainer_dir D`.

`moelib train` is the same. Other commands take their configs from here too.
"""

import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from moelib.core import config_parse, config_paths
from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    config_origin,
    did_you_mean,
    get_named_trainer_config,
)
from moelib.core.errors import UsageError

FLAGS = flags.FLAGS


# -- Flags ---------------------------------------------------------------------------------------


def define_config_flags() -> None:
    """Defines the flags that name and change a config."""
    flags.DEFINE_string("module", None, "Module with named_trainer_configs().", short_name="m")
    flags.DEFINE_string("config", None, "Name of a config in the module.", short_name="c")
    flags.DEFINE_multi_string(
        "set", [], "path=value: sets a field of the config, such as --set learner.ema.decay=0.999."
    )
    flags.DEFINE_string("data_dir", None, "Replaces {data_dir} in the config's paths.")
    flags.DEFINE_integer("max_step", None, "Sets max_step of the config.")
    flags.DEFINE_string("mesh_selector", None, "Applies the first mesh rule that matches it.")


def define_train_flags() -> None:
    """Defines the flags of a training run."""
    define_config_flags()
    flags.DEFINE_string("trainer_dir", None, "Where the run writes, and resumes from.")
    flags.DEFINE_integer("trainer_prng_seed", None, "Sets prng_seed of the config.")
    flags.DEFINE_string("dump", None, "Writes the compiled step, and a report of it, in a folder.")
    define_device_flags()


def define_device_flags() -> None:
    """Defines the flags that say on which devices to run."""
    flags.DEFINE_enum("jax_backend", None, ["cpu", "gpu", "tpu"], "Platform; by default the best.")
    flags.DEFINE_integer("num_cpu_devices", None, "Simulates as many devices on the CPU.")
    flags.DEFINE_string("distributed_coordinator", None, "host:port of process 0.")
    flags.DEFINE_integer("num_processes", None, "Number of processes of the job.")
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")


# -- Configs -------------------------------------------------------------------------------------


def import_module(name: str) -> types.ModuleType:
    """Returns the module `name`, or else `experiments.<name>`, also from the current folder.

    An error inside the module is raised as it is.

    Raises:
        UsageError: If there is no such module.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    candidates = (name, f"experiments.{name}")
    for candidate in candidates:
        if _exists(candidate):
            return importlib.import_module(candidate)
    raise UsageError(
        f"--module {name}: there is no module {candidates[0]!r} or {candidates[1]!r}, neither "
        f"installed nor in {os.getcwd()}; run from the folder that holds it."
    )


def _exists(name: str) -> bool:
    """Returns whether there is a module of that name, without importing it (only its parents)."""
    parent, _, _ = name.rpartition(".")
    if parent and not _exists(parent):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # The parent is a module, not a package.
        if error.name is not None and name.startswith(error.name):
            return False
        raise


def load_config(
    module: str | None,
    name: str | None,
    *,
    sets: Sequence[str] = (),
    data_dir: str | None = None,
    max_step: int | None = None,
    mesh_selector: str | None = None,
) -> Any:
    """Returns a named trainer config with the flags carried out, each known as a value's origin.

    Raises:
        UsageError: If a flag that is needed is missing.
        InvalidConfigNameError: If there is no such config; the nearest is named.
    """
    if not module or not name:
        raise UsageError(
            "--module and --config name what to run; `moelib config --module M` lists."
        )
    cfg = get_named_trainer_config(name, config_module=import_module(module))()
    if mesh_selector is not None:
        cfg = select_mesh(cfg, mesh_selector)
    if max_step is not None:
        config_parse.set_from_text(cfg, f"max_step={max_step}", flag="--max_step")
    for assignment in sets:
        set_field(cfg, assignment)
    if data_dir is not None:
        set_data_dir(cfg, data_dir)
    return cfg


def set_field(cfg: ConfigBase, assignment: str) -> None:
    """Sets a field from "path=value"; mesh_shape from "mesh_shape=fsdp=4,expert=2" too.

    Raises:
        UnknownFieldError: If there is no such field.
        InvalidConfigValueError: If the text is not a value of the field.
        UserError: If a mesh has unknown axes or wrong sizes.
    """
    path, _, text = (part.strip() for part in assignment.partition("="))
    if path != "mesh_shape" or "=" not in text:
        config_parse.set_from_text(cfg, assignment)
        return
    from moelib.parallel.mesh import parse_mesh

    with config_origin(f"--set {assignment}"):
        cfg.set(mesh_shape=parse_mesh(text, axis_names=cfg.mesh_axis_names, field="mesh_shape"))


def select_mesh(cfg: Any, selector: str) -> Any:
    """Returns the config with the first of its `mesh_rules` that matches the selector applied.

    Raises:
        UsageError: If no rule matches; the rules are named.
    """
    rules = cfg.mesh_rules or []
    for pattern, rule in rules:
        if re.fullmatch(pattern, selector):
            with config_origin(f"--mesh_selector {selector}"):
                if isinstance(rule, ConfigBase):
                    return rule.instantiate()(cfg)
                return cfg.set(mesh_shape=rule)
    known = ", ".join(repr(pattern) for pattern, _ in rules) or "it has none"
    raise UsageError(f"--mesh_selector {selector}: no mesh rule of the config matches ({known}).")


def set_data_dir(cfg: ConfigBase, data_dir: str) -> None:
    """Replaces {data_dir} in every string of the config."""
    with config_origin(f"--data_dir {data_dir}"):
        for path, value in cfg.to_flat_dict().items():
            if isinstance(value, str) and "{data_dir}" in value:
                config_paths.set_at(cfg, path, value.replace("{data_dir}", data_dir.rstrip("/")))


def check_data_dir(cfg: ConfigBase) -> None:
    """Raises UsageError if a path of the config still asks for --data_dir."""
    for path, value in cfg.to_flat_dict().items():
        if isinstance(value, str) and "{data_dir}" in value:
            raise UsageError(f"{path} is {value!r}: say where the data is with --data_dir.")


def config_from_flags() -> Any:
    """Returns the config that the flags name."""
    return load_config(
        FLAGS.module,
        FLAGS.config,
        sets=FLAGS.set,
        data_dir=FLAGS.data_dir,
        max_step=FLAGS.max_step,
        mesh_selector=FLAGS.mesh_selector,
    )


# -- Running -------------------------------------------------------------------------------------


def set_up_devices() -> None:
    """Carries out the flags about devices. To be called before anything computes.

    Raises:
        UsageError: If only some of the flags of a distributed job are given.
    """
    import jax

    if FLAGS.jax_backend is not None:
        jax.config.update(
            "jax_platforms", {"gpu": "cuda"}.get(FLAGS.jax_backend, FLAGS.jax_backend)
        )
    if FLAGS.num_cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", FLAGS.num_cpu_devices)
    job = (FLAGS.distributed_coordinator, FLAGS.num_processes, FLAGS.process_id)
    if any(flag is not None for flag in job):
        if None in job:
            raise UsageError(
                "--distributed_coordinator, --num_processes and --process_id go together."
            )
        jax.distributed.initialize(*job)


def train(cfg: Any, dump: str | None = None) -> Any:
    """Builds the trainer of a config and runs it to the end; returns what `run` returns.

    Args:
        cfg: The config.
        dump: Folder for the compiled step and its report (`moelib.planning.compiled.dump`).

    Raises:
        UsageError: If the run has no folder, or `dump` cannot be made.
    """
    check_data_dir(cfg)
    if cfg.dir is REQUIRED or not cfg.dir:
        raise UsageError("--trainer_dir says where the run writes, and resumes from.")
    if dump is None:
        return cfg.instantiate(parent=None).run()
    from moelib.planning.compiled.dump import DumpError, dump_when_compiled

    try:
        trainer = cfg.instantiate(parent=None)
        dump_when_compiled(trainer, dump, name=FLAGS.config or "step")
    except DumpError as error:
        raise UsageError(f"--dump {error}") from None
    return trainer.run()


def main(argv: Sequence[str]) -> None:
    """Trains the config that the flags name."""
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; {did_you_mean(argv[1], map(_dashed, FLAGS))}")
    cfg = config_from_flags()
    with config_origin("--trainer_dir"):
        if FLAGS.trainer_dir is not None:
            cfg.dir = FLAGS.trainer_dir
    with config_origin("--trainer_prng_seed"):
        if FLAGS.trainer_prng_seed is not None:
            cfg.prng_seed = FLAGS.trainer_prng_seed
    set_up_devices()
    train(cfg, FLAGS.dump)


def _dashed(name: str) -> str:
    return f"--{name}"


if __name__ == "__main__":
    define_train_flags()
    app.run(main)
