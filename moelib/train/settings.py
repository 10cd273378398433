"""Checks of a trainer's config, and the fields of its children that follow from others."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from moelib.checkpoint.writers import check_url
from moelib.core.config import REQUIRED, RequiredFieldMissingError, did_you_mean
from moelib.core.config_text import join_path, sub_configs
from moelib.core.errors import UserError
from moelib.core.precision import check_float
from moelib.data.batches.skip_batches import parse_range
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.sharding import PIPELINE_RULES, SplitError, mesh_axes
from moelib.runs.folder import RunFolder
from moelib.runtime import storage
from moelib.train.watcher import Watcher
from moelib.train.watchers import gradient_noise
from moelib.train.watchers.goodput_log import Goodput
from moelib.train.watchers.gradient_noise import NoiseScale
from moelib.train.watchers.profiler import ProfilerWindow
from moelib.train.watchers.watchdog import Watchdog

logger = logging.getLogger(__name__)


def check_config(cfg: Any) -> None:
    """Checks a `SpmdTrainer.Config`.

    Raises:
        RequiredFieldMissingError: If a field of an input is unset.
        UserError: If a setting is invalid.
    """
    for path, holder in _inputs(cfg).items():
        if holder.input is REQUIRED:
            raise RequiredFieldMissingError("SpmdTrainer.Config", ["input"], join_path(path[:-1]))
        if missing := [name for name, value in holder.input.items() if value is REQUIRED]:
            raise RequiredFieldMissingError("the input", missing, join_path(path))
    gradient_noise.check(cfg.log_gradient_noise, cfg.num_microbatches, in_pipeline=False)
    if cfg.train_dtype is not None:
        check_float("train_dtype", cfg.train_dtype)
    batch_size, parts = cfg.input.global_batch_size, cfg.num_microbatches
    if batch_size % parts:
        raise UserError(
            f"{_batch_field(cfg)} is {batch_size}, which num_microbatches, {parts}, does not "
            f"divide; set it to a multiple of {parts}, or num_microbatches to a divisor of "
            f"{batch_size}."
        )
    _check_folders(cfg)
    _check_course(cfg)
    if cfg.checkpointer is not None and (metric := cfg.checkpointer.best_metric) is not None:
        evaler = metric.partition("/")[0]
        if evaler not in cfg.evalers:
            raise UserError(
                f"checkpointer.best_metric is {metric!r}, but there is no evaler {evaler!r}; "
                + did_you_mean(evaler, cfg.evalers)
            )


def _check_course(cfg: Any) -> None:
    """Raises UserError if checkpoints are missing that a setting needs, or a range is no range."""
    for text in cfg.skip_batches or ():
        parse_range(text)
    for name in ("rewind_to", "phases"):
        if cfg.checkpointer is None and dict(cfg.items())[name] not in (None, {}):
            raise UserError(f"{name} is set, but checkpointer is None; set it, or no {name}.")


def _inputs(cfg: Any) -> dict[tuple[str, ...], Any]:
    """Returns {path of an input: config that holds it} of a trainer."""
    evalers = {("evalers", name, "input"): evaler for name, evaler in cfg.evalers.items()}
    return {("input",): cfg, **evalers}


def _check_folders(cfg: Any) -> None:
    """Raises UserError if checkpoints or traces cannot be written to their folder."""
    folder = dict(cfg.checkpointer.items())["dir"] if cfg.checkpointer is not None else cfg.dir
    folder = cfg.dir if folder is REQUIRED else folder
    if isinstance(folder, str) and storage.is_remote(folder):
        check_url("checkpointer.dir", folder)


def check_batch(cfg: Any, mesh_shape: Mapping[str, int]) -> None:
    """Checks that a mesh divides the sequences and micro-batches of a `SpmdTrainer.Config`.

    Raises:
        SplitError: If not; names the field, the mesh axes and a value that fits.
        UserError: If a chunk of the loss is larger than a micro-batch.
    """
    for name in ("sequence", "residual_sequence"):
        parts, sizes = _parts(name, mesh_shape)
        for path, holder in _inputs(cfg).items():
            # Examples of a task are of length 1, and not split.
            if holder.input.seq_len > 1 and holder.input.seq_len % parts:
                raise SplitError(
                    f"{join_path(path)}.seq_len is {holder.input.seq_len}, which does not divide "
                    f"into the {parts} parts of {name!r} over the mesh axes {sizes}; set it to a "
                    f"multiple of {parts}, or make mesh_shape smaller there."
                )
    parts, sizes = _parts("batch", mesh_shape)
    batch_size, num_microbatches = cfg.input.global_batch_size, cfg.num_microbatches
    if batch_size // num_microbatches % parts:
        raise SplitError(
            f"{_batch_field(cfg)} is {batch_size} and num_microbatches is {num_microbatches}: "
            f"micro-batches of {batch_size // num_microbatches} do not divide over the mesh axes "
            f"{sizes}, {parts} parts; set the batch size to a multiple of "
            f"{num_microbatches * parts}, or make num_microbatches or mesh_shape smaller."
        )
    tokens = batch_size // num_microbatches * cfg.input.seq_len // parts
    tokens //= _parts("sequence", mesh_shape)[0]
    check_loss_chunk(dict(cfg.model.items()).get("loss_chunk_size"), tokens)


def check_loss_chunk(chunk_size: int | None, tokens: int) -> None:
    """Raises UserError if a chunk of the loss is larger than a device's micro-batch of `tokens`."""
    if chunk_size is not None and chunk_size > tokens:
        raise UserError(
            f"model.loss_chunk_size is {chunk_size}, more than the {tokens} tokens of a device's "
            f"micro-batch; set it to {tokens} or less, or to None."
        )


