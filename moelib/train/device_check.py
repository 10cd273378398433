"""Checks for silent data corruption: devices compute and hold the same bits.

Letters: N devices of the mesh, A checksums per device.
"""

import collections
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from moelib.checkpoint.checksums import checksum
from moelib.core import lost_process, tree
from moelib.core.config import Configurable, config_class
from moelib.core.errors import UserError
from moelib.core.processes import gather_json
from moelib.train.compiler_options import deterministic_options

_MOST_SHOWN = 3
_RESULTS = tuple(
    f"{dtype} gradient of {name}" for dtype in ("bfloat16", "float32") for name in "xuv"
)


class DeviceCheckError(UserError, RuntimeError):
    """Devices compute or hold different bits."""


class DeviceCheck(Configurable):
    """Compares a fixed computation, and the replicas of the state, between all devices of a mesh.

    Arrays in host memory, and those of which each device holds another part, are not compared.
    """

    @config_class
    class Config(Configurable.Config):
        every_n_steps: int = 100  # Steps between checks; each save is preceded by one, too.
        dim: int = 512  # Size of the matrices of the computation, of 48 dim^3 FLOPs per device.
        # End of the run: "stop" with exit status 2, after which it is not started again, or
        # "restart" with 88, after which a launcher starts it again, maybe on the same devices.
        on_difference: Literal["stop", "restart"] = "stop"

    def __init__(self, cfg: Config, *, mesh: jax.sharding.Mesh) -> None:
        """Computes nothing. Raises UserError if a number is not positive."""
        super().__init__(cfg)
        for name in ("every_n_steps", "dim"):
            if (value := getattr(self.config, name)) < 1:
                raise UserError(f"device_check.{name}={value}: set 1 or more.")
        self._mesh, self._first = mesh, cast("npt.NDArray[np.uint32] | None", None)
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
        seeds = np.zeros(
            mesh.size, np.uint32
        )  # Values of run time: no compiler computes with them.
        self._seeds = jax.make_array_from_callback(seeds.shape, split, seeds.__getitem__)

    def is_due(self, step: int) -> bool:
        """Returns whether to check after a step: the first one of a start, and every n-th."""
        return self._first is None or step % self.config.every_n_steps == 0

    def check(self, state: Any) -> list[str]:
        """Returns a sentence per difference; all processes must call it, and get the same.

        The computation is compared between devices and with its first result of this start.
        """
        mesh, axes = self._mesh, self._mesh.axis_names
        computed = _computation(mesh, self.config.dim)(self._seeds)
        replicated = {
            path: x
            for path, x in tree.by_path(state).items()
            if x.sharding.memory_kind != "pinned_host" and _replica_axes(x)
        }
        specs = tuple(x.sharding.spec for x in replicated.values())
        held = _checksums(mesh, specs)(*replicated.values()) if replicated else None
        results = np.asarray(computed)
        found = _differences(mesh, _RESULTS, results, [axes] * len(_RESULTS), "computes")
        if self._first is None:
            self._first = results
        elif not found and (results != self._first).any():
            found = ["All devices compute other bits than at the first check."]
        if held is not None:
            shared = [_replica_axes(x) for x in replicated.values()]
            found += _differences(mesh, tuple(replicated), np.asarray(held), shared, "holds")
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
    """Returns the mesh axes, larger than 1, over which an array is replicated."""
    used = {
        name for part in x.sharding.spec for name in (part if isinstance(part, tuple) else (part,))
    }
    return tuple(
        name for name, size in x.sharding.mesh.shape.items() if size > 1 and name not in used
    )


def _per_device(
    mesh: jax.sharding.Mesh, function: Callable[..., Sequence[Any]], in_specs: Sequence[Any]
) -> Callable[..., jax.Array]:
    """Returns a compiled function: checksums uint32 [N, A, 2] of what each device computes."""
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    sums = lambda *local: jnp.stack([jnp.stack(checksum(x)) for x in function(*local)])[None]
    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=tuple(in_specs), out_specs=spec, check_vma=False
    )
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    options = deterministic_options(mesh.devices.flat[0].device_kind)
    return jax.jit(mapped, out_shardings=replicated, compiler_options=dict(options))


@functools.cache
def _checksums(mesh: jax.sharding.Mesh, specs: tuple[Any, ...]) -> Callable[..., jax.Array]:
    return _per_device(mesh, lambda *arrays: arrays, specs)


@functools.cache
def _computation(mesh: jax.sharding.Mesh, dim: int) -> Callable[..., jax.Array]:
    """Returns the forward and backward pass of a layer on fixed inputs, in two dtypes."""

    def values(seed: jax.Array, number: int, shape: tuple[int, int], dtype: str) -> jax.Array:
        bits = lax.iota(jnp.uint32, shape[0] * shape[1]) * np.uint32(0x9E3779B1) + seed
        bits = (bits ^ (bits >> 15)) * np.uint32(0x85EBCA6B + 2 * number)
        scale = np.float32(2.0**-31 / dim**0.5)  # Of uint32 to (-1, 1) / sqrt(dim).
        return (lax.bitcast_convert_type(bits, jnp.int32) * scale).reshape(shape).astype(dtype)

    def gradients(seed: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        for dtype in ("bfloat16", "float32"):
            shapes = ((dim, dim), (dim, 2 * dim), (2 * dim, dim))
            x, u, v = (values(seed[0], i, shape, dtype) for i, shape in enumerate(shapes))
            loss = lambda x, u, v: jnp.sum(jnp.tanh(jax.nn.silu(x @ u) @ v).astype(jnp.float32))
            found += jax.grad(loss, argnums=(0, 1, 2))(x, u, v)
        return found

    return _per_device(mesh, gradients, [jax.sharding.PartitionSpec(mesh.axis_names)])


def _differences(
    mesh: jax.sharding.Mesh,
    names: Sequence[str],
    sums: npt.NDArray[np.uint32],
    shared: Sequence[Sequence[str]],
    verb: str,
) -> list[str]:
    """Returns a sentence per name whose checksums differ between devices.

    Args:
        mesh: The mesh.
        names: Name of each checksum [A].
        sums: The checksums [N, A, 2].
        shared: Mesh axes along which each is the same [A].
        verb: Verb of the sentence.
    """
    found = []
    for i, (name, axes) in enumerate(zip(names, shared, strict=True)):
        order = sorted(
            range(mesh.devices.ndim), key=lambda k, axes=axes: mesh.axis_names[k] in axes
        )
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        values = (
            sums[:, i].reshape(*mesh.devices.shape, 2).transpose(*order, -1).reshape(-1, size, 2)
        )
        devices = mesh.devices.transpose(order).reshape(-1, size)
        suspects = [x for pair in zip(devices, values, strict=True) for x in _suspects(*pair)]
        if suspects:
            hosts = dict(enumerate(gather_json(socket.gethostname())))
            places = [
                f"{d.id} (process {d.process_index}, {hosts.get(d.process_index)})"
                for d in suspects
            ]
            found.append(f"{name}: device {', '.join(places)} {verb} other bits than the others.")
    return found


def _suspects(devices: npt.NDArray[Any], values: npt.NDArray[np.uint32]) -> list[Any]:
    """Returns the devices of a group that differ from most of it; without a majority, all."""
    pairs = [tuple(pair) for pair in values.tolist()]
    most, count = collections.Counter(pairs).most_common(1)[0]
    wrong = [d for d, pair in zip(devices, pairs, strict=True) if pair != most]
    return wrong if 2 * count > len(pairs) else list(devices)
