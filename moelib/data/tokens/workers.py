"""Worker processes: a function of many jobs, in spawned processes that end with this one."""

import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from moelib.core.errors import UserError


def in_processes[Job, Result](
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    num_processes: int,
    *,
    purpose: str,
    in_order: bool = False,
) -> Iterator[Result]:
    """Does jobs in spawned processes, or in this one, and yields each result once it is there.

    Args:
        function: A function of a module.
        jobs: Its arguments, which are pickled.
        num_processes: Number of processes; 1 works in this process, in the order of jobs.
        purpose: Verb and object for the message that a worker has died.
        in_order: Whether results have the order of jobs, and few of them are held at a time.

    Raises:
        UserError: If a worker process dies.
    """
    num_processes = min(num_processes, len(jobs))
    with _sigterm_ends_workers():
        if num_processes > 1:
            yield from _in_pool(function, jobs, num_processes, purpose, in_order)
        else:
            yield from map(function, jobs)


def _in_pool[Job, Result](
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    num_processes: int,
    purpose: str,
    in_order: bool,
) -> Iterator[Result]:
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),  # A fork would copy the locks of JAX's threads.
        _start_worker,
    )
    try:
        futures = (pool.submit(function, job) for job in jobs)
        if not in_order:
            futures = concurrent.futures.as_completed(list(futures))
        ahead = collections.deque(itertools.islice(futures, 2 * num_processes * in_order))
        for future in futures:
            ahead.append(future)
            yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            f"A worker process died (out of memory?) while {purpose}; finished parts are kept: run "
            f"the same command again with num_processes below {num_processes}."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _sigterm_ends_workers() -> Iterator[None]:
    """Ends the worker processes at SIGTERM, and this one as an exit, which frees what they share.

    Does nothing in a thread, or if the program has its own handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        for worker in multiprocessing.active_children():
            worker.terminate()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_worker() -> None:
    """Prepares a worker, in which the tokenizer's threads would compete with other workers."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _die_with_parent() -> None:
    """Ends a worker whose parent was killed, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