def schedule_on(cfg: Any, mesh_shape: Mapping[str, int]) -> Schedule | None:
    """Returns the schedule of a `SpmdTrainer.Config`; None on a mesh where it has no effect."""
    pairs = cfg.pipeline_schedule is Schedule.DUALPIPE_V and mesh_shape.get("expert", 1) > 1
    return cfg.pipeline_schedule if mesh_shape.get("pipeline", 1) > 1 or pairs else None


def warn_unused_schedule(cfg: Any, mesh_shape: Mapping[str, int]) -> None:
    """Logs a warning if the schedule of a `SpmdTrainer.Config` has no effect on a mesh."""
    if cfg.pipeline_schedule is not None and schedule_on(cfg, mesh_shape) is None:
        logger.warning(
            "pipeline_schedule is %s, but the mesh axis pipeline is 1, so that it has no effect; "
            "set mesh_shape=pipeline=2, for example, or pipeline_schedule=None.",
            cfg.pipeline_schedule.name,
        )


def watchers_of(cfg: Any) -> dict[str, Watcher.Config]:
    """Returns the watchers of a `SpmdTrainer.Config`: those of its fields, then its own."""
    found: dict[str, Watcher.Config] = {
        "goodput": Goodput.default_config(),
        "watchdog": Watchdog.default_config().set(
            timeout_seconds=cfg.watchdog_timeout_seconds,
            crash_timeout_seconds=cfg.crash_on_hang_timeout_seconds,
        ),
        "profiler": ProfilerWindow.default_config(),
    }
    if cfg.log_gradient_noise:
        found["gradient_noise"] = NoiseScale.default_config()
    if taken := found.keys() & cfg.watchers.keys():
        raise UserError(
            f"watchers.{min(taken)}: the trainer has a watcher of this name; choose another name."
        )
    return found | cfg.watchers


def rules_of(cfg: Any) -> dict[str, Sequence[str]]:
    """Returns the changed sharding rules of a `SpmdTrainer.Config`."""
    own = {} if cfg.pipeline_schedule is None else PIPELINE_RULES
    return {**own, **(cfg.sharding_rules or {})}


def _batch_field(cfg: Any) -> str:
    """Returns the name of the batch size, for tasks that of their argument."""
    return "batch_size" if "collate" in cfg.input else "input.global_batch_size"


def _parts(name: str, mesh_shape: Mapping[str, int]) -> tuple[int, str]:
    """Returns the number of parts of a logical axis, and the mesh axes it is split over."""
    axes = mesh_axes(name, mesh_shape)
    sizes = ", ".join(f"{axis} {mesh_shape[axis]}" for axis in axes)
    return math.prod(mesh_shape[axis] for axis in axes), sizes


def completed(cfg: Any) -> Any:
    """Returns a copy of a `SpmdTrainer.Config` with the unset fields that follow from others.

    These are the folders inside `dir`, the last step of schedules and policies, and the vocabulary
    of inputs, which then refuse token ids beyond that of the model.

    Raises:
        UserError: If the vocabulary of an input is larger than the model's.
    """
    cfg = cfg.clone()
    for path, holder in _inputs(cfg).items():
        holder.input.complete(cfg.model)
        _set_vocab_size(holder.input, dict(cfg.model.items()).get("vocab_size"), join_path(path))
    for watcher in cfg.watchers.values():
        watcher.complete(cfg)
    for _, inside in sub_configs(cfg.learner):
        fill(inside, REQUIRED, max_step=cfg.max_step)
    for evaler in cfg.evalers.values():
        fill(evaler.eval_policy, None, max_step=cfg.max_step)
    folder = RunFolder(cfg.dir)
    if cfg.checkpointer is not None:
        fill(cfg.checkpointer.save_policy, None, max_step=cfg.max_step)
        fill(cfg.checkpointer, REQUIRED, dir=folder.own_checkpoints)
    fill(
        cfg.summary_writer,
        REQUIRED,
        dir=folder.file("summaries"),
        jsonl_path=folder.metrics_file,
    )
    return cfg


def fill(cfg: Any, unset: Any, **values: Any) -> None:
    """Sets the fields that the config has and whose value is `unset`."""
    known = dict(cfg.items())
    cfg.set(**{name: x for name, x in values.items() if name in known and known[name] is unset})


def _set_vocab_size(cfg: Any, model_size: Any, path: str) -> None:
    """Sets the vocabulary of an input's config, if it has that field, or checks it."""
    own_size = dict(cfg.items()).get("vocab_size", 0)
    if not isinstance(model_size, int):
        return
    if own_size is None:
        cfg.set(vocab_size=model_size)
    elif own_size > model_size:
        raise UserError(
            f"{path}.vocab_size is {own_size}, beyond model.vocab_size, which is {model_size}; set "
            "the model's to at least that, or leave the input's unset."
        )
