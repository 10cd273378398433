"""Runs as analyses read them: parameters, tokens, FLOPs, and losses over steps."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core import config_text
from moelib.core.config_text import lines
from moelib.core.errors import UserError
from moelib.runs.folder import RunFolder
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.storage import read_text

VALIDATION = "validation/cross_entropy"
TRAINING = "mean_loss"  # Mean of the steps since the line before, unlike `cross_entropy`.
MIN_STEPS = 300  # Shorter runs have hardly left the warm-up.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run, as a point of a scaling law."""

    name: str
    parameters: float  # Active parameters, embedding and output head included.
    non_embedding_parameters: float  # Active parameters without these two.
    total_parameters: float = 0  # All parameters; 0 if unknown.
    tokens: float  # Valid tokens trained on.
    flops: float  # FLOPs of training: forward and backward pass, padding included.
    loss: float  # Nats per token; NaN if it is not finite, or if there is none.
    steps: int  # Those before the loss.
    max_step: int = 0  # Steps of a finished run; 0 if unknown.
    vocab_size: int = 0  # 0 if unknown.
    data: str = ""  # Identity of the training data; empty if unknown.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The losses of a run after each interval that has one."""

    run: TrainingRun
    steps: npt.NDArray[np.float64]
    losses: npt.NDArray[np.float64]  # Nats per token.
    flops: npt.NDArray[np.float64]  # FLOPs of training so far.
    # Seconds of steps and of waiting for input so far, without compilation, evaluations and
    # checkpoints.
    seconds: npt.NDArray[np.float64]


def read_curve(folder: str, metric: str = TRAINING) -> LossCurve:
    """Returns the losses of the run in a folder, and its counts from its own config.

    Args:
        folder: Folder of the run, with config.txt and metrics.jsonl.
        metric: Loss to read.

    Raises:
        UserError: If a file is missing or cannot be used, no line of a finished run has the metric,
            or steps of its phases may have different FLOPs.
    """
    from moelib.models.cost import model_cost

    path = RunFolder(folder).config_file
    cfg = config_text.parse(read_text(path), source=f"{path}:")
    if "vocab_size" not in cfg.model:
        raise UserError(f"{path}: model is no language model; name runs of language models.")
    for name, phase in cfg.phases.items():  # The file has the sizes of the last one alone.
        if found := [x for x in phase.changes if re.match(r"model|input(\.(?!source)|$)", x)]:
            raise UserError(
                f"{path}: phases.{name}.changes has {found[0]!r}, so that steps may differ in "
                "their FLOPs; name runs of one batch size, length and model."
            )
    batch = cfg.input.global_batch_size * cfg.input.seq_len  # Positions per step.
    cost = model_cost(cfg.model.instantiate(parent=None), seq_len=cfg.input.seq_len)
    found = _columns(folder, (metric, "step_seconds", "num_tokens"))
    steps, losses = np.asarray(found[metric], np.float64).reshape(-1, 2).T
    timed, per_step = np.asarray([(0, 0.0), *found["step_seconds"]], np.float64).T
    times = np.interp(steps, timed, np.cumsum(np.diff(timed, prepend=0) * per_step))
    tokens = [value for _, value in found["num_tokens"]]
    if not len(steps) and timed[-1] >= cfg.max_step:
        raise UserError(f"{folder}: no line of its metrics.jsonl has {metric!r}; name another.")
    step = int(steps[-1] if len(steps) else timed[-1])  # Of the loss, and so of the counts.
    run = TrainingRun(
        name=folder,
        total_parameters=cost.total_parameters,
        parameters=cost.active_parameters,
        non_embedding_parameters=cost.active_non_embedding_parameters,
        tokens=step * (float(np.mean(tokens)) if tokens else batch),
        flops=cost.train_flops_per_token * batch * step,
        loss=float(losses[-1]) if len(losses) else math.nan,
        steps=step,
        max_step=cfg.max_step,
        vocab_size=cfg.model.vocab_size,
        data=_data(folder, cfg),
    )
    flops = steps * batch * cost.train_flops_per_token
    return LossCurve(run=run, steps=steps, losses=losses, flops=flops, seconds=times)


def _columns(folder: str, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """Returns {metric: [(step, value or NaN), ...]} of a run."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for line in read_metrics(folder, names):
        for name in names:
            if name in line:
                value = line[name]
                found[name].append((line["step"], math.nan if value is None else value))
    return found


def _data(folder: str, cfg: Any) -> str:
    """Returns the identity of a run's data in its newest checkpoint, or else in its config."""
    record = RunFolder(folder).record()
    saved = record.input.get("input") if record and record.input else None
    if isinstance(saved, dict) and saved.get("source"):
        return json.dumps(saved["source"], sort_keys=True)
    return "; ".join(f"{line.path}: {line.text}" for line in lines(cfg.input.source, unset=False))


def default_metric(folders: Sequence[str]) -> str:
    """Returns the loss of the evaler "validation" if all runs have it, else that of training."""
    evaluated = (any(VALIDATION in x for x in read_metrics(f, [VALIDATION])) for f in folders)
    return VALIDATION if all(evaluated) else TRAINING


def select(runs: Sequence[TrainingRun]) -> tuple[list[TrainingRun], dict[str, str]]:
    """Returns the runs that a scaling law may be fitted to, and {name of another: reason}.

    Raises:
        UserError: If the runs have different vocabularies or data, which cannot be compared.
    """
    for field in ("vocab_size", "data"):
        known: dict[Any, str] = {}
        for run in runs:
            if value := getattr(run, field):
                known.setdefault(value, run.name)
        if len(known) > 1:
            (a, first), (b, second), *_ = known.items()
            raise UserError(
                f"{field} is {a!s:.300} in {first}, and {b!s:.300} in {second}; name runs of one "
                f"{field}."
            )
    excluded: dict[str, str] = {}
    for run in runs:
        if math.isnan(run.loss) and run.steps < run.max_step:
            excluded[run.name] = f"it is at step {run.steps} of {run.max_step}, without a loss"
        elif not 0 < run.loss < math.inf:
            excluded[run.name] = f"its last loss is {run.loss:g}, which has no finite logarithm"
        elif run.steps < run.max_step:
            excluded[run.name] = f"its last loss is of step {run.steps} of {run.max_step}"
        elif run.steps < MIN_STEPS:
            excluded[run.name] = f"it has {run.steps} steps, fewer than {MIN_STEPS}"
    return [run for run in runs if run.name not in excluded], excluded
