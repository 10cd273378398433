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
    """A mesh over several slices: the size of an axis is its `ici` times its `dcn` size.

    Slices are what devices say they belong to (`slice_index`: TPUs and GPUs). Where they do not
    say, as on CPUs, processes stand for slices, and one process may stand for several. So do they
    for GPUs that are only described, to compile for: all of these say slice 0.

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
            f"the {num_devices} devices; make the product one of "
            f"{', '.join(map(str, _divisors(num_devices)))}."
        )
    if not unknown and known != num_devices:
        raise ValueError(
            f"{place} ({said}) takes {known} devices, but there are {num_devices}; "
            f"{_what_fits(mesh_shape, names, num_devices)}, or set one size to -1."
        )
    shape = [num_devices // known if size == -1 else size for size in mesh_shape]
    return tuple(shape)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _what_fits(shape: MeshShape, names: Sequence[str], num_devices: int) -> str:
    """Returns advice: sizes of the axes in use for which the others can stay."""
    advice = []
    for i, size in enumerate(shape):
        others = math.prod(shape) // size
        if size > 1 and num_devices % others == 0:
            advice.append(f"{names[i]} {num_devices // others}")
    if advice:
        return f"with the other sizes as they are, {' or '.join(advice)} would fit"
    return f"sizes that multiply to {num_devices} would fit"


def create_device_mesh(
    mesh_shape: MeshShape | HybridMeshShape,
    axis_names: Sequence[str] = MESH_AXIS_NAMES,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over all devices, whose axes the compiler may use as it sees fit.

    Axes are in the order of their names; on GPUs of several slices, those across slices come first.

    Args:
        mesh_shape: Sizes of the axes; one may be -1. Of a hybrid shape, one of `ici`.
        axis_names: Names of the axes.
        devices: The devices; by default all of them, on all hosts.

    Raises:
        ValueError: If the sizes do not take exactly the devices, or devices are of several slices
            and the shape does not say which axes lie across them.
    """
    devices = jax.devices() if devices is None else list(devices)
    if isinstance(mesh_shape, HybridMeshShape):
        array, names = _hybrid_devices(mesh_shape, axis_names, devices), tuple(axis_names)
        if getattr(devices[0], "platform", None) == "gpu":
            # XLA:GPU takes a device's place in the mesh for its id, and so for the host it is on:
            # with hosts innermost it would split each collective within hosts as if across them.
            order = _hosts_first(mesh_shape, array.shape, names)
            array, names = array.transpose(order), tuple(names[axis] for axis in order)
        return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))
    shape = infer_mesh_shape(mesh_shape, len(devices), axis_names=axis_names)
    if (num_slices := len(slices(devices) or [devices])) > 1:
        raise ValueError(
            f"mesh_shape ({describe_mesh(shape, axis_names)}): the devices are of {num_slices} "
            "slices; set it to HybridMeshShape(ici=sizes inside a slice, dcn=sizes across slices)."
        )
    # On a TPU, make_mesh follows the wiring; elsewhere the order of the devices stays.
    return jax.make_mesh(
        shape, tuple(axis_names), axis_types=(AxisType.Auto,) * len(shape), devices=devices
    )


def _hosts_first(
    shape: HybridMeshShape, sizes: Sequence[int], axis_names: Sequence[str]
) -> list[int]:
    """Returns the axes such that devices of a slice follow each other, slice by slice.

    Raises:
        ValueError: If several axes lie both inside slices and across them: no order does it then.
    """
    across = [size > 1 for size in shape.dcn]
    inside = [size > outer for size, outer in zip(sizes, shape.dcn, strict=True)]
    both = [name for name, a, b in zip(axis_names, across, inside, strict=True) if a and b]
    if len(both) > 1:
        raise ValueError(
            f"mesh_shape: on GPUs one axis at most may have sizes in both ici and dcn, and "
            f"{', '.join(both)} have; give all but one of them ici or dcn 1."
        )
    return sorted(range(len(sizes)), key=lambda axis: (not across[axis], inside[axis]))


