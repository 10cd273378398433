"""Phases of a run: from a step on, other settings, such as data, sequence length or schedule.

A phase names the settings that it changes; those of earlier phases stay. A run takes the steps of
each phase as a start of its own, which resumes from the checkpoint of the phase before.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

from moelib.core.config import (
    REQUIRED,
    Configurable,
    Required,
    RequiredFieldMissingError,
    config_class,
    did_you_mean,
)
from moelib.core.config_text import set_at
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError

END_OF_PHASE = "end of phase"  # What a run was stopped by where another phase begins.
FIRST = "the first phase"  # In messages, that before the first one with a name.

# Fields of a trainer that a phase may change, in part or as a whole.
_CHANGEABLE = (
    "input",
    "model",
    "learner",
    "train_dtype",
    "reduce_dtype",
    "num_microbatches",
    "mesh_shape",
    "sharding_rules",
    "pipeline_schedule",
    "compiler_options",
    "kernel_backends",
    "evalers",
    "watchers",
)


class Phase(Configurable):
    """Settings from a step on."""

    @config_class
    class Config(Configurable.Config):
        after_step: Required[PositiveInt] = REQUIRED  # The phase begins after this step.
        # {path of a field: its value from then on}, such as {"input.seq_len": 32768}. Parameters
        # keep their shapes; those that are frozen or freed lose or begin their optimizer's state.
        changes: dict[str, Any] = {}


class OtherPhase(Exception):  # noqa: N818 (not an error)
    """The state of a run is of another phase than its trainer."""

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.name = name


def in_order(cfg: Any) -> list[tuple[str, Any]]:
    """Returns (name, phase) of a trainer's config, in the order of their steps.

    Raises:
        RequiredFieldMissingError: If one has no `after_step`.
        UserError: If two begin after the same step.
    """
    for name, phase in cfg.phases.items():
        if phase.after_step is REQUIRED:
            raise RequiredFieldMissingError("Phase.Config", ["after_step"], f"phases.{name}")
    found = sorted(cfg.phases.items(), key=lambda each: each[1].after_step)
    for (name, phase), (other, after) in itertools.pairwise(found):
        if phase.after_step == after.after_step:
            raise UserError(
                f"phases.{name}.after_step and phases.{other}.after_step are both "
                f"{phase.after_step}; put the changes of both into one phase."
            )
    return found


def check_ends(cfg: Any) -> None:
    """Raises UserError if a phase begins at the end of the run or later, or the run has no end."""
    if cfg.phases and cfg.max_step is REQUIRED:
        raise RequiredFieldMissingError("SpmdTrainer.Config", ["max_step"], "")
    for name, phase in in_order(cfg):
        if phase.after_step >= cfg.max_step:
            raise UserError(
                f"phases.{name}.after_step is {phase.after_step}, but the run ends at max_step="
                f"{cfg.max_step}; set after_step lower, or max_step higher."
            )


def name_at(cfg: Any, step: int) -> str | None:
    """Returns the name of the phase that takes a step, from 1; None before the first phase."""
    before = [name for name, phase in in_order(cfg) if phase.after_step < step]
    return before[-1] if before else None


def last_step(cfg: Any) -> int:
    """Returns the last step of the phase that a config names."""
    ends = (phase.after_step for phase in cfg.phases.values())
    return min([*(step for step in ends if step >= first_step(cfg)), cfg.max_step])


def first_step(cfg: Any) -> int:
    """Returns the first step of the phase that a config names."""
    return 1 if cfg.phase is None else cfg.phases[cfg.phase].after_step + 1


def steps_text(cfg: Any) -> str:
    """Returns a line on the phase that a config names, and its steps."""
    return f"{cfg.phase or FIRST}: steps {first_step(cfg)} to {last_step(cfg)}"


def num_tokens(cfg: Any) -> int:
    """Returns the tokens of the phase that a config names, with padding."""
    steps = last_step(cfg) - first_step(cfg) + 1
    return steps * cfg.input.global_batch_size * cfg.input.seq_len


def begins_after(cfg: Any, step: int) -> bool:
    """Returns whether the phase that a config names begins after this step."""
    return cfg.phase is not None and first_step(cfg) == step + 1


def of_step(cfg: Any, step: int) -> Any:
    """Returns the config with the settings of the phase that takes a step, from 1.

    `cfg` has those of none.
    """
    return applied(cfg.clone(phase=name_at(cfg, step))) if cfg.phases else cfg


def each(cfg: Any) -> dict[str, Any]:
    """Returns the config of each phase by its name; only `cfg` if it has those of one already."""
    if "phase" not in cfg or cfg.phase is not None:  # The program of a task has no phases.
        return {FIRST: cfg}
    names = [name for name, _ in in_order(cfg)]
    return {FIRST: cfg} | {name: applied(cfg.clone(phase=name)) for name in names}


def applied(cfg: Any) -> Any:
    """Returns the config with the settings of the phase that it names.

    Raises:
        UserError: If there is no such phase, or it changes what no phase can change.
    """
    phases = in_order(cfg)
    if cfg.phase is None:
        return cfg
    if cfg.phase not in cfg.phases:
        cure = did_you_mean(cfg.phase, cfg.phases) if cfg.phases else "the run has no phases."
        raise UserError(f"phase={cfg.phase!r}: there is no such phase; {cure}")
    last, cfg = cfg.phases[cfg.phase].after_step, cfg.clone()
    for name, phase in phases:
        if phase.after_step > last:
            break
        for path, value in phase.changes.items():
            if re.split(r"[.\[]", path, maxsplit=1)[0] not in _CHANGEABLE:
                raise UserError(
                    f"phases.{name}.changes has {path!r}; a phase changes only "
                    f"{', '.join(_CHANGEABLE)}, and what is inside."
                )
            try:
                set_at(cfg, path, value)
            except UserError as error:
                raise UserError(f"phases.{name}.changes[{path!r}]: {error}") from error
    return cfg


def past_lines(lines: Mapping[str, str], step: int) -> tuple[str, ...]:
    """Returns the beginnings of the lines of a config's text about phases that begin before a step.

    `lines` is the text as {path: literal}.
    """
    suffix = ".after_step"
    return tuple(
        path.removesuffix(suffix) + separator
        for path, value in lines.items()
        if path.startswith("phases") and path.endswith(suffix) and int(value) < step
        for separator in ".["  # Not the lines of a phase whose name begins with this one's.
    )
