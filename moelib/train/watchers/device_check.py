"""Checks for silent data corruption: devices compute and hold the same bits.

Letters: N devices of the mesh, A checksums per device.
"""

import collections
import functools
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import PartitionSpec as P

from moelib.checkpoint.checksums import checksum
from moelib.core import tree
from moelib.core.config import config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.runtime import lost_process
from moelib.runtime.processes import gather_json
from moelib.train.compiler_options import deterministic_options
from moelib.train.watcher import Watcher

_MOST_SHOWN = 3
_DTYPES = ("bfloat16", "float32")
_RESULTS = [f"{dtype} gradient of {name}" for dtype in _DTYPES for name in "xuv"]


class DeviceCheckError(UserError, RuntimeError):
    """Devices compute or hold different bits."""


class DeviceCheck(Watcher):
    """Compares a fixed computation, and the replicas of the state, between all devices of a mesh.

    Arrays in host memory, and those of which each device holds another part, are not compared.
    """

    @config_class
    class Config(Watcher.Config):
        every_n_steps: PositiveInt = 100  # Steps between checks; each save is preceded by one, too.
        # Size of the matrices of the computation, of 48 dim^3 FLOPs per device.
        dim: PositiveInt = 512
        # End of the run: "stop" with exit status 2, after which it is not started again, or
        # "restart" with 88, after which a launcher starts it again, maybe on the same devices.
        on_difference: Literal["stop", "restart"] = "stop"

    def started(self) -> None:
        """Begins with the devices of the run; the first results are those that later ones equal."""
        self.use(self.run.mesh)
        self._good_step = self.run.start.step  # The last step without a difference.
        self._checked_step: int | None = None

    def use(self, mesh: jax.sharding.Mesh) -> None:
        """Sets the devices to compare; computes nothing."""
        self._mesh, self._first = mesh, cast("npt.NDArray[np.uint32] | None", None)
        split = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
        # An argument of the program: a compiler would compute all from a constant.
        seeds = np.zeros(mesh.size, np.uint32)
        self._seeds = jax.make_array_from_callback(seeds.shape, split, seeds.__getitem__)

    def between_steps(self, step: int) -> None:
        """Checks after the first step of a start, and after every n-th."""
        if self._first is None or step % self.config.every_n_steps == 0:
            self.before_save(step)

    def before_save(self, step: int) -> None:
        """Checks, once per step. Raises DeviceCheckError if there are differences."""
        run = self.run
        if step == self._checked_step:
            return
        run.wait()
        self._checked_step = step
        if found := self.check(run.state()):
            if run.checkpointer is not None and run.checkpointer.local is not None:
                run.checkpointer.local.delete_after(self._good_step)  # Later ones: not checked.
            run.note("device_difference", step=step, differences=found)
            raise self.error(step, found)
        self._good_step = step

    def check(self, state: Any) -> list[str]:
        """Returns a sentence per difference; all processes must call it, and get the same.

        The computation is compared between devices and with its first result of this start.
        """
        mesh = self._mesh
        arrays = {path: x for path, x in tree.by_path(state).items() if _replica_axes(x)}
        specs = tuple(x.sharding.spec for x in arrays.values())
        computed = np.asarray(_computation(mesh, self.config.dim)(self._seeds))
        shared = dict.fromkeys(_RESULTS, mesh.axis_names)
        found = _differences(mesh, shared, computed, "computes")
        first, self._first = self._first, computed if self._first is None else self._first
        if first is not None and not found and (computed != first).any():
            found = ["All devices compute other bits than at the first check."]
        if arrays:
            held = np.asarray(_checksums(mesh, specs)(*arrays.values()))
            shared = {path: _replica_axes(x) for path, x in arrays.items()}
            found += _differences(mesh, shared, held, "holds")
        return found

    def error(self, step: int, found: Sequence[str]) -> DeviceCheckError:
        """Returns the error of a check that found differences."""
        more = f" And {len(found) - _MOST_SHOWN} more." if len(found) > _MOST_SHOWN else ""
        error = DeviceCheckError(
            f"step {step}: {' '.join(found[:_MOST_SHOWN])}{more} Replace the device or its host; "
            "the same command resumes from the newest checkpoint, which was checked."
        )
        if self.config.on_difference == "restart":
            error.exit_status = lost_process.EXIT_CODE
        return error


