"""The lock of a run's folder: at most one run writes to it at a time."""

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator

from moelib.core.errors import UserError

logger = logging.getLogger(__name__)

# Locked by the process that writes; the kernel releases the lock of a process that ends.
LOCK_FILE = ".lock"


class DirectoryInUseError(UserError):
    """Another run writes to the folder."""


@contextlib.contextmanager
def directory_lock(directory: str) -> Iterator[None]:
    """Creates the folder of a run if it is missing, and locks it for the body.

    On a file system without locks, a warning is logged and nothing is locked.

    Raises:
        DirectoryInUseError: If another run has locked it.
        UserError: If files cannot be created in the folder.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(os.path.join(directory, LOCK_FILE), "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"dir is {directory!r}, which cannot be written to ({error.strerror}); set it "
            "(--trainer_dir) to a folder that can."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DirectoryInUseError(
                f"{directory} is in use by another run ({file.read() or 'starting'}); "
                "stop that one, or choose another directory."
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): start no second run in it.", directory, error.strerror
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
