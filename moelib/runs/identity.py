"""Identity of a run: the settings that a run in a folder cannot change when it is resumed."""

import hashlib
import json
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core import tree
from moelib.core.config import REQUIRED
from moelib.core.config_parse import parse
from moelib.core.config_paths import Line, lines, sub_configs, text_lines
from moelib.core.errors import UserError
from moelib.core.trusted_code import UntrustedNameError
from moelib.data.input import Input
from moelib.parallel.mesh import describe_mesh
from moelib.runs.run_log import CONFIG_FILE, EVENTS_FILE, log_event, read_events
from moelib.runtime import storage
from moelib.runtime.files import atomic_file, read_json, read_text, write_json
from moelib.runtime.processes import gather_json
from moelib.runtime.versions import library_versions

logger = logging.getLogger(__name__)

_RUN_FILE = "run.json"

# All fields of SpmdTrainer.Config but model, learner, input and prng_seed. Everything else
# determines the numbers of a run: also the trainer's class, and the fields of one's own trainer.
_NOT_OF_THE_NUMBERS = re.compile(
    r"(name|max_step|train_dtype|num_microbatches|mesh_shape|mesh_axis_names"
    r"|mesh_rules|auto_sharding|sharding_rules|pipeline_schedule|compiler_options"
    r"|kernel_backends|skip_kernel_check|dir|accept_changes|checkpointer|evalers|summary_writer"
    r"|log_every_n_steps|stop_on_nan|init_from|watchers|rewind_to|skip_batches"
    r"|watchdog_timeout_seconds|crash_on_hang_timeout_seconds|start_trace_steps|num_trace_steps"
    r"|deterministic|input_retries|log_gradient_noise"
    r")\b.*"
)

# Threads and the location of the data, whose content the input compares itself.
_OF_A_PROCESS = r"prefetch\w*|num_threads|num_workers|path|paths|dir|data_dir"
# Exceptions: also the length of a run, and implementations of the same computation.
_MAY_CHANGE = re.compile(
    r".*\b(max_step|decay_steps|max_batches|dispatcher|\w*kernel|\w*backend|remat\w*"
    rf"|loss_chunk_size|offload_state|{_OF_A_PROCESS})\b.*"
)

# Settings of the learner that are tuned while a run trains: rates, clipping, skipped steps.
_TUNED = re.compile(
    r"learner\.(skip|norms_of)\b.*|learner\b.*\.(learning_rate|peak_lr|end_lr|max_norm|max_delta"
    r"|clipping|clipping_threshold)"
)
# Changes that are not logged: reported elsewhere, or without an effect on what the run does.
_NOT_LOGGED = re.compile(
    r"accept_changes\b.*|init_from\b.*|rewind_to|skip_batches\b.*|mesh_(shape|axis_names)\b.*"
    rf"|.*\b({_OF_A_PROCESS})\b.*"
)
_MOST_LINES = 10  # Lines of changes that are printed; all are events.

# Settings that move a schedule.
_SCHEDULE = re.compile(r"learner\b.*\b(max_step|decay_steps)\b.*")
# Other settings that change all further steps, and their names in `accept_changes`: losses of load
# balance are over a micro-batch, for example.
_MUST_ACCEPT = {"train_dtype": "train_dtype", "num_microbatches": "accumulation"}

# Settings by which arrays of a checkpoint are stored, and values that others cannot read.
_STORED = re.compile(r"learner\b.*\b(first|second)_moment")
_OF_ITS_OWN = "EIGHT_BIT"

# But the capacity of a dispatcher decides which tokens are dropped.
_CAPACITY = re.compile(r".*\.dispatcher\.capacity_factor")


class TrainerDirConflictError(UserError):
    """The folder holds checkpoints of a run with another config."""


def identity(config_text: str) -> dict[str, str]:
    """Returns the lines of a config's text that determine the numbers of a run, {path: literal}."""
    return {
        path: value
        for path, value in text_lines(config_text).items()
        if not _NOT_OF_THE_NUMBERS.fullmatch(path)
        and not _TUNED.fullmatch(path)
        and (not _MAY_CHANGE.fullmatch(path) or _CAPACITY.fullmatch(path))
    }


