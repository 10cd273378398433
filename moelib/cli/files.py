"""Files that commands write: whether they can, before any work is done."""

import os

from absl import flags

from moelib.core.errors import UsageError


def check_file(flag: str) -> None:
    """Raises UsageError if a flag names a file that cannot be written; None is fine."""
    path = flags.FLAGS[flag].value
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path or "."):
        raise UsageError(f"--{flag} {path}: it is a folder; name a file.")
    if not os.path.isdir(folder):
        raise UsageError(f"--{flag} {path}: there is no such folder; make it first.")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{flag} {path}: it cannot be written; name another file.")
