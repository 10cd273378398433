"""Arrays of a checkpoint, as TensorStore reads them: those that Orbax has written, and our own.

Orbax writes one database of keys for all arrays, OCDBT; on object stores, each array is a folder
of its own. Both hold Zarr's format, and a copy in another place is read by what it contains.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from moelib.checkpoint.contents import STATE_ITEM, DamagedCheckpointError, unreadable
from moelib.core import tree
from moelib.core.errors import first_line
from moelib.runtime import storage

_OCDBT_MANIFEST = "manifest.ocdbt"
_THREADS = 16  # Arrays that are read at once.


def read_arrays(path: str, target: Any) -> dict[str, Any]:
    """Returns the arrays of a nested dict of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        DamagedCheckpointError: If an array is missing or damaged.
        OSError: If the storage does not return the files.
    """
    try:
        return _read(path, target)
    except ValueError as error:  # TensorStore's, for content and storage alike.
        reason = first_line(error)
    # Outside of the block, the error is gone, and with it the arrays that were read before it.
    _check_storage(os.path.join(path, STATE_ITEM))
    raise DamagedCheckpointError(f"{path} cannot be read: {reason}")


def _read(path: str, target: Any) -> dict[str, Any]:
    import tensorstore as ts

    ocdbt = storage.exists(os.path.join(path, STATE_ITEM, _OCDBT_MANIFEST))
    context = ts.Context()  # One, so that the database's index is read once.

    def read(item: tuple[str, Any]) -> jax.Array:
        name, like = item
        spec = array_spec(path, name, ocdbt=ocdbt)
        store = ts.open(spec, open=True, read=True, context=context).result()
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


def _check_storage(folder: str) -> None:
    """Raises OSError if files of a folder are there, but cannot be listed or opened."""

    def check(error: OSError) -> None:
        if unreadable(error):
            raise error

    try:
        storage.list_names(folder)
    except OSError as error:
        check(error)
    if storage.is_remote(folder):
        return
    for parent, _, names in os.walk(folder, onerror=check):
        for name in names:
            try:
                with open(os.path.join(parent, name), "rb") as file:
                    file.read(1)
            except OSError as error:
                check(error)


def array_spec(path: str, name: str, *, ocdbt: bool = False) -> dict[str, Any]:
    """Returns TensorStore's description of the array `name` of the checkpoint at `path`."""
    folder, key = os.path.join(path, STATE_ITEM), name.replace("/", ".")
    store = _kvstore(f"{folder}/{key}/")
    if ocdbt:
        store = {"driver": "ocdbt", "base": _kvstore(f"{folder}/"), "path": f"{key}/"}
    return {
        "driver": "zarr",
        "kvstore": store,
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
