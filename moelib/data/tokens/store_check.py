"""Checks of a token store's files against the hashes of their blocks."""

import hashlib
import os
from collections.abc import Sequence

from moelib.runtime import storage

BLOCK_BYTES = 4 << 20  # A block is read and hashed in some 10 ms.
SAMPLED_BLOCKS = 8  # Largest number of blocks of tokens that opening a store checks.

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
        is_last, begin = number == len(hashes) - 1, number * BLOCK_BYTES
        if storage.is_remote(path):
            data = storage.read_bytes(path, begin, begin + BLOCK_BYTES + 1)
        else:
            with open(path, "rb") as file:
                file.seek(begin)
                data = file.read(BLOCK_BYTES + 1)
        data, more = data[:BLOCK_BYTES], data[BLOCK_BYTES:]
        if _hash(data) == hashes[number] and not (is_last and more):
            return ""
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return f"bytes {begin} to {begin + len(data)} of {name} are not those that were written"
