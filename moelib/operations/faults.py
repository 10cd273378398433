"""Faults that a drill injects into a run, and what the run promises after each.

A fault happens once, in one process or in all, at a moment of the run.
"""

import contextlib
import dataclasses
import os
import pathlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.contents import list_checkpoints
from moelib.core import tree

# Moments: before the processes connect, while a checkpoint is restored, before the batch of a step
# is read, before a step, and while the checkpoint of a step is written.
START, RESTORE, BATCH, STEP, SAVE = "start", "restore", "batch", "step", "save"
_RESTORE_SECONDS = 0.05  # From the beginning of a restore to the fault.
SLOW_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, its moment and its process."""

    kind: str  # Name of a function of this file.
    at: str  # Moment.
    step: int = 0  # Of the moment, for those that have one.
    process: int | None = None  # Index of the process; None for all.

    def hits(self, process: int, at: str, step: int) -> bool:
        """Returns whether it happens in a process at a moment."""
        mine = self.process in (None, process)
        return mine and self.at == at and (at in (START, RESTORE) or self.step == step)


def kill(_: Any = None) -> None:
    """Kills this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_when_saved(trainer: Any) -> None:
    """Kills this process once its last checkpoint is complete, before which there is another."""
    trainer.checkpointer.close()  # Without the other processes.
    kill()


def terminate(_: Any) -> None:
    """Sends SIGTERM to this process, as before a preemption."""
    os.kill(os.getpid(), signal.SIGTERM)


def hang(_: Any) -> None:
    """Stops this process without ending it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def slow(_: Any) -> None:
    """Delays the data."""
    time.sleep(SLOW_SECONDS)


def fail(_: Any) -> None:
    """Fails as a disk does on which the data are not."""
    raise FileNotFoundError(2, "No such file or directory (of the drill)", "data")


def fail_once(_: Any) -> None:
    """Fails as a disk does from which the data cannot be read for a moment."""
    raise OSError(5, "Input/output error (of the drill)", "data")


def not_a_number(trainer: Any) -> None:
    """Makes the first parameter of at least two dimensions NaN."""
    params = tree.by_path(trainer.trainer_state.model).items()
    path = next(path for path, x in params if x.ndim > 1)
    _change(trainer, path, jax.jit(lambda x: x * jnp.nan))


def replica_bit(trainer: Any) -> None:
    """Flips the lowest bit of the first replicated parameter, in the replica of one device."""
    params = tree.by_path(trainer.trainer_state.model).items()
    path = next(path for path, x in params if len({str(s.index) for s in x.global_shards}) == 1)

    def flip(x: jax.Array) -> jax.Array:
        first, *others = [shard.data for shard in x.addressable_shards]
        changed = np.array(first)
        changed.reshape(-1).view(np.uint8)[0] ^= 1
        changed = jax.device_put(changed, first.sharding)
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [changed, *others])

    _change(trainer, path, flip)


def _change(trainer: Any, path: str, change: Callable[[jax.Array], jax.Array]) -> None:
    """Changes the parameter at a path."""
    state = trainer.trainer_state
    model = tree.map_by_path(lambda p, x: change(x) if p == path else x, state.model)
    trainer._state = state._replace(model=model)


def flip_bit_of_file(checkpoints: pathlib.Path) -> None:
    """Flips a bit in the middle of the largest file of the newest checkpoint."""
    with _largest_file(checkpoints).open("r+b") as file:
        middle = file.seek(0, os.SEEK_END) // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def cut_file(checkpoints: pathlib.Path) -> None:
    """Cuts the largest file of the newest checkpoint in half."""
    path = _largest_file(checkpoints)
    os.truncate(path, path.stat().st_size // 2)


def _largest_file(checkpoints: pathlib.Path) -> pathlib.Path:
    newest = pathlib.Path([*list_checkpoints(str(checkpoints)).values()][-1])
    return max((x for x in newest.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Lets no file of this process grow past 1 KiB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def soon(action: Callable[[], None]) -> None:
    """Runs an action in a moment, in another thread."""
    threading.Timer(_RESTORE_SECONDS, action).start()
