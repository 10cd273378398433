"""The mesh: how devices are arranged along named axes.

The axes, outermost first, are those of `MESH_AXIS_NAMES`: the outermost carry the least traffic,
the innermost the most. A size of -1, for at most one axis, takes the devices that are left.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXIS_NAMES = ("pipeline", "data", "expert", "fsdp", "seq", "model")

MeshShape = Sequence[int]  # A size for each axis; one may be -1.


class HybridMeshShape(NamedTuple):
    """A mesh over several slices or hosts: the size of an axis is its `ici` times its `dcn` size.

    Attributes:
        ici: Sizes inside a slice, where links are fast.
        dcn: Sizes across slices, where they are slow.
    """

    ici: MeshShape
    dcn: MeshShape


def mesh_shape_from_axes(
    *,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    fsdp: int = 1,
    seq: int = 1,
    model: int = 1,
) -> tuple[int, ...]:
    """Returns the mesh shape with these sizes, in the order of `MESH_AXIS_NAMES`."""
    return (pipeline, data, expert, fsdp, seq, model)


def describe_mesh(shape: MeshShape, axis_names: Sequence[str]) -> str:
    """Returns the axes larger than 1, as "data 4, fsdp 2"; "1 device" if there are none."""
    axes = [f"{name} {n}" for name, n in zip(axis_names, shape, strict=True) if n != 1]
    return ", ".join(axes) or "1 device"


def infer_mesh_shape(
    mesh_shape: MeshShape,
    num_devices: int,
    *,
    axis_names: Sequence[str] | None = None,
    place: str = "mesh_shape",
) -> tuple[int, ...]:
    """Returns the mesh shape with its -1 replaced so that it takes all devices.

    Args:
        mesh_shape: Sizes of the axes, 1 or more, or -1 for at most one.
        num_devices: The number of devices to arrange.
        axis_names: Names of the axes, for errors.
        place: What the shape is, for errors.

    Raises:
        ValueError: If the shape does not take exactly all devices.
    """
    names = tuple(axis_names) if axis_names else tuple(f"axis {i}" for i in range(len(mesh_shape)))
    if len(names) != len(mesh_shape):
        raise ValueError(
            f"{place} {tuple(mesh_shape)} has {len(mesh_shape)} sizes for the {len(names)} axes "
            f"{', '.join(names)}; give one size an axis."
        )
    unknown = [i for i, size in enumerate(mesh_shape) if size == -1]
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in mesh_shape):
        raise ValueError(
            f"{place} {tuple(mesh_shape)}: sizes are 1 or more, and at most one may be -1."
        )
    known = math.prod(size for size in mesh_shape if size != -1)
    said = describe_mesh(mesh_shape, names)
    if unknown and num_devices % known:
        raise ValueError(
            f"{place} ({said}): its known sizes multiply to {known}, which does not divide "
            f"the {num_devices} devices; make the product one of {_divisors(num_devices)}."
        )
    if not unknown and known != num_devices:
        raise ValueError(
            f"{place} ({said}) takes {known} devices, but there are {num_devices}; "
            + _what_fits(mesh_shape, names, num_devices)
        )
    shape = [num_devices // known if size == -1 else size for size in mesh_shape]
    return tuple(shape)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _what_fits(shape: MeshShape, names: Sequence[str], num_devices: int) -> str:
    """Returns advice: sizes of the axes in use for which the others can stay."""
    advice = []
    for i, size in enumerate(shape):
        others = math.prod(shape) // size
        if size > 1 and num_devices % others == 0:
            advice.append(f"{names[i]} {num_devices // others}")
    fits = (
        f"with the other sizes as they are, {' or '.join(advice)} would fit"
        if advice
        else (f"sizes that multiply to {num_devices} would fit")
    )
    return f"{fits}, or set one size to -1."


def create_device_mesh(
    mesh_shape: MeshShape | HybridMeshShape,
    axis_names: Sequence[str] = MESH_AXIS_NAMES,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over all devices, whose axes the compiler may use as it sees fit.

    Args:
        mesh_shape: Sizes of the axes; one may be -1. Of a hybrid shape, one of `ici`.
        axis_names: Names of the axes.
        devices: The devices; by default all of them, on all hosts.

    Raises:
        ValueError: If the sizes do not take exactly the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if isinstance(mesh_shape, HybridMeshShape):
        array = _hybrid_devices(mesh_shape, axis_names, devices)
        return Mesh(array, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))
    shape = infer_mesh_shape(mesh_shape, len(devices), axis_names=axis_names)
    # On a TPU, make_mesh follows the wiring; elsewhere the order of the devices stays.
    return jax.make_mesh(
        shape, tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape), devices=devices
    )


def _hybrid_devices(
    shape: HybridMeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> np.ndarray:
    """Returns the devices of a hybrid mesh, each slice contiguous along every `ici` axis."""
    if len(shape.dcn) != len(shape.ici):
        raise ValueError(
            f"mesh_shape: ici {tuple(shape.ici)} and dcn {tuple(shape.dcn)} must have as many "
            "sizes as each other."
        )
    num_slices = math.prod(shape.dcn)
    if min(shape.dcn) < 1 or len(devices) % num_slices:
        raise ValueError(
            f"mesh_shape.dcn ({describe_mesh(shape.dcn, axis_names)}) takes {num_slices} slices, "
            f"which does not divide the {len(devices)} devices; make the product one of "
            f"{_divisors(len(devices))}."
        )
    ici = infer_mesh_shape(
        shape.ici, len(devices) // num_slices, axis_names=axis_names, place="mesh_shape.ici"
    )
    if hasattr(devices[0], "slice_index"):
        from jax.experimental import mesh_utils

        return mesh_utils.create_hybrid_device_mesh(ici, tuple(shape.dcn), devices)
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    slices = np.array(ordered).reshape(*shape.dcn, *ici)
    rank = len(ici)
    interleaved = [axis for i in range(rank) for axis in (i, rank + i)]  # dcn_0, ici_0, dcn_1, ...
    sizes = [d * i for d, i in zip(shape.dcn, ici, strict=True)]
    return slices.transpose(interleaved).reshape(sizes)
