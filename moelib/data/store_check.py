"""Checks of a token store's files against the hashes of their blocks."""

import hashlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence

from moelib.core.errors import UserError
from moelib.data.token_source import TokenSource

BLOCK_BYTES = 4 << 20  # A block is read and hashed in some 10 ms.
SAMPLED_BLOCKS = 8  # Largest number of blocks of tokens that opening a store checks.
_SHARE = 0.1  # Share of a core that a check in the background takes.

Block = tuple[str, int]  # Name of a file, and the number of the block in it.


def hash_blocks(path: str) -> list[str]:
    """Returns the first 64 bits of the SHA-256 of each block of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return [_hash(data) for data in iter(lambda: file.read(BLOCK_BYTES), b"")]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def damage(folder: str, block: Block, hashes: Sequence[str]) -> str:
    """Returns how a block differs from what was written; empty if it does not."""
    name, number = block
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            file.seek(number * BLOCK_BYTES)
            is_last = number == len(hashes) - 1
            if _hash(file.read(BLOCK_BYTES)) == hashes[number] and not (is_last and file.read(1)):
                return ""
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    begin = number * BLOCK_BYTES
    return f"bytes {begin} to {begin + BLOCK_BYTES} of {name} are not those that were written"


class BackgroundCheck:
    """Checks the data that opening sources did not, in a thread that ends with this object.

    Hosts share the work. The first step is taken here: without one, no thread is started.
    """

    def __init__(self, sources: Iterable[TokenSource], host_index: int, num_hosts: int) -> None:
        self._error: UserError | None = None
        checks = (source.check_in_background(host_index, num_hosts) for source in sources)
        steps = itertools.chain.from_iterable(checks)
        for _ in itertools.islice(steps, 1):
            arguments = (weakref.ref(self), steps)
            threading.Thread(target=_check, args=arguments, name="check", daemon=True).start()

    def raise_error(self) -> None:
        """Raises UserError if damage was found."""
        if self._error is not None:
            raise self._error


def _check(owner: "weakref.ref[BackgroundCheck]", steps: Iterator[None]) -> None:
    """Takes the steps, with pauses so that they take `_SHARE` of the time."""
    begin = time.monotonic()
    try:
        for _ in steps:
            if owner() is None:
                return
            time.sleep((time.monotonic() - begin) * (1 / _SHARE - 1))
            begin = time.monotonic()
    except UserError as error:
        if (found := owner()) is not None:
            found._error = error
