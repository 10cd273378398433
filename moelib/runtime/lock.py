"""The lock of a folder: at most one process, such as a run, writes to it at a time.

A local folder has a file that is locked by the process that writes. A folder on an object store has
leases, objects `.lock-000001`, `.lock-000002`, ..., each created only if it is absent, and
rewritten by its owner alone. The highest counts. A process that sees it unchanged for
`STALE_SECONDS` creates the next one, which one of several succeeds in. No clocks are compared.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO

from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.runtime.storage import writing

logger = logging.getLogger(__name__)

# Locked by the process that writes; the kernel releases the lock of a process that ends.
LOCK_FILE = ".lock"
# Attempts to lock, 0.05 s apart: `is_locked` holds a lock for microseconds.
_NUM_ATTEMPTS = 3

RENEW_SECONDS = 5.0  # Between two renewals by the owner of a lease.
STALE_SECONDS = 30.0  # Without a renewal, after which another process takes over.
_LEASE = ".lock-"


class DirectoryInUseError(UserError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def directory_lock(
    directory: str, *, setting: str, name: str = LOCK_FILE, shared: bool = False, wait: bool = False
) -> Iterator[Callable[[], None]]:
    """Creates a folder if it is missing, and locks it for the body.

    Yields a function that raises UserError if the folder was moved, or its lock removed, since.

    On a file system without locks, or a store without conditional writes, a warning is logged and
    nothing is locked.

    Args:
        directory: The folder.
        setting: Setting that names the folder, for errors.
        name: Name of the file that is locked, of a local folder.
        shared: Whether other processes may share the lock of a local folder, too.
        wait: Whether to wait until no other process has locked a local folder.

    Raises:
        DirectoryInUseError: If another process has locked it.
        UserError: If files cannot be created in the folder.
    """
    if storage.is_remote(directory):
        with _lease(directory, setting=setting) as check:
            yield check
        return
    path = os.path.abspath(os.path.join(directory, name))
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        os.makedirs(directory, exist_ok=True)
        file = open(path, "a+b", buffering=0, opener=_open_no_link)  # noqa: SIM115
    except OSError as error:
        raise _not_writable(directory, setting, error) from error
    with file:
        try:
            _lock(file, mode)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace") or "starting"
            if not wait:
                raise _in_use(directory, owner, setting) from None
            logger.warning("Waiting for the lock %s (%s).", path, owner)
            fcntl.flock(file, mode)
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
                f"{directory} was moved, or its {name} removed, so that another process may "
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


def _not_writable(directory: str, setting: str, error: OSError) -> UserError:
    return UserError(
        f"{directory!r} cannot be written to ({error.strerror}: {error.filename}); set "
        f"{setting} to a folder that can."
    )


def _lock(file: IO[bytes], mode: int) -> None:
    """Locks a file. Raises BlockingIOError if another process has locked it for long."""
    for _ in range(_NUM_ATTEMPTS - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            return
        time.sleep(0.05)
    fcntl.flock(file, mode | fcntl.LOCK_NB)


def _open_no_link(path: str, flags: int) -> int:
    """Opens the file of a lock; a link, whose target would be overwritten, is an error."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


# -- Leases on object stores -----------------------------------------------------------------------


@contextlib.contextmanager
def _lease(directory: str, *, setting: str) -> Iterator[Callable[[], None]]:
    """Takes the lease of a folder for the body, and renews it; see `directory_lock`."""
    owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
    try:
        number = _take(directory, owner, setting)
    except OSError as error:
        raise _not_writable(directory, setting, error) from error
    ended = threading.Event()

    def check() -> None:
        with contextlib.suppress(OSError):  # Writing reports it.
            if max(_leases(directory), default=0) != number:
                raise UserError(
                    f"{directory} was taken over by another process, or its {_LEASE}* removed: "
                    "this one stops. Start it again once no other does."
                )

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                check()
                content = f"{owner}, renewed at {time.time()}"
                storage.write_bytes(_path(directory, number), content.encode())
            except OSError as error:
                logger.warning("The lease of %s could not be renewed: %s", directory, error)
            except UserError as error:
                logger.error("%s", error)
                os.kill(os.getpid(), signal.SIGTERM)  # Which a run takes on all of its processes.
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):
            storage.remove(_path(directory, number))


def _take(directory: str, owner: str, setting: str) -> int:
    """Returns the number of a new lease. Raises DirectoryInUseError, or OSError."""
    if before := max(_leases(directory), default=0):
        _wait_until_stale(directory, before, setting)
    path = _path(directory, before + 1)
    try:
        storage.write_bytes(path, owner.encode(), only_if_absent=True)
    except FileExistsError:
        raise _lease_in_use(directory, before + 1, setting) from None
    with contextlib.suppress(FileExistsError):
        storage.write_bytes(path, owner.encode(), only_if_absent=True)
        logger.warning(
            "%s cannot be locked (no conditional writes): start nothing else in it.", directory
        )
    leases = set(_leases(directory))
    if later := {x for x in leases if x > before + 1}:  # Leases created since the first listing.
        storage.remove(path)
        raise _lease_in_use(directory, max(later), setting)
    with contextlib.suppress(OSError):  # They are not the highest, and count for nothing.
        for old in leases - {before + 1}:
            storage.remove(_path(directory, old))
    return before + 1


def _wait_until_stale(directory: str, number: int, setting: str) -> None:
    """Returns once a lease has ended or become stale. Raises DirectoryInUseError if renewed."""
    first, end = _read(directory, number), time.monotonic() + STALE_SECONDS
    logger.warning("%s: waiting up to %g s for the lease of %s.", directory, STALE_SECONDS, first)
    while (now := _read(directory, number)) and time.monotonic() < end:
        if now != first:
            raise _lease_in_use(directory, number, setting)
        time.sleep(STALE_SECONDS / 30)


def _leases(directory: str) -> list[int]:
    """Returns the numbers of the leases of a folder."""
    with contextlib.suppress(FileNotFoundError):
        names = storage.list_names(directory)
        numbers = [x.removeprefix(_LEASE) for x in names if x.startswith(_LEASE)]
        return [int(x) for x in numbers if x.isdecimal()]
    return []


def _path(directory: str, number: int) -> str:
    return f"{directory.rstrip('/')}/{_LEASE}{number:06d}"


def _read(directory: str, number: int) -> str:
    """Returns the content of a lease; empty if it has ended."""
    with contextlib.suppress(FileNotFoundError):
        return storage.read_bytes(_path(directory, number)).decode(errors="replace")
    return ""


def _lease_in_use(directory: str, number: int, setting: str) -> DirectoryInUseError:
    return _in_use(directory, _read(directory, number) or "starting", setting)


def _in_use(directory: str, owner: str, setting: str) -> DirectoryInUseError:
    return DirectoryInUseError(
        f"{directory} is in use ({owner}); wait for that process or stop it, or set {setting} to "
        "another folder."
    )
