"""Files that commands write, checked before any work is done."""

import os

from moelib.core.errors import UsageError


def check_file(flag: str, path: str | None) -> None:
    """Raises UsageError if the file of a flag cannot be written; None is fine."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path or "."):
        raise UsageError(f"--{flag}={path}: it is a folder; name a file.")
    if not os.path.isdir(folder):
        raise UsageError(f"--{flag}={path}: the folder {folder} does not exist; create it first.")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{flag}={path}: the file is not writable; name another file.")
