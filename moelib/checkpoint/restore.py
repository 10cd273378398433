"""Reading checkpoints: all of one, or the parameters alone, under any mesh."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from moelib.checkpoint import contents
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointRecord,
    DamagedCheckpointError,
    unreadable,
)
from moelib.core import tree

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Restored(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        state: Its arrays, in the structure asked for.
        record: What was written beside them.
        path: Its folder.
    """

    state: Any
    record: CheckpointRecord
    path: str


def restore_checkpoint(path: str, target: Any) -> Restored:
    """Returns the checkpoint at `path` in the structure and shardings of the target.

    Args:
        path: Its folder.
        target: Tree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
        CheckpointMismatchError: If the arrays are not those of the target.
        DamagedCheckpointError: If it is damaged.
        Exception: What kept a sound checkpoint from being read, as it came: see `unreadable`.
    """
    record = _read_record(path, target)
    nested = _read(path, tree.to_nested(target), partial=False)
    return Restored(tree.from_nested(nested, target), record, path)


def restore_params_only(
    directory: str, target: Any, *, step: int | None = None, average: bool = True
) -> Restored:
    """Returns the model's parameters alone, to evaluate or generate with; reads nothing else.

    Args:
        directory: The folder of the checkpoints.
        target: Nested dict of `jax.ShapeDtypeStruct`, with shardings or without.
        step: Which step; None takes the newest that can be read.
        average: Whether to take the average of the parameters where the learner kept one.

    Raises:
        CheckpointMismatchError: If the parameters are not those of the target.
        CheckpointNotFoundError: If there is no checkpoint.
        DamagedCheckpointError: If none can be read.
    """
    found = agreed_checkpoints(os.path.abspath(directory))
    if not found or (step is not None and step not in found):
        raise not_found(directory, step, found)
    damages = []
    for candidate in [step] if step is not None else reversed(found):
        try:
            return _restore_params(found[candidate], target, average)
        except DamagedCheckpointError as error:
            damages.append(str(error))
            logger.warning("Damaged checkpoint: %s", error)
    raise DamagedCheckpointError("no checkpoint can be read:\n  " + "\n  ".join(damages))


_AVERAGE = "learner/ema/params/"


def _restore_params(path: str, target: Any, average: bool) -> Restored:
    wanted = contents.describe_arrays(target)
    record = _read_record(path, target, prefix="model/")
    sources = {
        name: _AVERAGE + name
        if average and record.arrays.get(_AVERAGE + name, [""])[1:] == [wanted[name][1]]
        else f"model/{name}"
        for name in wanted
    }
    leaves = dict(tree.flatten_items(target))
    arrays = {
        source: jax.ShapeDtypeStruct(
            leaves[name].shape,
            np.dtype(record.arrays[source][0]),
            sharding=getattr(leaves[name], "sharding", None),
        )
        for name, source in sources.items()
    }
    read = dict(tree.flatten_items(_read(path, tree.unflatten(arrays), partial=True)))
    params = {name: read[source].astype(wanted[name][0]) for name, source in sources.items()}
    return Restored(tree.from_nested(tree.unflatten(params), target), record, path)


def _read_record(path: str, target: Any, *, prefix: str = "") -> CheckpointRecord:
    """Returns a checkpoint's record, if its arrays below `prefix` are those of the target."""

    def read() -> CheckpointRecord:
        record = CheckpointRecord.read(path)
        saved = {
            name.removeprefix(prefix): array
            for name, array in record.arrays.items()
            if name.startswith(prefix)
        }
        contents.check_arrays(saved, contents.describe_arrays(target), path)
        return record

    return on_all_processes(read, path)


def _read(path: str, target: dict[str, Any], *, partial: bool) -> dict[str, Any]:
    """Returns the arrays of a nested dict of targets; those without a sharding on one device.

    Raises:
        DamagedCheckpointError: If they are damaged, as any process sees them.
        Exception: As it came, what says nothing of the checkpoint.
    """
    import orbax.checkpoint as ocp

    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(
        lambda x: x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), target
    )
    args = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=partial,
    )

    def read() -> dict[str, Any]:
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(os.path.join(path, contents.STATE_ITEM), args=args)
        except Exception as error:
            if unreadable(error):
                raise
            raise DamagedCheckpointError(f"{path} cannot be read: {first_line(error)}") from error

    return on_all_processes(read, path)


def not_found(
    directory: str, step: int | None, found: Mapping[int, str]
) -> CheckpointNotFoundError:
    """Returns the error that names what was asked for and what there is."""
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f"there are steps {', '.join(map(str, found))}." if found else "the folder has none."
    return CheckpointNotFoundError(f"{directory}: {what}; {there}")


def first_line(error: BaseException) -> str:
    """Returns an error's type and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


def agreed_checkpoints(directory: str) -> dict[int, str]:
    """Returns the complete checkpoints {step: path} as process 0 sees them, on all processes."""
    found = on_all_processes(lambda: contents.list_checkpoints(directory), directory)
    if jax.process_count() == 1:
        return found
    from jax.experimental import multihost_utils

    newest = np.zeros(_MAX_LISTED, np.int32)
    steps = list(found)[-_MAX_LISTED:]
    newest[: len(steps)] = np.array(steps, np.int32) + 1  # 0 is none.
    agreed = multihost_utils.broadcast_one_to_all(newest)
    return {int(s) - 1: contents.step_path(directory, int(s) - 1) for s in agreed if s > 0}


_MAX_LISTED = 256


# How bad it is that something could not be read; the worst of all processes decides.
_FINE, _DAMAGED, _MISMATCH, _UNREADABLE = range(4)


def on_all_processes(read: Callable[[], T], path: str) -> T:
    """Returns what `read` returns, once it has succeeded on all processes.

    Raises:
        Exception: If it failed on any, on all of them: the process's own error, or one that says
            that another has failed.
    """
    result, error = None, None
    try:
        result = read()
    except Exception as caught:
        error = caught
    verdict = _verdict(error)
    worst = _worst(verdict)
    if worst == _FINE:
        return cast("T", result)
    if error is not None and verdict == worst:
        raise error
    message = f"{path} cannot be read by another process; its log says why."
    kinds = {_DAMAGED: DamagedCheckpointError, _MISMATCH: CheckpointMismatchError}
    raise kinds.get(worst, RuntimeError)(message) from error


def _verdict(error: Exception | None) -> int:
    if error is None:
        return _FINE
    if isinstance(error, DamagedCheckpointError):
        return _DAMAGED
    return _MISMATCH if isinstance(error, CheckpointMismatchError) else _UNREADABLE


def _worst(verdict: int) -> int:
    """Returns the largest of the processes' verdicts."""
    if jax.process_count() == 1:
        return verdict
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.array(verdict, np.int32)).max())
