"""The lease of a folder on an object store: at most one process writes to it at a time.

Leases are objects `.lock-000001`, `.lock-000002`, ... of the folder, each created only if it is
absent, and rewritten by its owner alone. The highest counts. A process that sees it unchanged for
`STALE_SECONDS` creates the next one, which one of several succeeds in. No clocks are compared.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from moelib.core.errors import UserError
from moelib.runtime import storage

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0  # Between two renewals by the owner.
STALE_SECONDS = 30.0  # Without a renewal, after which another process takes over.
_NAME = ".lock-"


class DirectoryInUseError(UserError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def lease(directory: str, *, setting: str) -> Iterator[Callable[[], None]]:
    """Takes the lease of a folder for the body, and renews it; see `directory_lock`."""
    owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
    try:
        number = _take(directory, owner, setting)
    except OSError as error:
        raise UserError(
            f"{directory!r} cannot be written to ({error.strerror}: {error.filename}); set "
            f"{setting} to a folder that can."
        ) from error
    ended = threading.Event()

    def check() -> None:
        with contextlib.suppress(OSError):  # Writing reports it.
            if max(_leases(directory), default=0) != number:
                raise UserError(
                    f"{directory} was taken over by another process, or its {_NAME}* removed: this "
                    "one stops. Start it again once no other does."
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
        raise _in_use(directory, before + 1, setting) from None
    with contextlib.suppress(FileExistsError):
        storage.write_bytes(path, owner.encode(), only_if_absent=True)
        logger.warning(
            "%s cannot be locked (no conditional writes): start nothing else in it.", directory
        )
    leases = set(_leases(directory))
    if later := {x for x in leases if x > before + 1}:  # Of an older listing.
        storage.remove(path)
        raise _in_use(directory, max(later), setting)
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
            raise _in_use(directory, number, setting)
        time.sleep(STALE_SECONDS / 30)


def _leases(directory: str) -> list[int]:
    """Returns the numbers of the leases of a folder."""
    with contextlib.suppress(FileNotFoundError):
        names = storage.list_names(directory)
        return [int(x.removeprefix(_NAME)) for x in names if x.startswith(_NAME)]
    return []


def _path(directory: str, number: int) -> str:
    return f"{directory.rstrip('/')}/{_NAME}{number:06d}"


def _read(directory: str, number: int) -> str:
    """Returns the content of a lease; empty if it has ended."""
    with contextlib.suppress(FileNotFoundError):
        return storage.read_bytes(_path(directory, number)).decode(errors="replace")
    return ""


def _in_use(directory: str, number: int, setting: str) -> DirectoryInUseError:
    owner = _read(directory, number) or "starting"
    return DirectoryInUseError(
        f"{directory} is in use ({owner}); wait for that process or stop it, or set {setting} to "
        "another folder."
    )
