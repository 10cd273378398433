"""What a trainer checks in its config, and what it fills in."""

import math
from collections.abc import Mapping
from typing import Any

from moelib.core.config import REQUIRED, ConfigBase, RequiredFieldMissingError, did_you_mean
from moelib.core.config_paths import join_path, sub_configs
from moelib.parallel.sharding import SplitError, mesh_axes


def check_config(cfg: Any) -> None:
    """Checks a `SpmdTrainer.Config`.

    Raises:
        RequiredFieldMissingError: If a field of an input is unset.
        ValueError: If a setting cannot be.
    """
    inputs = [((), cfg.input)] + [(("evalers", n), e.input) for n, e in cfg.evalers.items()]
    for holder, inside in inputs:
        if inside is REQUIRED:
            raise RequiredFieldMissingError("SpmdTrainer.Config", ["input"], join_path(holder))
        path = (*holder, "input")
        if missing := [name for name, value in inside.items() if value is REQUIRED]:
            raise RequiredFieldMissingError("the input", missing, join_path(path))
        with_vocab_size(inside, cfg.model, join_path(path))
    for name in ("max_step", "log_every_n_steps", "num_microbatches"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name} is {getattr(cfg, name)}; set it to 1 or more.")
    rows, parts = cfg.input.global_batch_size, cfg.num_microbatches
    if rows % parts:
        raise ValueError(
            f"input.global_batch_size is {rows}, which num_microbatches, {parts}, does not divide; "
            f"set it to a multiple of {parts}, or num_microbatches to a divisor of {rows}."
        )
    _check_folders(cfg)
    if cfg.checkpointer is not None and (metric := cfg.checkpointer.best_metric) is not None:
        evaler = metric.partition("/")[0]
        if evaler not in cfg.evalers:
            raise ValueError(
                f"checkpointer.best_metric is {metric!r}, but there is no evaler {evaler!r}; "
                + did_you_mean(evaler, cfg.evalers)
            )


def _check_folders(cfg: Any) -> None:
    """Raises ValueError if a run is to leave something in a folder that is not local."""
    folders = {"dir": cfg.dir}
    for name in ("checkpointer", "summary_writer"):
        inside = dict(getattr(cfg, name).items()) if getattr(cfg, name) is not None else {}
        folders |= {f"{name}.{k}": inside[k] for k in ("dir", "jsonl_path") if k in inside}
    for name, folder in folders.items():
        if isinstance(folder, str) and "://" in folder:
            raise ValueError(
                f"{name} is {folder!r}, but remote folders are not supported yet; mount it (with "
                "gcsfuse or s3fs, for example), and set the path of the mounted folder."
            )


def check_microbatches(cfg: Any, mesh_shape: Mapping[str, int]) -> None:
    """Checks that the micro-batches of a `SpmdTrainer.Config` divide over a mesh.

    Raises:
        SplitError: If the axes that split the batch do not divide a micro-batch.
    """
    axes = mesh_axes("batch", mesh_shape)
    parts = math.prod(mesh_shape[axis] for axis in axes)
    rows, num_microbatches = cfg.input.global_batch_size, cfg.num_microbatches
    if rows // num_microbatches % parts:
        said = ", ".join(f"{axis} {mesh_shape[axis]}" for axis in axes)
        raise SplitError(
            f"input.global_batch_size is {rows} and num_microbatches is {num_microbatches}: "
            f"micro-batches of {rows // num_microbatches} rows do not divide over the mesh axes "
            f"{said}, {parts} parts; set global_batch_size to a multiple of "
            f"{num_microbatches * parts}, or make num_microbatches or mesh_shape smaller."
        )


def set_if_required(cfg: ConfigBase, **values: Any) -> None:
    """Sets those of the fields that are REQUIRED still."""
    for name, value in values.items():
        if getattr(cfg, name) is REQUIRED:
            setattr(cfg, name, value)


def with_vocab_size(cfg: Any, model: Any, path: str) -> Any:
    """Returns a copy of an input's config that refuses ids beyond the model's vocabulary.

    Args:
        cfg: The input's config.
        model: The model's config.
        path: Where the input's config is, for errors.

    Raises:
        ValueError: If the input says that its vocabulary is larger than the model's.
    """
    cfg = cfg.clone()
    model_size = dict(model.items()).get("vocab_size")
    values = dict(cfg.items())
    if "vocab_size" not in values or not isinstance(model_size, int):
        return cfg
    if values["vocab_size"] is None:
        cfg.set(vocab_size=model_size)
    elif values["vocab_size"] > model_size:
        raise ValueError(
            f"{path}.vocab_size is {values['vocab_size']}, beyond model.vocab_size, which is "
            f"{model_size}; set the model's to at least that, or leave the input's unset."
        )
    return cfg


def with_run_length(cfg: Any, max_step: int) -> Any:
    """Returns a copy of the learner's config, whose schedules end with the run unless they say."""
    cfg = cfg.clone()
    for _, inside in sub_configs(cfg):
        if dict(inside.items()).get("max_step") is REQUIRED:
            inside.set(max_step=max_step)
    return cfg


def with_max_step(cfg: Any, policy: str, max_step: int) -> Any:
    """Returns a copy of a config, whose policy knows the run's last step if it asks for it."""
    cfg = cfg.clone()
    inside = getattr(cfg, policy)
    if dict(inside.items()).get("max_step", 0) is None:
        inside.set(max_step=max_step)
    return cfg
