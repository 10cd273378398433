"""Prefetching: the next batches are made, and put on devices, while a step runs.

Letters: B rows of a global batch.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from moelib.data.input import BatchIterator, State

if TYPE_CHECKING:
    import jax

    from moelib.core.tree import Batch

T = TypeVar("T")


class HostRows(NamedTuple):
    """Which of equal shares of the global batch a process holds."""

    host_index: int
    num_hosts: int


def host_rows(sharding: "jax.sharding.NamedSharding", global_batch_size: int) -> HostRows:
    """Returns which share of the batch's rows this process's devices need.

    Processes that share rows (because tensor parallelism spans them) get the same answer.

    Args:
        sharding: Where batch arrays live; their first axis is rows.
        global_batch_size: Rows B.

    Raises:
        ValueError: If the batch does not divide, or the process's rows are no such share.
    """
    try:
        rows = row_sharding(sharding, 1)
        places = rows.addressable_devices_indices_map((global_batch_size,))
    except ValueError as error:
        raise ValueError(
            f"global_batch_size is {global_batch_size}, which does not divide over the mesh; set "
            f"it to a multiple of its batch axes: {error}"
        ) from None
    spans = {place[0].indices(global_batch_size)[:2] for place in places.values() if place}
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    size = last - first
    covered = sum(end - begin for begin, end in spans)
    if covered != size or global_batch_size % size or first % size:
        raise ValueError(
            f"This process holds rows {sorted(spans)} of {global_batch_size}, which is no equal "
            "share in one piece; order the mesh's devices by process along the batch axes."
        )
    return HostRows(first // size, global_batch_size // size)


def row_sharding(sharding: "jax.sharding.NamedSharding", ndim: int) -> "jax.sharding.NamedSharding":
    """Returns a sharding of [B, S] arrays cut down to the axes that an array has."""
    import jax

    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:ndim])
    )


def put_batch(
    batch: "Batch", sharding: "jax.sharding.NamedSharding", global_batch_size: int
) -> "dict[str, jax.Array]":
    """Returns the global batch as arrays, made of every process's own rows.

    Args:
        batch: This process's rows, those of `host_rows(sharding, global_batch_size)`.
        sharding: Of [B, S] arrays; shorter shapes drop its last axes.
        global_batch_size: Rows B.
    """
    import jax

    return {
        name: jax.make_array_from_process_local_data(
            row_sharding(sharding, array.ndim), array, (global_batch_size, *array.shape[1:])
        )
        for name, array in batch.items()
    }


class _Failure(NamedTuple):
    error: BaseException


class _End(NamedTuple):
    pass


class Prefetcher(Iterator[T], Generic[T]):
    """Reads a `BatchIterator` ahead in a thread.

    `state()` is the place after the batches that were taken, not those that were read ahead. An
    error of the thread is raised where the batch would have been taken, with its own traceback.
    Close it, or use it in a `with`.
    """

    def __init__(
        self,
        batches: BatchIterator,
        put: Callable[["Batch"], T],
        *,
        num_batches: int = 2,
    ) -> None:
        """Starts reading.

        Args:
            batches: What to read; nobody else may read it until this is closed.
            put: Makes of a batch what is to be taken, usually with `put_batch`.
            num_batches: How many are kept ready.

        Raises:
            ValueError: If num_batches is not positive.
        """
        if num_batches < 1:
            raise ValueError(f"num_batches is {num_batches}; set it to 1 or more.")
        self._batches, self._put = batches, put
        self._state = batches.state()
        self._ready: queue.Queue[Any] = queue.Queue(num_batches)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Reads until the end, an error, or close()."""
        item: Any = None
        while not self._stop.is_set() and not isinstance(item, _Failure | _End):
            try:
                batch = next(self._batches)
                item = (self._put(batch), self._batches.state())
            except StopIteration:
                item = _End()
            except BaseException as error:
                item = _Failure(error)
            self._offer(item)

    def _offer(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                pass

    def __iter__(self) -> Self:
        """Returns itself."""
        return self

    def __next__(self) -> T:
        """Returns the next batch, waiting for it if need be.

        Raises:
            RuntimeError: If the prefetcher is closed.
        """
        if self._stop.is_set():
            raise RuntimeError("The prefetcher is closed; make a new one.")
        item = self._ready.get()
        if isinstance(item, _End | _Failure):
            self._ready.put(item)  # And again for who asks again.
            if isinstance(item, _End):
                raise StopIteration
            raise item.error
        taken, self._state = item
        return taken

    def state(self) -> State:
        """Returns the place after the batches taken so far."""
        return self._state

    def close(self) -> None:
        """Ends the thread and forgets what was read ahead. May be called again."""
        self._stop.set()
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                break
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
