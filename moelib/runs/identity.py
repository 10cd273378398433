"""Identity of a run: the settings that a run in a folder cannot change when it is resumed."""

import hashlib
import json
import logging
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core import tree
from moelib.core.config import REQUIRED, did_you_mean
from moelib.core.config_text import Line, lines, parse, sub_configs, text_lines
from moelib.core.errors import UserError
from moelib.core.trusted_code import UntrustedNameError
from moelib.data.batches.input import Input
from moelib.parallel.mesh import describe_mesh
from moelib.runs import phases
from moelib.runs.folder import EVENTS_FILE, RunFolder
from moelib.runtime import storage
from moelib.runtime.processes import agreed, gather_json
from moelib.runtime.storage import read_text
from moelib.runtime.versions import library_versions

logger = logging.getLogger(__name__)

_MOST_LINES = 10  # Lines of changes that are printed; all are events.
# Moments in 8 bits, which other formats cannot read.
_MOMENT, _OF_ITS_OWN = r"learner\b.*\b(first|second)_moment", "EIGHT_BIT"

# Effects of a setting that differs when a run resumes. Those of `AcceptedChange` must be named in
# `accept_changes`, since all further steps differ; "tokenizer" is a change of the data.
AcceptedChange = Literal["schedule", "train_dtype", "accumulation", "config", "data", "tokenizer"]
_OF_NUMBERS = ("config", "data")  # Those of settings that determine the numbers of a run.
LOGGED = "logged"  # An event, and a line.
FREE = "free"  # Reported elsewhere, or without an effect on what the run does.

# Threads and the location of the data, whose content the input compares itself; may also differ
# between processes.
_OF_A_PROCESS = r".*\b(prefetch\w*|num_threads|num_workers|path|paths|dir|data_dir)\b.*"
# (pattern of a path, effect of a change); the first that matches decides. Without one, a setting
# of the trainer's `NUMBERS`, or of a field that its subclass adds, has the effect "config".
RESUME = (
    (r".*\.dispatcher\.capacity_factor", "config"),  # Decides which tokens are dropped.
    (r"learner\b.*\b(max_step|decay_steps)\b.*", "schedule"),
    (r"train_dtype|reduce_dtype", "train_dtype"),
    (r"num_microbatches", "accumulation"),  # Losses of load balance are over a micro-batch.
    (r"(accept_changes|init_from|rewind_to|skip_batches|mesh_shape|mesh_axis_names)\b.*", FREE),
    (_OF_A_PROCESS, FREE),
    (r"input\b.*", "data"),
    # Tuned while a run trains: rates, clipping, skipped steps.
    (r"learner\.(skip|norms_of)\b.*", LOGGED),
    (r"learner\b.*\.((adam_)?learning_rate|peak_lr|end_lr|max_norm|max_delta)", LOGGED),
    (r"learner\b.*\.(clipping|clipping_threshold)", LOGGED),
    # The length of a run, and other implementations of the same computation.
    (r".*\b(max_step|decay_steps|max_batches|loss_chunk_size|offload_state)\b.*", LOGGED),
    (r".*\b(dispatcher|\w*kernel|\w*backend|remat\w*)\b.*", LOGGED),
)


class Change(NamedTuple):
    """A setting that differs from that of the run so far."""

    path: str
    was: str
    now: str
    effect: str = LOGGED


class TrainerDirConflictError(UserError):
    """The folder holds checkpoints of a run with another config."""


def check_accepted(names: Sequence[str]) -> Sequence[AcceptedChange]:
    """Returns the names. Raises UserError if one is no `AcceptedChange`."""
    known = typing.get_args(AcceptedChange)
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"accept_changes (--accept_changes) has {name!r}; {near}")
    return cast("Sequence[AcceptedChange]", names)


def _effect(path: str, operational: Collection[str]) -> str:
    """Returns the effect of a setting that differs; `operational` are fields without numbers."""
    for pattern, effect in RESUME:
        if re.fullmatch(pattern, path):
            return effect
    return LOGGED if re.split(r"[.\[]", path, maxsplit=1)[0] in operational else "config"


def _operational(cfg: Any) -> set[str]:
    """Returns the fields of a trainer's config that do not determine the numbers of a run."""
    trainer = next(x for x in cfg.klass.__mro__ if "NUMBERS" in x.__dict__)
    return {name for name, _ in trainer.default_config().items()} - {*trainer.NUMBERS, "klass"}


def identity(config_text: str, cfg: Any) -> dict[str, str]:
    """Returns the lines of a config's text that determine the numbers of a run, {path: literal}.

    `cfg` is the config of a trainer of the same class.
    """
    operational = _operational(cfg)
    lines = text_lines(config_text).items()
    return {path: value for path, value in lines if _effect(path, operational) in _OF_NUMBERS}


def without_watchers(text: str) -> str:
    """Returns a config's text, its lines of watchers empty."""
    return re.sub(r"^watchers\b.*", "", text, flags=re.MULTILINE)


