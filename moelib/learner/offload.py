"""The learner's state in host memory between steps.

Arrays with dimensions, moments and averages, are offloaded; scalars (counts, rates) stay on the
device.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, is_spec

MEMORY_KIND = "pinned_host"


def is_offloaded(x: Any) -> bool:
    """Returns whether an array of the state is in host memory between steps."""
    return len(x.shape) > 0


def to_host(state: Any) -> Any:
    """Returns the state with its offloaded arrays in host memory."""
    host = jax.memory.Space.Host
    return jax.tree.map(lambda x: jax.device_put(x, host) if is_offloaded(x) else x, state)


def to_device(state: Any) -> Any:
    """Returns the state in device memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), state)


def host_shardings(specs: Any, shardings: Any, field: str) -> Any:
    """Returns the shardings of the state between steps, from those in device memory.

    Raises:
        UserError: If the devices cannot address host memory; names the config field.
    """

    def on_host(spec: ParameterSpec, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(MEMORY_KIND) if is_offloaded(spec) else sharding

    mesh = jax.tree.leaves(shardings)[0].mesh
    if not isinstance(mesh, AbstractMesh):
        device = (mesh.local_devices or list(mesh.devices.flat))[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if MEMORY_KIND not in kinds:
            raise UserError(
                f"{field} is True, but devices of kind {device.device_kind!r} have no memory of "
                f"kind {MEMORY_KIND!r}, only {', '.join(kinds)}; set it to False."
            )
    return jax.tree.map(on_host, specs, shardings, is_leaf=is_spec)