def _hybrid_devices(
    shape: HybridMeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> np.ndarray:
    """Returns the devices of a hybrid mesh, each slice contiguous along every `ici` axis."""
    sizes = {"ici": shape.ici, "dcn": shape.dcn}
    for name, given in sizes.items():
        if len(given) != len(axis_names):
            raise ValueError(
                f"mesh_shape.{name} {tuple(given)} has {len(given)} sizes for the "
                f"{len(axis_names)} axes {', '.join(axis_names)}; give one size an axis."
            )
    slices = _as_many_slices(shape.dcn, axis_names, devices)
    ici = infer_mesh_shape(
        shape.ici, len(slices[0]), axis_names=axis_names, place="mesh_shape.ici (one slice)"
    )
    if hasattr(devices[0], "slice_index") and not _are_described_gpus(devices):
        from jax.experimental import mesh_utils

        return mesh_utils.create_hybrid_device_mesh(ici, tuple(shape.dcn), devices)
    arranged = np.array(slices).reshape(*shape.dcn, *ici)
    rank = len(ici)
    interleaved = [axis for i in range(rank) for axis in (i, rank + i)]  # dcn_0, ici_0, dcn_1, ...
    both = [d * i for d, i in zip(shape.dcn, ici, strict=True)]
    return arranged.transpose(interleaved).reshape(both)


def _as_many_slices(
    dcn: MeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> list[list[Any]]:
    """Returns the devices of each slice, for as many slices as the `dcn` sizes take."""
    num = math.prod(dcn)
    said = describe_mesh(dcn, axis_names) if num != 1 else "all 1"
    if min(dcn) < 1:
        raise ValueError(f"mesh_shape.dcn ({said}): sizes are 1 or more; only ici may have a -1.")
    found = slices(devices)
    if found is not None and len(found) != num:
        raise ValueError(
            f"mesh_shape.dcn ({said}) makes {num} of the {len(found)} slices; "
            f"{_what_fits(dcn, axis_names, len(found))}."
        )
    if found is None:
        found = _split_processes(num, said, devices)
    if len({len(each) for each in found}) > 1:
        raise ValueError(
            f"mesh_shape.dcn ({said}): the slices have {', '.join(str(len(s)) for s in found)} "
            "devices; a mesh takes as many of each."
        )
    return found


def slices(devices: Sequence[Any]) -> list[list[Any]] | None:
    """Returns the devices of each slice, or None if they do not say of which they are."""
    if not hasattr(devices[0], "slice_index"):
        return None
    return _grouped(devices, "process_index" if _are_described_gpus(devices) else "slice_index")


def _are_described_gpus(devices: Sequence[Any]) -> bool:
    """Returns whether the devices are GPUs, none of them of a process that runs."""
    return getattr(devices[0], "platform", None) == "gpu" and all(
        device.local_hardware_id is None for device in devices
    )


def _split_processes(num_slices: int, said: str, devices: Sequence[Any]) -> list[list[Any]]:
    """Returns `num_slices` groups of whole processes, or of equal parts of processes."""
    processes = _grouped(devices, "process_index")
    num = len(processes)
    if len(devices) % num_slices or (num % num_slices and num_slices % num):
        raise ValueError(
            f"mesh_shape.dcn ({said}) takes {num_slices} slices, which does not divide the "
            f"{len(devices)} devices of {num} processes; make the product one of "
            f"{', '.join(str(d) for d in _divisors(len(devices)) if not (num % d and d % num))}."
        )
    ordered = [device for process in processes for device in process]
    size = len(devices) // num_slices
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _grouped(devices: Sequence[Any], attribute: str) -> list[list[Any]]:
    """Returns the devices with each value of an attribute, in its order and that of their ids."""
    groups: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: (getattr(device, attribute), device.id)):
        groups.setdefault(getattr(device, attribute), []).append(device)
    return list(groups.values())
