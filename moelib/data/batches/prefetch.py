"""Prefetching: the next batches are made and put on devices while a step runs.

Letters: B sequences of a global batch.
"""

import collections
import concurrent.futures
import errno
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from moelib.core.errors import UserError
from moelib.data.batches.input import BatchIterator, State

if TYPE_CHECKING:
    import jax

    from moelib.core.tree import Batch


logger = logging.getLogger(__name__)

_REPORT_SECONDS = 30.0  # Between reports of a batch that does not come.
_FRAMES_SHOWN = 4
# Errors after which a file system, mostly one of a network, may be back.
_TRANSIENT_NAMES = "EIO ESTALE EAGAIN EBUSY EREMOTEIO EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH"
_TRANSIENT = {getattr(errno, name, None) for name in _TRANSIENT_NAMES.split()} - {None}


def host_rows(sharding: "jax.sharding.NamedSharding", global_batch_size: int) -> range:
    """Returns which of B rows, the global batch, this process's devices need.

    They are one of equal shares. Processes that share rows, because tensor parallelism spans them,
    get the same answer. The first axis of the sharding is that of rows.

    Raises:
        UserError: If the batch does not divide, or the process's rows are not such a share.
    """
    try:
        rows = row_sharding(sharding, 1)
        indices = rows.addressable_devices_indices_map((global_batch_size,))
    except ValueError as error:
        raise UserError(
            f"global_batch_size={global_batch_size} does not divide over the mesh; set it to a "
            f"multiple of the size of its batch axes: {error}"
        ) from None
    spans = {index[0].indices(global_batch_size)[:2] for index in indices.values() if index}
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    size = last - first
    covered = sum(end - begin for begin, end in spans)
    if covered != size or global_batch_size % size or first % size:
        raise UserError(
            f"This process holds rows {sorted(spans)} of {global_batch_size}, which are not an "
            "equal, contiguous share; order the mesh's devices by process along the batch axes."
        )
    return range(first, last)


def row_sharding(sharding: "jax.sharding.NamedSharding", ndim: int) -> "jax.sharding.NamedSharding":
    """Returns the sharding of an array that has the first `ndim` of the axes [B, S]."""
    import jax

    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:ndim])
    )


def put_batch(
    batch: "Batch", sharding: "jax.sharding.NamedSharding", global_batch_size: int
) -> "dict[str, jax.Array]":
    """Returns the global batch of B rows as arrays, made of the rows of all processes.

    Args:
        batch: This process's rows, those of `host_rows(sharding, global_batch_size)`; arrays may be
            nested in dicts.
        sharding: Sharding of [B, S] arrays; arrays with fewer axes drop its last ones.
        global_batch_size: Rows B.
    """
    import jax

    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            row_sharding(sharding, array.ndim), array, (global_batch_size, *array.shape[1:])
        ),
        batch,
    )


class Prefetcher[T](Iterator[T]):
    """Reads a `BatchIterator` ahead in a thread.

    `state()` is the position after the batches taken, not after those read ahead. An error in the
    thread is raised by the call that would have returned the batch, with its own traceback; after a
    transient error of the system, the batch is read again. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        batches: BatchIterator,
        put: Callable[["Batch"], T],
        *,
        num_batches: int = 2,
        num_retries: int = 5,
    ) -> None:
        """Starts reading.

        Args:
            batches: The iterator, for exclusive use until this is closed.
            put: Function that maps each batch in the thread, usually `put_batch`.
            num_batches: Number of batches kept ready; with 0, each is made when it is taken.
            num_retries: Times that a batch is read again, after 1, 2, 4 ... seconds.
        """
        if min(num_batches, num_retries) < 0:
            raise UserError(f"num_batches={num_batches}, {num_retries=}: set 0 or more.")
        self._batches, self._put = batches, put
        self.can_seek = batches.can_seek
        self._state = self._read_state = batches.state()
        self._num_retries, self._closing, self._ident = num_retries, threading.Event(), 0
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: collections.deque[Future[tuple[T, State]]] = collections.deque()
        self._closed = False
        for _ in range(num_batches):
            self._ahead.append(self._thread.submit(self._read))

    def _read(self) -> tuple[T, State]:
        """Returns the next batch and the position after it."""
        self._ident = threading.get_ident()
        batch = self._next(self._num_retries)
        self._read_state = self._batches.state()
        return self._put(batch), self._read_state

    def _next(self, num_retries: int, wait_seconds: int = 1) -> "Batch":
        """Returns the next batch, after a transient error from the last position read."""
        try:
            if num_retries < self._num_retries:
                self._batches.restore(self._read_state)
            return next(self._batches)
        except Exception as error:
            if isinstance(error, StopIteration):
                raise
            source = getattr(self._batches, "source", self._batches)
            position = f"{type(source).__name__}, after {_position(self._read_state)}"
            if num_retries < 1 or not _is_transient(error) or self._closing.is_set():
                error.add_note(f"No batch of {position}.")
                raise
            logger.warning("NO BATCH of %s: %s. Next try in %d s.", position, error, wait_seconds)
        self._closing.wait(wait_seconds)
        return self._next(num_retries - 1, 2 * wait_seconds)

    def __iter__(self) -> Self:
        """Returns itself."""
        return self

    def __next__(self) -> T:
        """Returns the next batch; waits for it if necessary. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("The prefetcher is closed; make a new one.")
        if not self._ahead:
            taken, self._state = self._read()
            return taken
        waited = 0.0
        while not concurrent.futures.wait([self._ahead[0]], _REPORT_SECONDS).done:
            waited, after = waited + _REPORT_SECONDS, _position(self._state)
            text = "input: no batch for %.0f s, after %s; its thread is in %s"
            logger.warning(text, waited, after, _stack(self._ident))
        taken, self._state = self._ahead[0].result()  # An error stays first and is raised again.
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(self._read))
        return taken

    def state(self) -> State:
        """Returns the position after the batches taken so far."""
        return self._state

    def close(self) -> None:
        """Ends the thread and discards the batches read ahead. May be called again."""
        self._closed = True
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _position(state: State) -> str:
    return f"step {state['step']}" if "step" in state else "the last one"


def _is_transient(error: BaseException | None) -> bool:
    """Returns whether an error, or the one that caused it, may not occur again."""
    if error is None or isinstance(error, ConnectionError | TimeoutError):
        return error is not None
    return getattr(error, "errno", None) in _TRANSIENT or _is_transient(error.__cause__)


def _stack(ident: int) -> str:
    """Returns the innermost calls of a thread, the latest first."""
    frame = sys._current_frames().get(ident)
    calls = traceback.extract_stack(frame)[: -_FRAMES_SHOWN - 1 : -1] if frame else []
    found = [f"{x.name} ({os.path.basename(x.filename)}:{x.lineno})" for x in calls]
    return " < ".join(found) or "no call: it has ended"
