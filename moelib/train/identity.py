"""Identity of a run: the settings that a run in a folder cannot change when it is resumed."""

import hashlib
import logging
import os
import re
import sys
import sysconfig
from typing import Any

from moelib.core.config_parse import parse
from moelib.core.config_paths import lines
from moelib.core.errors import UserError
from moelib.core.files import atomic_file, read_json, write_json
from moelib.core.trusted_code import UntrustedNameError

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
    r"|offload_state|num_threads|num_workers|path|paths|dir|data_dir)\b.*"
)

# But the capacity of a dispatcher decides which tokens are dropped.
_CAPACITY = re.compile(r".*\.dispatcher\.(capacity_factor|buffer_factor)")


class TrainerDirConflictError(UserError):
    """The folder holds checkpoints of a run with another config."""


def identity(config_text: str) -> dict[str, str]:
    """Returns the lines of a config's text that determine the numbers of a run, {path: literal}."""
    lines = (line.partition(": ") for line in config_text.splitlines())
    return {
        path: value
        for path, _, value in lines
        if _DETERMINES.fullmatch(path)
        and (not _MAY_CHANGE.fullmatch(path) or (_CAPACITY.fullmatch(path) and value != "None"))
    }


def config_hash(cfg: Any) -> str:
    """Returns a hash of the settings that determine the numbers of a run."""
    lines = sorted(identity(cfg.debug_string()).items())
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def check_directory(cfg: Any, directory: str) -> None:
    """Checks that a folder with checkpoints belongs to the run that `cfg` describes.

    Its config.txt is read as today's config first: classes that have moved since, and fields that
    are new and left at their defaults, make no difference.

    Raises:
        TrainerDirConflictError: If not; names the first path that differs.
    """
    path = os.path.join(directory, CONFIG_FILE)
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        names = {line.text.strip("<>") for line in lines(cfg)}  # The user's own config names them.
        text = parse(text, source=f"{path}:", names=names).debug_string()
    except UntrustedNameError:
        raise
    except UserError as error:
        logger.warning("%s cannot be parsed, so it is compared line by line: %s", path, error)
    before, now = identity(text), identity(cfg.debug_string())
    different = [p for p in {**before, **now} if before.get(p) != now.get(p)]
    if not different:
        return
    first = different[0]
    more = f" ({len(different) - 1} more lines differ)" if len(different) > 1 else ""
    raise TrainerDirConflictError(
        f"{directory} belongs to another run: {first} is {before.get(first, 'not set')} there, and "
        f"{now.get(first, 'not set')} in this config{more}; choose another directory, or set it "
        "back to resume that run."
    )


def write_config(cfg: Any, directory: str) -> None:
    """Writes config.txt and run.json, from which commands build the run's model.

    run.json lists the folders, other than Python's own, that modules are imported from: the config
    may name layers of the user's modules.
    """
    os.makedirs(directory, exist_ok=True)
    with atomic_file(os.path.join(directory, CONFIG_FILE)) as file:
        file.write(cfg.debug_string())
    python = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    dirs = dict.fromkeys(os.path.abspath(path) for path in sys.path if os.path.isdir(path or "."))
    own = [path for path in dirs if not path.startswith(python)]
    write_json(os.path.join(directory, _RUN_FILE), {"module_dirs": own})


def module_dirs(directory: str) -> list[str]:
    """Returns the folders of modules in run.json; none for a run of an earlier version."""
    return read_json(os.path.join(directory, _RUN_FILE)).get("module_dirs", [])
