"""Checks of a token store's files against the hashes of their blocks."""

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from moelib.core.errors import UserError
from moelib.data.token_source import TokenSource

BLOCK_BYTES = 4 << 20  # A block is read and hashed in some 10 ms.
SAMPLED_BLOCKS = 8  # Blocks of tokens that are read whenever a store is opened.
_SHARE = 0.1  # Share of a core that a check in the background takes.

Block = tuple[str, int]  # Name of a file, and the number of the block in it.


def hash_blocks(path: str) -> list[str]:
    """Returns the first 64 bits of the SHA-256 of each block of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return [_hash(data) for data in iter(lambda: file.read(BLOCK_BYTES), b"")]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def read_block(path: str, number: int) -> bytes:
    """Returns a block of a file; an incomplete one at or beyond its end."""
    with open(path, "rb") as file:
        file.seek(number * BLOCK_BYTES)
        return file.read(BLOCK_BYTES + 1)[:BLOCK_BYTES]


def damage(folder: str, block: Block, hashes: Sequence[str]) -> str:
    """Returns how a block differs from what was written; empty if it does not."""
    name, number = block
    path = os.path.join(folder, name)
    try:
        if number == len(hashes) - 1 and os.path.getsize(path) > len(hashes) * BLOCK_BYTES:
            return f"{name} is longer than it was"
        if _hash(read_block(path, number)) == hashes[number]:
            return ""
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    begin = number * BLOCK_BYTES
    return f"bytes {begin} to {begin + BLOCK_BYTES} of {name} are not those that were written"


def spread_sample(blocks: Sequence[Block]) -> list[Block]:
    """Returns `SAMPLED_BLOCKS` of the blocks, the first and the last included, or all of few."""
    indices = np.linspace(0, len(blocks) - 1, min(len(blocks), SAMPLED_BLOCKS))
    return [blocks[index] for index in indices.astype(int).tolist()]


class BackgroundCheck:
    """A thread that reads the blocks of sources that opening them did not check.

    Hosts share the blocks. The thread ends with the object that owns this check.
    """

    def __init__(self, sources: Iterable[TokenSource], host_index: int, num_hosts: int) -> None:
        self._error: UserError | None = None
        arguments = (weakref.ref(self), list(sources), host_index, num_hosts)
        threading.Thread(target=_check, args=arguments, name="check", daemon=True).start()

    def raise_error(self) -> None:
        """Raises UserError if damage was found."""
        if self._error is not None:
            raise self._error


def _check(
    owner: "weakref.ref[BackgroundCheck]",
    sources: Sequence[TokenSource],
    host_index: int,
    num_hosts: int,
) -> None:
    try:
        for source in sources:
            for _ in _paced(source.check_in_background(host_index, num_hosts)):
                if owner() is None:
                    return
    except UserError as error:
        if (found := owner()) is not None:
            found._error = error


def _paced(steps: Iterator[None]) -> Iterator[None]:
    """Yields from `steps`, with pauses so that it takes `_SHARE` of the time."""
    begin = time.monotonic()
    for step in steps:
        time.sleep((time.monotonic() - begin) * (1 / _SHARE - 1))
        begin = time.monotonic()
        yield step