def config_hash(cfg: Any) -> str:
    """Returns a digest of the identity of a run, by which its files name its config."""
    values = json.dumps(identity(cfg.debug_string(), cfg), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def check_processes(cfg: Any) -> None:
    """Raises UserError on all processes if their configs differ, except in paths and threads."""
    lines = text_lines(cfg.debug_string()).items()
    values = {path: value for path, value in lines if not re.fullmatch(_OF_A_PROCESS, path)}
    _check_equal(values, "start all processes of a job with the same config")


def check_inputs(name: str, opened: Input) -> None:
    """Raises UserError on all processes if the data of an input differ between them."""
    found = agreed(lambda: tree.by_path(opened.identity)).items()
    values = {f"{name}/{path}".replace("/", "."): value for path, value in found}
    _check_equal(values, "give all processes of a job the same data")


def _check_equal(values: Mapping[str, Any], cure: str) -> None:
    digests = gather_json(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    each = gather_json(values)
    other = next(i for i, digest in enumerate(digests) if digest != digests[0])
    path = _different(each[0], each[other])[0]
    first, second = (each[i].get(path, "not set") for i in (0, other))
    raise UserError(f"{path} is {first} in process 0, and {second} in process {other}; {cure}.")


def warn_other_file(
    folder: RunFolder,
    record: CheckpointRecord,
    cfg: Any,
    names: Mapping[str, Any] | None = None,
    *,
    replaced: bool = False,
) -> None:
    """Reports a config.txt with settings that are neither those of the record nor those used.

    Args:
        folder: Folder of the run.
        record: The record.
        cfg: Config that is used.
        names: Classes and functions that the file may name, as in `parse`.
        replaced: Whether the file is replaced by `cfg`, so that all of its lines count; else those
            that determine the numbers of the run.

    Raises:
        UntrustedNameError: If config.txt names code that it may not name.
    """
    path = folder.config_file
    if not record.config or not storage.exists(path):
        return
    try:
        if (written := read_text(path)) == record.config:
            return
    except UserError as error:
        logger.warning("%s The config of step %d is used.", error, record.step)
        return
    if not replaced:
        written = without_watchers(written)  # Of modules that it may not name.
    texts = (_as_today(written, f"{path}:", names), record.config, cfg.debug_string())
    if text_lines(texts[0]).get("phase") != text_lines(texts[1]).get("phase"):
        return  # Of a phase that was stopped before its first checkpoint.
    there, was, here = (text_lines(text) if replaced else identity(text, cfg) for text in texts)
    differ = [x for x in _different(there, here) if there.get(x) != was.get(x)]
    if not differ:
        return
    pairs = [(x, *_pair_of(x, there, here)) for x in differ[:_MOST_LINES]]
    found = [f"{x:.200} is {in_file} in the file, and {used} here" for x, in_file, used in pairs]
    if (more := len(differ) - _MOST_LINES) > 0:
        found.append(f"{more} more lines differ")
    logger.warning(
        "%s is not the config of step %d, and is %s: %s.",
        *(path, record.step),
        "replaced by that of this start; change fields by --set" if replaced else "not used",
        "; ".join(found),
    )


def _as_today(text: str, source: str, names: Mapping[str, Any] | None) -> str:
    """Returns a config's text with the fields of today; unchanged if it cannot be parsed.

    Raises:
        UntrustedNameError: If it names code that it may not name.
    """
    try:
        return parse(text, source=source, names=names).debug_string()
    except UserError as error:
        if type(error) is UntrustedNameError:  # Not of a module that does not exist.
            raise
        logger.warning("A config cannot be parsed, so it is compared line by line: %s", error)
        return text


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]


def check_directory(
    cfg: Any,
    folder: RunFolder,
    record: CheckpointRecord | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Checks that a folder with checkpoints belongs to the run that `cfg` describes.

    The config of the run is read first: fields that are new since and left at their defaults make
    no difference. Other changes, also of the mesh and of versions, are logged, and are events
    "changed" in the log of the run.

    Args:
        cfg: Config of the trainer, with the settings of no phase.
        folder: The folder.
        record: Record of the checkpoint to resume from, if one can be read.
        mesh: Sizes of the mesh axes; None if they are not compared.

    Raises:
        TrainerDirConflictError: If not, and `cfg` does not accept it; names the first path that
            differs. Also if the schedule, accumulation or dtype of training differ.
        UntrustedNameError: If the config of the run names code that it may not name.
    """
    text, source = folder.config_text(record)
    if not text:
        return
    step = 0 if record is None else record.step
    cfg = phases.of_step(cfg, step)
    names = dict(named(line) for line in lines(cfg))  # The user's own config names them.
    saved = _as_today(text, source, names)
    if record is not None:
        warn_other_file(folder, record, cfg, names, replaced=True)
    before, now = text_lines(saved), text_lines(cfg.debug_string())
    operational, is_moved = _operational(cfg), _is_moved(cfg)
    past = (*phases.past_lines(before, step), *phases.past_lines(now, step))
    changes: list[Change] = []
    for path in _different(before, now):
        effect = "schedule" if path == "max_step" and is_moved else _effect(path, operational)
        if path.startswith(past):
            effect = "config"
        if effect != FREE:
            was, value = _pair_of(path, before, now)
            changes.append(Change(path, was, value, effect))
    _refuse(folder, changes, cfg.accept_changes or ())
    changes += [] if record is None else _other_changes(record, mesh or {})
    expected = "" if is_moved else "max_step"  # A resumed run trains for longer.
    _log_changes(folder, None if record is None else record.step, changes, expected)


def _refuse(folder: RunFolder, changes: Sequence[Change], accepted: Sequence[str]) -> None:
    """Raises TrainerDirConflictError unless all changes are possible and accepted."""
    for path, was, now, _ in changes:
        if _loses_moments(path, was, now):
            raise TrainerDirConflictError(
                f"{path} is {was} in {folder.path}, and {now} in this config, but stored moments "
                "are not converted; set it back, or begin a run in another directory."
            )
    refused = [change for change in changes if change.effect not in (LOGGED, *accepted)]
    if numbers := [change for change in refused if change.effect in _OF_NUMBERS]:
        path, was, now, effect = numbers[0]
        more = f" ({len(numbers) - 1} more lines differ)" if len(numbers) > 1 else ""
        of_model = any(change.path.startswith("model.") for change in numbers)
        end = ", if its arrays have the same shapes" if of_model else ""
        raise TrainerDirConflictError(
            f"{folder.path} belongs to another run: {path} is {was} there, and {now} in this "
            f"config{more}; choose another directory, set it back to resume that run, or pass "
            f"{_accepting(effect)} to continue it with this config{end}."
        )
    for path, was, now, effect in refused:
        raise TrainerDirConflictError(
            f"{path} is {was} in {folder.path}, and {now} in this config, which changes the "
            f"{effect} of all further steps; set it back, or pass {_accepting(effect)}."
        )


def _loses_moments(path: str, was: str, now: str) -> bool:
    return bool(re.fullmatch(_MOMENT, path)) and _OF_ITS_OWN in was + now


def check_moments(before: Any, cfg: Any) -> None:
    """Raises UserError if a phase stores moments so that those of the phase before are lost."""
    old, new = (text_lines(each.debug_string()) for each in (before, cfg))
    for path in _different(old, new):
        was, now = _pair_of(path, old, new)
        if _loses_moments(path, was, now):
            raise UserError(
                f"{path} is {was} before it, and {now} in it, but stored moments are not "
                "converted; remove the change."
            )


def _pair_of(path: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the two values at a path; of long ones, the part where they begin to differ."""
    values = [found.get(path, "not set") for found in (before, now)]
    first = next((i for i, (a, b) in enumerate(zip(*values, strict=False)) if a != b), 0)
    start = max(0, first - 40)
    return [v if len(v) <= 120 else f"...{v[start : start + 80]}..." for v in values]


def _accepting(name: str) -> str:
    return f'--accept_changes={name} (in Python, accept_changes=["{name}"])'


def _other_changes(record: CheckpointRecord, mesh: Mapping[str, int]) -> list[Change]:
    """Returns the mesh and the versions of libraries that differ from those of a checkpoint."""
    before = {"mesh": describe_mesh(record.mesh) if record.mesh else "", **record.versions}
    values = {"mesh": describe_mesh(mesh) if mesh else "", **library_versions()}.items()
    return [
        Change(name, was[:99], now)
        for name, now in values
        if now and (was := before.get(name)) and was != now
    ]


def _log_changes(
    folder: RunFolder, step: int | None, changes: Sequence[Change], expected: str
) -> None:
    """Prints changes since a step, and appends those that are new to the log of the run.

    A change of the path `expected` is no warning.
    """
    source = folder.path if step is None else f"{folder.path} at step {step}"
    for path, was, now, _ in changes[:_MOST_LINES]:
        level = logging.INFO if path == expected else logging.WARNING
        logger.log(level, "%s was %s in %s, and is %s from now on.", path, was, source, now)
    if (more := len(changes) - _MOST_LINES) > 0:
        logger.warning("%d more changes of the config are in %s.", more, EVENTS_FILE)
    if jax.process_index() != 0 or not changes:
        return
    known = [{**event, "time": None} for event in folder.events()]
    for path, was, now, _ in changes:
        fields = {"step": step, "path": path, "before": was, "now": now}
        if {"time": None, "event": "changed", **fields} not in known:
            folder.log("changed", **fields)


def named(line: Line) -> tuple[str, Any]:
    """Returns the name in a line of a config, and what it stands for."""
    if line.text.startswith("<"):
        return line.text[1:-1], type(line.value)
    return line.text, line.value


def _is_moved(cfg: Any) -> bool:
    """Returns whether the schedules of a trainer's learner depend on its `max_step`."""
    inside = (dict(each.items()) for _, each in sub_configs(cfg.learner))
    return any(fields.get("max_step") is REQUIRED for fields in inside)
