"""Checkpoints on object stores: arrays by TensorStore, complete once they have their record.

A checkpoint is a "folder" step_00001000 of objects:

    started            the first object that is written, and the last that is deleted
    state/a.b/...      the array of the path a/b, in Zarr's format; chunks are parts of shards
    done/0, ...        of each process that has written its shards
    record/metadata    the record; written last, and deleted first

Orbax's own format is written to local folders alone: Orbax gives paths of s3:// to TensorStore as
paths of files, and its merge of the processes' files copies the whole database of keys.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from moelib.checkpoint.contents import RECORD_FILE, STATE_ITEM
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.runtime.processes import agreed

_STARTED = "started"
_CHUNK_BYTES = 256 << 20  # Largest chunk before compression; S3 takes 5 GB in one request.
_OCDBT_MANIFEST = "manifest.ocdbt"  # Of Orbax's format.
_DONE = "done"  # Folder of an object per process that has written its shards.
_SLOWEST_SECONDS = 1800.0  # Time that process 0 waits for the slowest.
_POLL_SECONDS = 0.5
_THREADS = 16  # Arrays that are read at once.


def check_url(setting: str, url: str) -> None:
    """Raises UserError if arrays cannot be stored at a URL."""
    if url.partition("://")[0] not in ("s3", "gs"):
        raise UserError(f"{setting} is {url!r}; set a local folder, or a URL of s3:// or gs://.")


def is_of_orbax(path: str) -> bool:
    """Returns whether a checkpoint is in Orbax's format and on a local disk."""
    return not storage.is_remote(path) and not os.path.exists(os.path.join(path, _STARTED))


def delete_checkpoint(path: str) -> None:
    """Deletes a checkpoint of an object store; if this is cut short, it is incomplete."""
    storage.remove(os.path.join(path, RECORD_FILE))
    storage.remove_tree(os.path.join(path, STATE_ITEM))
    storage.remove_tree(path)


def start_checkpoint(path: str) -> None:
    """Replaces what is at `path` by an incomplete checkpoint. Raises OSError."""
    delete_checkpoint(path)
    storage.write_bytes(os.path.join(path, _STARTED), b"")


def move_checkpoint(path: str, to: str) -> None:
    """Renames a checkpoint, or copies and then deletes it on an object store."""
    if not storage.is_remote(path):
        os.rename(path, to)
        return
    storage.copy_tree(path, to)
    delete_checkpoint(path)


class ObjectStoreWriter:
    """Writes one checkpoint at a time, in the background, from all processes.

    A process whose shards are written creates the object `done/<its index>`, which contains its
    error if there is one. Process 0 waits for those of all, and then writes the record.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "object_store")
        self._writing: Future[None] | None = None

    def save(self, path: str, state: Any, write_record: Callable[[str], None]) -> None:
        """Starts to write a checkpoint; all processes must call it after `start_checkpoint`.

        The arrays may be donated when this returns. Process 0 writes the record, once all processes
        have written their shards.

        Raises:
            Exception: On all processes, if it failed on any; then nothing completes.
        """
        futures = agreed(lambda: asyncio.run(_start_to_write(path, state)))
        self._writing = self._thread.submit(_finish, path, futures, write_record)

    def wait_until_finished(self) -> None:
        """Waits for this process, and process 0 for all. Raises the error of the write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits as well."""
        self.wait_until_finished()


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
        spec = _spec(path, name) | {"dtype": str(x.dtype), "metadata": metadata}
        writes.append(async_serialize(_owned(x), spec, commit_future=futures))
    await asyncio.gather(*writes)
    return futures


def _finish(path: str, futures: Sequence[Any], write_record: Callable[[str], None]) -> None:
    """Waits until this process's shards are written, and on process 0 writes the record."""
    done = os.path.join(path, _DONE, str(jax.process_index()))
    try:
        for future in futures:
            future.result()
    except Exception as error:
        with contextlib.suppress(OSError):
            storage.write_bytes(done, f"{type(error).__name__}".encode())
        raise
    storage.write_bytes(done, b"")
    if jax.process_index() == 0:
        _wait_for_all(os.path.join(path, _DONE))
        write_record(path)


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


def read_arrays(path: str, target: Any) -> dict[str, Any]:
    """Returns the arrays of a nested dict of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        ValueError: If an array is missing or damaged; its text has TensorStore's status.
    """
    folder = os.path.join(path, STATE_ITEM)
    ocdbt = storage.exists(os.path.join(folder, _OCDBT_MANIFEST))  # Copied from a local folder.

    def read(item: tuple[str, Any]) -> jax.Array:
        import tensorstore as ts

        name, like = item
        store = ts.open(_spec(path, name, ocdbt=ocdbt), open=True, read=True).result()
        if list(store.shape) != list(like.shape) or store.dtype.numpy_dtype != like.dtype:
            raise ValueError(f"{name} is {store.dtype.name}{list(store.shape)}")
        indices = like.sharding.addressable_devices_indices_map(like.shape).values()
        shards = {index: store[index].read() for index in indices if index is not None}
        get = lambda index: np.asarray(shards[index].result())
        return jax.make_array_from_callback(like.shape, like.sharding, get)

    items = tree.flatten_items(target)
    with ThreadPoolExecutor(_THREADS) as pool:
        arrays = dict(zip((name for name, _ in items), pool.map(read, items), strict=True))
    return tree.unflatten(arrays)


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


def _spec(path: str, name: str, *, ocdbt: bool = False) -> dict[str, Any]:
    """Returns TensorStore's description of an array."""
    folder, key = os.path.join(path, STATE_ITEM), name.replace("/", ".")
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": _kvstore(f"{folder}/"), "path": f"{key}/"}
        return {"driver": "zarr", "kvstore": kvstore}
    return {
        "driver": "zarr",
        "kvstore": _kvstore(f"{folder}/{key}/"),
        "store_data_equal_to_fill_value": True,  # Zeros, too, so that a missing chunk is an error.
        "fill_missing_data_reads": False,
    }


def _kvstore(folder: str) -> dict[str, Any]:
    if not storage.is_remote(folder):
        return {"driver": "file", "path": folder}
    scheme, _, rest = folder.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": prefix}
    store: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": prefix}
    # s3fs reads these variables itself; TensorStore reads the others of AWS, and its files.
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        store |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        store["aws_credentials"] = {"type": "environment"}
    return store
