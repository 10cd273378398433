"""The lock of a folder: at most one process, such as a run, writes to it at a time."""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator

from moelib.core.errors import UserError
from moelib.core.files import writing

logger = logging.getLogger(__name__)

# Locked by the process that writes; the kernel releases the lock of a process that ends.
LOCK_FILE = ".lock"


class DirectoryInUseError(UserError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def directory_lock(directory: str, *, setting: str) -> Iterator[None]:
    """Creates a folder if it is missing, and locks it for the body.

    On a file system without locks, a warning is logged and nothing is locked.

    Args:
        directory: The folder.
        setting: Setting that names the folder, for errors.

    Raises:
        DirectoryInUseError: If another process has locked it.
        UserError: If files cannot be created in the folder.
    """
    path = os.path.join(directory, LOCK_FILE)
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"{directory!r} cannot be written to ({error.strerror}); set {setting} to a folder "
            "that can."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DirectoryInUseError(
                f"{directory} is in use ({file.read().decode() or 'starting'}); wait for that "
                f"process or stop it, or set {setting} to another folder."
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): start nothing else in it.", directory, error.strerror
            )
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