def _replica_axes(x: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which an array is replicated; none for one in host memory."""
    if x.sharding.memory_kind == "pinned_host":
        return ()
    used = {name for part in x.sharding.spec for name in np.atleast_1d(part)}
    sizes = x.sharding.mesh.shape.items()
    return tuple(name for name, size in sizes if size > 1 and name not in used)


def _per_device(
    mesh: jax.sharding.Mesh, function: Callable[..., Sequence[Any]], in_specs: tuple[Any, ...]
) -> Callable[..., jax.Array]:
    """Returns a compiled function: checksums uint32 [N, A, 2] of what each device computes."""
    sums = lambda *local: jnp.stack([jnp.stack(checksum(x)) for x in function(*local)])[None]
    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=in_specs, out_specs=P(mesh.axis_names), check_vma=False
    )
    replicated = jax.sharding.NamedSharding(mesh, P())
    options = deterministic_options(mesh.devices.flat[0].device_kind)
    return jax.jit(mapped, out_shardings=replicated, compiler_options=dict(options))


@functools.cache
def _checksums(mesh: jax.sharding.Mesh, specs: tuple[Any, ...]) -> Callable[..., jax.Array]:
    return _per_device(mesh, lambda *arrays: arrays, specs)


@functools.cache
def _computation(mesh: jax.sharding.Mesh, dim: int) -> Callable[..., jax.Array]:
    """Returns the forward and backward pass of a layer on fixed inputs, in two dtypes."""
    shapes = ((dim, dim), (dim, 2 * dim), (2 * dim, dim))

    def values(seed: jax.Array, number: int, dtype: str) -> jax.Array:
        bits = lax.iota(jnp.uint32, math.prod(shapes[number])) * np.uint32(0x9E3779B1) + seed
        bits = (bits ^ (bits >> 15)) * np.uint32(0x85EBCA6B + 2 * number)
        scale = np.float32(2.0**-31 / dim**0.5)  # To values in (-1, 1) / sqrt(dim).
        numbers = lax.bitcast_convert_type(bits, jnp.int32) * scale
        return numbers.reshape(shapes[number]).astype(dtype)

    def gradients(seed: jax.Array) -> list[jax.Array]:
        loss = lambda x, u, v: jnp.sum(jnp.tanh(jax.nn.silu(x @ u) @ v).astype(jnp.float32))
        of = lambda dtype: [values(seed[0], i, dtype) for i in range(3)]
        return [g for dtype in _DTYPES for g in jax.grad(loss, argnums=(0, 1, 2))(*of(dtype))]

    return _per_device(mesh, gradients, (P(mesh.axis_names),))


def _differences(
    mesh: jax.sharding.Mesh,
    shared: Mapping[str, Sequence[str]],
    sums: npt.NDArray[np.uint32],
    verb: str,
) -> list[str]:
    """Returns a sentence for each of the checksums [N, A, 2] that differs between devices.

    `shared` holds the mesh axes along which each must be the same, by its name [A].
    """
    found, all_sums = [], np.moveaxis(sums, 1, 0).reshape(-1, *mesh.devices.shape, 2)
    for (name, axes), values in zip(shared.items(), all_sums, strict=True):
        dims = [mesh.axis_names.index(axis) for axis in axes]
        last = range(-len(dims), 0)
        size = math.prod(mesh.shape[axis] for axis in axes)
        groups = np.moveaxis(mesh.devices, dims, last).reshape(-1, size)
        bits = np.moveaxis(values, dims, [i - 1 for i in last]).reshape(-1, size, 2)
        wrong = np.nonzero((bits != bits[:, :1]).any((1, 2)))[0]
        if suspects := [d for i in wrong for d in _suspects(groups[i], bits[i])]:
            hosts = dict(enumerate(gather_json(socket.gethostname())))
            text = ", ".join(
                f"{d.id} (process {(p := d.process_index)}, {hosts.get(p)})" for d in suspects
            )
            found.append(f"{name}: device {text} {verb} other bits than the others.")
    return found


def _suspects(devices: npt.NDArray[Any], values: npt.NDArray[np.uint32]) -> list[Any]:
    """Returns the devices of a group that differ from most of it; without a majority, all."""
    pairs = [tuple(pair) for pair in values.tolist()]
    most, count = collections.Counter(pairs).most_common(1)[0]
    wrong = [d for d, pair in zip(devices, pairs, strict=True) if pair != most]
    return wrong if 2 * count > len(pairs) else list(devices)
