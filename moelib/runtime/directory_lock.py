"""The lock of a folder: at most one process, such as a run, writes to it at a time."""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import IO

from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.runtime.files import writing
from moelib.runtime.lease import DirectoryInUseError, lease

logger = logging.getLogger(__name__)

# Locked by the process that writes; the kernel releases the lock of a process that ends.
LOCK_FILE = ".lock"
# Attempts to lock, 0.05 s apart: `is_locked` holds a lock for microseconds.
_NUM_ATTEMPTS = 3


@contextlib.contextmanager
def directory_lock(directory: str, *, setting: str) -> Iterator[Callable[[], None]]:
    """Creates a folder if it is missing, and locks it for the body.

    Yields a function that raises UserError if the folder was moved, or its lock removed, since.

    A URL gets a lease (moelib.runtime.lease). On a file system without locks, or a store without
    conditional writes, a warning is logged and nothing is locked.

    Args:
        directory: The folder.
        setting: Setting that names the folder, for errors.

    Raises:
        DirectoryInUseError: If another process has locked it.
        UserError: If files cannot be created in the folder.
    """
    if storage.is_remote(directory):
        with lease(directory, setting=setting) as check:
            yield check
        return
    path = os.path.abspath(os.path.join(directory, LOCK_FILE))
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(path, "a+b", buffering=0, opener=_open_no_link)  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"{directory!r} cannot be written to ({error.strerror}: {error.filename}); set "
            f"{setting} to a folder that can."
        ) from error
    with file:
        try:
            _lock(file)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace") or "starting"
            raise DirectoryInUseError(
                f"{directory} is in use ({owner}); wait for that process or stop it, or set "
                f"{setting} to another folder."
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): start nothing else in it.", directory, error.strerror
            )
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

        def check_file() -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return
            raise UserError(
                f"{directory} was moved, or its {LOCK_FILE} removed, so that another process may "
                "write to it: this one stops. Start it again once no other does."
            )

        yield check_file


def is_locked(directory: str) -> bool:
    """Returns whether a process has locked a folder, which is left as it is."""
    try:
        with open(os.path.join(directory, LOCK_FILE), "rb", opener=_open_no_link) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # No such file, or no locks on this file system.
        return False
    return False


def _lock(file: IO[bytes]) -> None:
    """Locks a file. Raises BlockingIOError if another process has locked it for long."""
    for _ in range(_NUM_ATTEMPTS - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.05)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _open_no_link(path: str, flags: int) -> int:
    """Opens the file of a lock; a link, whose target would be overwritten, is an error."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
