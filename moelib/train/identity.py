"""Which run a folder belongs to: `config.txt`, and what of a config may change on the way."""

import hashlib
import os
import re
from typing import Any

CONFIG_FILE = "config.txt"

# What decides a run's numbers. The rest (mesh, length, evaluations, where files go) may change.
_DECIDES = re.compile(r"(model|learner|input|prng_seed)\b.*")

# Inside those: lengths of a run, how something is computed and not what, and where data lies (the
# input compares what is in it).
_MAY_CHANGE = re.compile(
    r".*\b(max_step|decay_steps|max_batches|dispatcher|\w*kernel|\w*backend|remat\w*|prefetch\w*"
    r"|offload_state|num_threads|num_workers|path|paths|dir|data_dir)\b.*"
)

# But what a dispatcher drops is.
_ROOM = re.compile(r".*\.dispatcher\.(capacity_factor|buffer_factor)")


class TrainerDirConflictError(ValueError):
    """The folder of a run belongs to another one."""


def identity(config_text: str) -> dict[str, str]:
    """Returns the lines of a config's text that decide a run's numbers, {path: literal}."""
    lines = (line.partition(": ") for line in config_text.splitlines())
    return {
        path: value
        for path, _, value in lines
        if _DECIDES.fullmatch(path)
        and (not _MAY_CHANGE.fullmatch(path) or (_ROOM.fullmatch(path) and value != "None"))
    }


def config_hash(cfg: Any) -> str:
    """Returns a hash of what decides a run's numbers."""
    lines = sorted(identity(cfg.debug_string()).items())
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def claim_directory(cfg: Any, directory: str, *, write: bool = True) -> str:
    """Makes `directory` the folder of the run that `cfg` describes, and returns its config file.

    A folder of the same run may be claimed again, with a larger `max_step` for example.

    Args:
        cfg: The trainer's config.
        directory: The folder; made if need be.
        write: Whether this process writes; all of them check.

    Raises:
        TrainerDirConflictError: If it belongs to another run; names the first path that differs.
    """
    path = os.path.join(directory, CONFIG_FILE)
    text = cfg.debug_string()
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            _compare(identity(file.read()), identity(text), directory)
    if write:
        os.makedirs(directory, exist_ok=True)
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.tmp", path)
    return path


def _compare(before: dict[str, str], now: dict[str, str], directory: str) -> None:
    different = [p for p in {**before, **now} if before.get(p) != now.get(p)]
    if not different:
        return
    path = different[0]
    more = f" ({len(different) - 1} more lines differ)" if len(different) > 1 else ""
    raise TrainerDirConflictError(
        f"{directory} belongs to another run: {path} is {before.get(path, 'not set')} there, and "
        f"{now.get(path, 'not set')} in this config{more}; choose another directory, or set it "
        "back to go on with that run."
    )