def config_hash(config_text: str) -> str:
    """Returns a digest of `identity`, by which the files of a run name its config."""
    values = json.dumps(identity(config_text), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def check_processes(cfg: Any) -> None:
    """Raises UserError on all processes if their configs differ, except in paths and threads."""
    may_differ = re.compile(rf".*\b({_OF_A_PROCESS})\b.*")
    values = {
        p: v for p, v in text_lines(cfg.debug_string()).items() if not may_differ.fullmatch(p)
    }
    _check_equal(values, "start all processes of a job with the same config")


def check_inputs(name: str, opened: Input) -> None:
    """Raises UserError on all processes if the data of an input differ between them."""
    found = tree.by_path(opened.identity).items()
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


def saved_config(
    directory: str,
    record: CheckpointRecord | None,
    *,
    names: Mapping[str, Any] | None = None,
    use_file: bool = False,
) -> tuple[str, str]:
    """Returns the text of a run's config and its source, for errors; both empty if there is none.

    The text is that in the record of a checkpoint, which has a digest, so that a step is read with
    the config that trained it. A config.txt with other settings, or that cannot be read, is then
    reported.

    Args:
        directory: Folder of the run.
        record: The record; None, or one without a config, for config.txt.
        names: Classes and functions that the config may name, as in `parse`.
        use_file: Whether config.txt is preferred to the record.

    Raises:
        UntrustedNameError: If config.txt names code that it may not name.
        UserError: If config.txt is needed, and cannot be read.
    """
    path, written = os.path.join(directory, CONFIG_FILE), ""
    try:
        written = read_text(path) if storage.exists(path) else ""
    except UserError as error:
        if record is None or not record.config or use_file:
            raise
        logger.warning("%s The config of step %d is used.", error, record.step)
    if record is None or not record.config or written == record.config or (written and use_file):
        return (written, f"{path}:") if written else ("", "")
    source = f"{directory}, config in the record of step {record.step}, line "
    if written:
        there, here = (
            identity(_as_today(text, source, names))
            for text, source in ((written, f"{path}:"), (record.config, source))
        )
        if first := next(iter(_different(there, here)), None):
            logger.warning(
                "%s is not the config of step %d, which is used instead: %.200s is %s in the file, "
                "and %s in the checkpoint.",
                *(path, record.step, first, *_pair_of(first, there, here)),
            )
    return record.config, source


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
    directory: str,
    record: CheckpointRecord | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Checks that a folder with checkpoints belongs to the run that `cfg` describes.

    The config of the run is read first: fields that are new since and left at their defaults make
    no difference. Other changes, also of the mesh and of versions, are logged, and are events
    "changed" in the log of the run.

    Args:
        cfg: Config of the trainer.
        directory: The folder.
        record: Record of the checkpoint to resume from, if one can be read.
        mesh: Sizes of the mesh axes; None if they are not compared.

    Raises:
        TrainerDirConflictError: If not, and `cfg` does not accept it; names the first path that
            differs. Also if the schedule, accumulation or dtype of training differ.
        UntrustedNameError: If the config of the run names code that it may not name.
    """
    names = dict(named(line) for line in lines(cfg))  # The user's own config names them.
    accepted = cfg.accept_changes or ()
    text, source = saved_config(directory, record, names=names)
    if not text:
        return
    text = _as_today(text, source, names)
    before, now = identity(text), identity(cfg.debug_string())
    different = _different(before, now)
    for path in filter(_STORED.fullmatch, different):
        was, value = _pair_of(path, before, now)
        if _OF_ITS_OWN in was + value:
            raise TrainerDirConflictError(
                f"{path} is {was} in {directory}, and {value} in this config, but stored moments "
                "are not converted; set it back, or begin a run in another directory."
            )
    if not different or "config" in accepted:
        must_accept = dict.fromkeys(different, "config")
        changes = _check_changes(cfg, directory, text_lines(text), must_accept)
        changes += [] if record is None else _other_changes(record, mesh or {})
        expected = "" if _is_moved(cfg) else "max_step"  # A resumed run trains for longer.
        _log_changes(directory, None if record is None else record.step, changes, expected)
        return
    first = different[0]
    more = f" ({len(different) - 1} more lines differ)" if len(different) > 1 else ""
    was, value = _pair_of(first, before, now)
    raise TrainerDirConflictError(
        f"{directory} belongs to another run: {first} is {was} there, and {value} in this config"
        f"{more}; choose another directory, set it back to resume that run, or pass "
        f"{_accepting('config')} to continue it with this config."
    )


def _pair_of(path: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the two values at a path; of long ones, the part where they begin to differ."""
    values = [found.get(path, "not set") for found in (before, now)]
    first = next((i for i, (a, b) in enumerate(zip(*values, strict=False)) if a != b), 0)
    start = max(0, first - 40)
    return [v if len(v) <= 120 else f"...{v[start : start + 80]}..." for v in values]


def _accepting(name: str) -> str:
    return f'--accept_changes={name} (in Python, accept_changes=["{name}"])'


def _check_changes(
    cfg: Any, directory: str, before: dict[str, str], must_accept: dict[str, str]
) -> list[tuple[str, str, str]]:
    """Returns (path, value before, value now) of the settings that differ from those of a run.

    Raises:
        TrainerDirConflictError: If a difference must be accepted.
    """
    now = text_lines(cfg.debug_string())
    different = _different(before, now)
    moved = [p for p in different if _SCHEDULE.fullmatch(p) or (p == "max_step" and _is_moved(cfg))]
    must_accept = must_accept | dict.fromkeys(moved, "schedule") | _MUST_ACCEPT
    changes = []
    for path in different:
        was, value = _pair_of(path, before, now)
        name = must_accept.get(path)
        if name is not None and name not in (cfg.accept_changes or ()):
            raise TrainerDirConflictError(
                f"{path} is {was} in {directory}, and {value} in this config, which changes the "
                f"{name} of all further steps; set it back, or pass {_accepting(name)}."
            )
        if name is not None or not _NOT_LOGGED.fullmatch(path):
            changes.append((path, was, value))
    return changes


def _other_changes(record: CheckpointRecord, mesh: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Returns the mesh and the versions of libraries that differ from those of a checkpoint."""
    before = {"mesh": describe_mesh(record.mesh) if record.mesh else "", **record.versions}
    values = {"mesh": describe_mesh(mesh) if mesh else "", **library_versions()}.items()
    return [
        (name, was[:99], now)
        for name, now in values
        if now and (was := before.get(name)) and was != now
    ]


def _log_changes(
    directory: str, step: int | None, changes: Sequence[tuple[str, str, str]], expected: str
) -> None:
    """Prints changes since a step, and appends those that are new to the log of the run.

    A change of the path `expected` is no warning.
    """
    source = directory if step is None else f"{directory} at step {step}"
    for path, was, now in changes[:_MOST_LINES]:
        level = logging.INFO if path == expected else logging.WARNING
        logger.log(level, "%s was %s in %s, and is %s from now on.", path, was, source, now)
    if (more := len(changes) - _MOST_LINES) > 0:
        logger.warning("%d more changes of the config are in %s.", more, EVENTS_FILE)
    if jax.process_index() != 0 or not changes:
        return
    known = [{**event, "time": None} for event in read_events(directory)]
    for path, was, now in changes:
        fields = {"step": step, "path": path, "before": was, "now": now}
        if {"time": None, "event": "changed", **fields} not in known:
            log_event(directory, "changed", **fields)


def named(line: Line) -> tuple[str, Any]:
    """Returns the name in a line of a config, and what it stands for."""
    if line.text.startswith("<"):
        return line.text[1:-1], type(line.value)
    return line.text, line.value


def _is_moved(cfg: Any) -> bool:
    """Returns whether the schedules of a trainer's learner depend on its `max_step`."""
    inside = (dict(each.items()) for _, each in sub_configs(cfg.learner))
    return any(fields.get("max_step") is REQUIRED for fields in inside)


def write_config(cfg: Any, directory: str) -> None:
    """Writes config.txt and run.json.

    run.json lists the folders, other than Python's own, that modules are imported from: the config
    may name layers of the user's modules.
    """
    storage.make_folder(directory)
    with atomic_file(os.path.join(directory, CONFIG_FILE)) as file:
        file.write(cfg.debug_string())
    python = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    dirs = dict.fromkeys(os.path.abspath(path) for path in sys.path if os.path.isdir(path or "."))
    own = [path for path in dirs if not path.startswith(python)]
    write_json(os.path.join(directory, _RUN_FILE), {"module_dirs": own})


def module_dirs(directory: str) -> list[str]:
    """Returns the folders of modules in run.json; none without the file."""
    found = read_json(os.path.join(directory, _RUN_FILE)).get("module_dirs")
    return [str(each) for each in found] if isinstance(found, list) else []
