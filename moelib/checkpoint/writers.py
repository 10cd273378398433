"""The two writers of a checkpoint's arrays: Orbax for disks, TensorStore for object stores.

Orbax takes paths of s3:// for paths of files, and its merge of the processes' files copies the
whole database of keys. On an object store, a checkpoint is a "folder" step_00001000 of objects:

    started            an empty object, the first; removed after the record is written
    state/a.b/...      the array of the path a/b, in Zarr's format; chunks are parts of shards
    done/0, ...        of each process that has written its shards
    record/metadata    the record; written last, and deleted first
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import jax

from moelib.checkpoint.arrays import array_spec
from moelib.checkpoint.contents import (
    RECORD_ITEM,
    STARTED_FILE,
    STATE_ITEM,
    delete_checkpoint,
)
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.runtime import storage

_CHUNK_BYTES = 256 << 20  # Largest chunk before compression; S3 takes 5 GB in one request.
_DONE = "done"  # Folder of an object per process that has written its shards.
_SLOWEST_SECONDS = 1800.0  # Time that process 0 waits for the slowest.
_POLL_SECONDS = 0.5


def writer_for(path: str) -> "DiskWriter | ObjectStoreWriter":
    """Returns the writer for the storage of a checkpoint."""
    return ObjectStoreWriter() if storage.is_remote(path) else DiskWriter()


def make_room(path: str) -> None:
    """Replaces an incomplete or damaged checkpoint at `path` by an empty folder. Raises OSError."""
    delete_checkpoint(path)
    storage.make_folder(os.path.join(path, RECORD_ITEM))
    # On an object store it fails at once where TensorStore would try for minutes.
    storage.write_bytes(os.path.join(path, STARTED_FILE), b"")


def check_url(setting: str, url: str) -> None:
    """Raises UserError if arrays cannot be stored at a URL."""
    if url.partition("://")[0] not in ("s3", "gs"):
        raise UserError(f"{setting} is {url!r}; set a local folder, or a URL of s3:// or gs://.")


class DiskWriter:
    """Writes the arrays of one checkpoint at a time by Orbax, from all processes."""

    def __init__(self) -> None:
        """Starts Orbax's threads."""
        import orbax.checkpoint as ocp

        # Replicas of smaller arrays write none of their own: each slice would be a program.
        arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=1 << 20)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        self._orbax = ocp.AsyncCheckpointer(handler)

    def start(self, path: str, state: Any) -> None:
        """Starts to write a state below `path`. The arrays may be donated when this returns."""
        import orbax.checkpoint as ocp

        args = ocp.args.PyTreeSave(tree.to_nested(state))
        self._orbax.save(os.path.join(path, STATE_ITEM), args=args)

    def wait(self) -> None:
        """Waits for this process, and process 0 for all. Raises the error of the write."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits as well, and ends the threads."""
        self._orbax.close()


class ObjectStoreWriter:
    """Writes the arrays of one checkpoint at a time by TensorStore, from all processes.

    A process whose shards are written creates the object `done/<its index>`, which contains its
    error if there is one. Process 0 waits for those of all.
    """

    def __init__(self) -> None:
        """Accesses no store."""
        self._done = ""
        self._futures: list[Any] = []  # Writes of this process's shards.

    def start(self, path: str, state: Any) -> None:
        """Starts to write a state below `path`. The arrays may be donated when this returns."""
        self._done = os.path.join(path, _DONE)
        self._futures = asyncio.run(_start_to_write(path, state))

    def wait(self) -> None:
        """Waits for this process, and process 0 for all. Raises the error of the write."""
        futures, self._futures = self._futures, []
        done = os.path.join(self._done, str(jax.process_index()))
        try:
            for future in futures:
                future.result()
        except Exception as error:
            with contextlib.suppress(OSError):
                storage.write_bytes(done, f"{type(error).__name__}".encode())
            raise
        storage.write_bytes(done, b"")
        if jax.process_index() == 0:
            _wait_for_all(self._done)

    def close(self) -> None:
        """Does nothing: it has no threads of its own."""


async def _start_to_write(path: str, state: Any) -> list[Any]:
    """Returns futures of the writes of this process's shards, once they are copied."""
    from jax.experimental.array_serialization.tensorstore_impl import async_serialize

    futures: list[Any] = []
    writes = []
    for name, x in tree.flatten_items(state):
        metadata = {
            "shape": list(x.shape),
            "chunks": _chunks(x.sharding.shard_shape(x.shape), x.dtype.itemsize),
            "compressor": {"id": "zstd", "level": 1},
        }
        spec = array_spec(path, name) | {"dtype": str(x.dtype), "metadata": metadata}
        writes.append(async_serialize(_owned(x), spec, commit_future=futures))
    await asyncio.gather(*writes)
    return futures


def _wait_for_all(folder: str) -> None:
    """Waits until all processes have written their shards. Raises OSError if one cannot."""
    end = time.monotonic() + _SLOWEST_SECONDS
    while len(names := storage.list_names(folder)) < jax.process_count():
        if time.monotonic() > end:
            raise OSError(f"{folder}: only processes {sorted(names)} have written their shards")
        time.sleep(_POLL_SECONDS)
    for name in names:
        if error := storage.read_bytes(os.path.join(folder, name)):
            raise OSError(f"process {name} could not write its shards: {error.decode()}")


def _owned(x: jax.Array) -> jax.Array:
    """Returns an array whose memory TensorStore can read after the original is donated."""
    on_cpu = next(iter(x.sharding.device_set)).platform == "cpu"
    return x.copy() if on_cpu else x  # From other devices, it is copied to the host first.


def _chunks(shard: Sequence[int], itemsize: int) -> list[int]:
    """Returns sizes of chunks that divide a shard, split along its first dimensions."""
    chunks = [max(size, 1) for size in shard]
    for dim, size in enumerate(chunks):
        for factor in (x for x in range(1, size + 1) if size % x == 0):
            chunks[dim] = size // factor
            if math.prod(chunks) * itemsize <= _CHUNK_BYTES:
                return chunks
    return chunks
