"""The locks of a run: of its folder and, if they are elsewhere, of its checkpoints."""

import contextlib
import os
from collections.abc import Callable, Iterator

from moelib.runs.run_log import CONFIG_FILE
from moelib.runtime import storage
from moelib.runtime.directory_lock import LOCK_FILE, directory_lock


@contextlib.contextmanager
def locked_folders(directory: str, checkpoints: str | None) -> Iterator[list[Callable[[], None]]]:
    """Locks the folder of a run, and that of its checkpoints, for the body.

    Yields functions that raise UserError if a folder was moved, or its lock removed; none of them
    is left after the body.

    Raises:
        DirectoryInUseError: If another process has locked one.
        UserError: If files cannot be created in one.
    """
    folders = {"dir (--trainer_dir)": directory}
    if checkpoints is not None:
        parent = os.path.dirname(checkpoints)
        if os.path.realpath(directory) not in map(os.path.realpath, (checkpoints, parent)):
            mark = CONFIG_FILE if storage.is_remote(parent) else LOCK_FILE
            of_a_run = storage.exists(os.path.join(parent, mark))  # Which locks only that.
            folders["checkpointer.dir"] = parent if of_a_run else checkpoints
    checks: list[Callable[[], None]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(checks.clear)
        for setting, folder in folders.items():
            checks.append(stack.enter_context(directory_lock(folder, setting=setting)))
        yield checks
