"""Identity of a run: the settings that a run in a folder cannot change when it is resumed."""

import hashlib
import importlib.metadata
import logging
import os
import re
import sys
import sysconfig
from typing import Any

import moelib
from moelib.core.config_parse import parse
from moelib.core.config_paths import Line, lines
from moelib.core.errors import UserError
from moelib.core.files import atomic_file, read_json, read_text, write_json
from moelib.core.trusted_code import UntrustedNameError
from moelib.train.settings import completed

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.txt"
_RUN_FILE = "run.json"

# These determine the numbers of a run. Everything else (mesh, length, evaluations, output) may
# change.
_DETERMINES = re.compile(r"(model|learner|input|prng_seed)\b.*")

# Exceptions: the length of a run, implementations of the same computation, and the location of the
# data, whose content the input compares itself.
_MAY_CHANGE = re.compile(
    r".*\b(max_step|decay_steps|max_batches|dispatcher|\w*kernel|\w*backend|remat\w*|prefetch\w*"
    r"|loss_chunk_size|offload_state|num_threads|num_workers|path|paths|dir|data_dir)\b.*"
)

# Settings that move a schedule.
_SCHEDULE = re.compile(r"learner\b.*\b(max_step|decay_steps)\b.*")
# Settings that may change, with a line in the log.
_LOGGED = ("max_step", "num_microbatches", "train_dtype")

# But the capacity of a dispatcher decides which tokens are dropped, unless its factor is None.
_CAPACITY = re.compile(r"(.*\.dispatcher\.)(?:(capacity|buffer)_factor|buffer_blocks)")


class TrainerDirConflictError(UserError):
    """The folder holds checkpoints of a run with another config."""


def _values(config_text: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in config_text.splitlines())
    return {path: value for path, _, value in lines}


def identity(config_text: str) -> dict[str, str]:
    """Returns the lines of a config's text that determine the numbers of a run, {path: literal}."""
    values = _values(config_text)

    def drops(path: str) -> bool:
        found = _CAPACITY.fullmatch(path)
        factor = found and f"{found[1]}{found[2] or 'buffer'}_factor"
        return factor is not None and values.get(factor, "None") != "None"

    return {
        path: value
        for path, value in values.items()
        if _DETERMINES.fullmatch(path) and (not _MAY_CHANGE.fullmatch(path) or drops(path))
    }


def config_hash(cfg: Any) -> str:
    """Returns a hash of the settings that determine the numbers of a run."""
    lines = sorted(identity(cfg.debug_string()).items())
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def check_directory(cfg: Any, directory: str, *, mesh: str = "") -> None:
    """Checks that a folder with checkpoints belongs to the run that `cfg` describes.

    Its config.txt is read as today's config first: classes that have moved since, and fields that
    are new and left at their defaults, make no difference. Changes of precision, length, mesh,
    accumulation and versions are logged.

    Args:
        cfg: Config of the trainer.
        directory: The folder.
        mesh: Description of the mesh of this process.

    Raises:
        TrainerDirConflictError: If not; names the first path that differs. Also if the schedule or
            the dtype of training differ, and `cfg` does not accept that.
        UntrustedNameError: If config.txt names code that it may not name.
    """
    path = os.path.join(directory, CONFIG_FILE)
    if not os.path.exists(path):
        return
    text = read_text(path)
    try:
        names = dict(_named(line) for line in lines(cfg))  # The user's own config names them.
        text = parse(text, source=f"{path}:", names=names).debug_string()
    except UntrustedNameError:
        raise
    except UserError as error:
        logger.warning("%s cannot be parsed, so it is compared line by line: %s", path, error)
    before, now = identity(text), identity(cfg.debug_string())
    different = [p for p in {**before, **now} if before.get(p) != now.get(p)]
    if not different:
        _check_changes(cfg, directory, _values(text), mesh)
        return
    first = different[0]
    more = f" ({len(different) - 1} more lines differ)" if len(different) > 1 else ""
    raise TrainerDirConflictError(
        f"{directory} belongs to another run: {first} is {before.get(first, 'not set')} there, and "
        f"{now.get(first, 'not set')} in this config{more}; choose another directory, or set it "
        "back to resume that run."
    )


def _check_changes(cfg: Any, directory: str, before: dict[str, str], mesh: str) -> None:
    """Logs settings, versions and the mesh that differ from those of a run.

    Raises:
        TrainerDirConflictError: If a difference must be accepted.
    """
    now = _values(cfg.debug_string())
    different = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    moved = [p for p in different if _SCHEDULE.fullmatch(p) or (p == "max_step" and _is_moved(cfg))]
    must_accept = dict.fromkeys(moved, "schedule") | {"train_dtype": "train_dtype"}
    for path in different:
        was, value = (values.get(path, "not set") for values in (before, now))
        name = must_accept.get(path)
        if name is not None and name not in (cfg.accept_changes or ()):
            raise TrainerDirConflictError(
                f"{path} is {was} in {directory}, and {value} in this config, which changes the "
                f"{name} of all further steps; set it back, or pass --accept_changes={name}."
            )
        if name is not None or path in _LOGGED:
            logger.warning("%s was %s in %s, and is %s from now on.", path, was, directory, value)
    run = read_json(os.path.join(directory, _RUN_FILE))
    for name, value in _versions(mesh).items():
        if (was := run.get(name, value)) != value:
            logger.warning("%s was %.99r in %s, and is %r now.", name, was, directory, value)


def _named(line: Line) -> tuple[str, Any]:
    """Returns the name in a line of a config, and what it stands for."""
    if line.text.startswith("<"):
        return line.text[1:-1], type(line.value)
    return line.text, line.value


def _is_moved(cfg: Any) -> bool:
    """Returns whether the schedules of a trainer's learner depend on its `max_step`."""
    longer = cfg.clone(max_step=cfg.max_step + 1)
    return completed(longer).learner != completed(cfg).learner


def _versions(mesh: str) -> dict[str, str]:
    """Returns what run.json says about the process that trains."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"mesh": mesh, "moelib": moelib.__version__, **versions}


def write_config(cfg: Any, directory: str, *, mesh: str = "") -> None:
    """Writes config.txt and run.json, from which commands build the run's model.

    run.json lists the folders, other than Python's own, that modules are imported from: the config
    may name layers of the user's modules. It also has the mesh and the versions of libraries.
    """
    os.makedirs(directory, exist_ok=True)
    with atomic_file(os.path.join(directory, CONFIG_FILE)) as file:
        file.write(cfg.debug_string())
    python = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    dirs = dict.fromkeys(os.path.abspath(path) for path in sys.path if os.path.isdir(path or "."))
    own = [path for path in dirs if not path.startswith(python)]
    write_json(os.path.join(directory, _RUN_FILE), {"module_dirs": own, **_versions(mesh)})


def module_dirs(directory: str) -> list[str]:
    """Returns the folders of modules in run.json; none for a run of an earlier version."""
    found = read_json(os.path.join(directory, _RUN_FILE)).get("module_dirs")
    return [str(each) for each in found] if isinstance(found, list) else []
