"""Memory of a run: its state is checked before it is allocated, and a full device is explained.

A CPU that runs out of memory does not raise RESOURCE_EXHAUSTED: it hangs or is killed.
"""

import collections
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.errors import UserError, is_full_device
from moelib.core.param import ParameterSpec, is_spec
from moelib.learner.offload import MEMORY_KIND
from moelib.runtime.progress import format_bytes


class InsufficientMemoryError(UserError):
    """The state or a step of a run takes more memory than a device or the host has."""


def check_memory(specs: Any, shardings: Any) -> None:
    """Checks that this process's shards of the arrays of ParameterSpecs fit into memory.

    Raises:
        InsufficientMemoryError: If they do not fit; names the bytes needed and available.
    """
    needed: dict[Any, int] = collections.defaultdict(int)  # By local device; "host" for the host.

    def add(spec: ParameterSpec, sharding: jax.sharding.Sharding) -> None:
        size = math.prod(sharding.shard_shape(spec.shape)) * jnp.dtype(spec.dtype).itemsize
        for device in sharding.addressable_devices:
            in_host = device.platform == "cpu" or sharding.memory_kind == MEMORY_KIND
            needed["host" if in_host else device] += size

    jax.tree.map(add, specs, shardings, is_leaf=is_spec)
    for where, num_bytes in needed.items():
        available = _host_memory() if where == "host" else _device_memory(where)
        if available is not None and num_bytes > available:
            name = "host memory" if where == "host" else f"the memory of {where}"
            raise InsufficientMemoryError(
                f"The parameters and the optimizer's state take {format_bytes(num_bytes)} of "
                f"{name}, but only {format_bytes(available)} are available; split them over more "
                "devices (fsdp, expert or model in mesh_shape), or make the model smaller."
            )


@contextlib.contextmanager
def explained_if_full(global_batch_size: int, num_microbatches: int) -> Iterator[None]:
    """Explains errors in the block that say that a device is out of memory.

    Raises:
        InsufficientMemoryError: Instead of them; names what takes less memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full_device(error):
            raise
        raise InsufficientMemoryError(
            f"A device is out of memory ({str(error).splitlines()[0]}). Set num_microbatches above "
            f"{num_microbatches} or input.global_batch_size below {global_batch_size}, save fewer "
            "activations (model.decoder.remat), or split the state over more devices (mesh_shape); "
            "`moelib plan` estimates the memory of each."
        ) from error


def _device_memory(device: Any) -> int | None:
    """Returns the free bytes of a device, or None if they are unknown."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_memory() -> int | None:
    """Returns the bytes that Linux can still give to this process, or None if unknown."""
    available = []
    with contextlib.suppress(OSError, KeyError, ValueError), open("/proc/meminfo") as file:
        sizes = dict(line.split(":", 1) for line in file)
        available.append(int(sizes["MemAvailable"].split()[0]) * 1024)
    # The limit of a container; "max" for none.
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:
        available.append(int(file.read()))
    return min(available, default=None)
