"""The learner's state in the host's memory, where it waits between steps.

What waits there has dimensions: moments and averages. Scalars (counts, rates) stay on the device.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from moelib.core.param import ParameterSpec, is_spec

MEMORY_KIND = "pinned_host"


def to_host(state: Any) -> Any:
    """Returns the state with what has dimensions in the host's memory."""
    return _put(state, jax.memory.Space.Host)


def to_device(state: Any) -> Any:
    """Returns the state, all of it in the devices' memory."""
    return _put(state, jax.memory.Space.Device)


def host_shardings(specs: Any, shardings: Any, place: str) -> Any:
    """Returns where a learner's arrays lie between steps.

    Args:
        specs: The state with a ParameterSpec in place of each array.
        shardings: Where each would lie on the devices, as NamedShardings.
        place: The field that asks for it, for errors.

    Raises:
        ValueError: If the devices reach no such memory.
    """

    def on_host(spec: ParameterSpec, sharding: NamedSharding) -> NamedSharding:
        if not waits(spec):
            return sharding
        _check_memory(sharding.mesh, place)
        return sharding.with_memory_kind(MEMORY_KIND)

    return jax.tree.map(on_host, specs, shardings, is_leaf=is_spec)


def _check_memory(mesh: Mesh | AbstractMesh, place: str) -> None:
    if isinstance(mesh, AbstractMesh):
        return
    device = (mesh.local_devices or list(mesh.devices.flat))[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if MEMORY_KIND not in kinds:
        raise ValueError(
            f"{place} is True, but devices of kind {device.device_kind!r} have no memory of kind "
            f"{MEMORY_KIND!r}, only {', '.join(kinds)}; set it to False."
        )


def waits(x: Any) -> bool:
    """Returns whether an array of the state waits on the host."""
    return len(x.shape) > 0


def _put(state: Any, space: jax.memory.Space) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space) if waits(x) else x, state)
