"""Meshes: devices arranged along named axes.

A mesh is written `fsdp=4,expert=2`, on command lines and in messages. Axes that are not named have
size 1; one size may be -1, which takes the remaining devices. The axes of `MESH_AXIS_NAMES` are
ordered from the least traffic to the most.
"""

import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moelib.core.config import did_you_mean
from moelib.core.config_types import cut, shortened
from moelib.core.errors import UserError

MESH_AXIS_NAMES = ("pipeline", "data", "expert", "fsdp", "seq", "model")

MeshShape = Sequence[int]  # A size for each axis; one may be -1.
MeshSizes = Mapping[str, int]  # Sizes by axis; axes that are absent have size 1.


class HybridMeshShape(NamedTuple):
    """The shape of a mesh over several slices: each axis has its `ici` times its `dcn` size.

    TPUs and GPUs report their slice (`slice_index`). Devices that do not, such as CPUs, are divided
    into slices by process; one process may hold several slices. GPUs that are only described, for
    compiling, all report slice 0 and are divided by process too.
    """

    ici: MeshShape  # Sizes inside a slice, where links are fast.
    dcn: MeshShape  # Sizes across slices, where links are slow.


# -- Text ----------------------------------------------------------------------------------------


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


def parse_mesh(
    text: str,
    *,
    axis_names: Sequence[str] = MESH_AXIS_NAMES,
    num_devices: int | None = None,
    field: str = "mesh",
) -> tuple[int, ...]:
    """Returns the mesh shape that a text such as "fsdp=4,expert=-1" or "(1, 1, 2, 4, 1, 1)" names.

    Args:
        text: Axes and their sizes, or one size per axis.
        axis_names: Names of the axes.
        num_devices: Number of devices, which replaces a -1; None keeps the -1.
        field: Name of the field or flag that holds the text, for errors.

    Raises:
        UserError: If the text is not a mesh, or not one of `num_devices` devices.
    """
    shown = shortened(text)
    if long := re.search(r"[0-9]{10,}", text):
        raise UserError(f"{field} {shown}: {cut(long[0])} is too large.")
    if re.fullmatch(r"[-0-9,\s()\[\]]*[0-9][-0-9,\s()\[\]]*", text):
        shape = tuple(int(size) for size in re.findall(r"-?[0-9]+", text))
    else:
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (each.strip() for each in part.partition("="))
            if not re.fullmatch(r"-?[0-9]+", size):
                raise UserError(
                    f"{field} {shown}: {shortened(part.strip())} is not axis=size; write axes "
                    "and sizes such as fsdp=4,expert=2."
                )
            if name not in axis_names:
                advice = did_you_mean(name, axis_names)
                raise UserError(f"{field} {shown}: unknown axis {shortened(name)}; {advice}")
            if name in sizes:
                raise UserError(f"{field} {shown}: {name} occurs twice; give it one size.")
            sizes[name] = int(size)
        shape = tuple(sizes.get(name, 1) for name in axis_names)
    if num_devices is None:
        _check_sizes(shape, axis_names, field)
        return shape
    return infer_mesh_shape(shape, num_devices, axis_names=axis_names, field=field)


def describe_mesh(sizes: MeshSizes) -> str:
    """Returns a mesh as `parse_mesh` reads it, such as "data=4,fsdp=2"; "1 device" for one."""
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "1 device"


def all_meshes(num_devices: int, axis_names: Sequence[str]) -> list[dict[str, int]]:
    """Returns every mesh of all devices: the sizes larger than 1 by axis, in the order of names."""
    names = tuple(axis_names)
    return [
        {name: size for name, size in zip(names, sizes, strict=True) if size > 1}
        for sizes in _factorizations(num_devices, len(names))
    ]


@functools.cache
def _factorizations(n: int, num: int) -> tuple[tuple[int, ...], ...]:
    """Returns every way to write n as an ordered product of `num` factors."""
    if num == 0:
        return ((),) if n == 1 else ()
    rest = ((d, _factorizations(n // d, num - 1)) for d in _divisors(n))
    return tuple((d, *others) for d, found in rest for others in found)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# -- Sizes ---------------------------------------------------------------------------------------


def infer_mesh_shape(
    mesh_shape: MeshShape,
    num_devices: int,
    *,
    axis_names: Sequence[str] = MESH_AXIS_NAMES,
    field: str = "mesh_shape",
) -> tuple[int, ...]:
    """Returns the mesh shape with its -1, if it has one, replaced so that it takes all devices.

    `field` names the field or flag that holds the shape, for errors.

    Raises:
        UserError: If the shape does not take exactly all devices.
    """
    _check_sizes(mesh_shape, axis_names, field)
    known = math.prod(size for size in mesh_shape if size != -1)
    mesh = describe_mesh(dict(zip(axis_names, mesh_shape, strict=True)))
    if -1 in mesh_shape and num_devices % known:
        raise UserError(
            f"{field} {mesh}: the product {known} of its known sizes does not divide the "
            f"{num_devices} devices; choose sizes with a product in "
            f"{', '.join(map(str, _divisors(num_devices)))}."
        )
    if -1 not in mesh_shape and known != num_devices:
        raise UserError(
            f"{field} {mesh} takes {known} devices, but there are {num_devices}; choose sizes with "
            f"the product {num_devices}, or set one size to -1."
        )
    return tuple(num_devices // known if size == -1 else size for size in mesh_shape)


def _check_sizes(shape: MeshShape, names: Sequence[str], field: str) -> None:
    """Checks that a shape has a size for each axis, at most one of them -1."""
    if len(names) != len(shape):
        raise UserError(
            f"{field} {shortened(tuple(shape))} has {len(shape)} sizes for the {len(names)} axes "
            f"{', '.join(names)}; give one size per axis."
        )
    if list(shape).count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise UserError(
            f"{field} {shortened(tuple(shape))}: sizes are 1 or more, and at most one may be -1."
        )


# -- Devices -------------------------------------------------------------------------------------


def create_device_mesh(
    mesh_shape: MeshShape | HybridMeshShape,
    axis_names: Sequence[str] = MESH_AXIS_NAMES,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh over all devices, with axes of type Auto.

    The axes keep the order of their names, except on GPUs of several slices, where axes across
    slices come first.

    Args:
        mesh_shape: Sizes of the axes; one (of a hybrid shape's `ici`) may be -1.
        axis_names: Names of the axes.
        devices: The devices; by default all devices of all hosts.

    Raises:
        UserError: If the sizes do not take exactly the devices, or the devices belong to several
            slices and the shape is not hybrid.
    """
    devices, names = jax.devices() if devices is None else list(devices), tuple(axis_names)
    if isinstance(mesh_shape, HybridMeshShape):
        array = _hybrid_devices(mesh_shape, axis_names, devices)
        if getattr(devices[0], "platform", None) == "gpu":
            # XLA:GPU takes a device's position in the mesh for its id, and derives its host from
            # that: with hosts innermost it would split each collective within hosts as if across.
            order = _hosts_first(mesh_shape, array.shape, names)
            array, names = array.transpose(order), tuple(names[axis] for axis in order)
    else:
        array = _arranged(mesh_shape, names, devices)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _arranged(
    mesh_shape: MeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> np.ndarray:
    """Returns the devices of one slice as an array with a dimension per axis."""
    shape = infer_mesh_shape(mesh_shape, len(devices), axis_names=axis_names)
    if (num_slices := len(slices(devices) or [devices])) > 1:
        mesh = describe_mesh(dict(zip(axis_names, shape, strict=True)))
        raise UserError(
            f"mesh_shape {mesh}: the devices belong to {num_slices} slices; set it to "
            "HybridMeshShape(ici=sizes inside a slice, dcn=sizes across slices)."
        )
    return _laid(shape, devices)


def _laid(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices of one slice, TPUs laid on their torus; others keep their order."""
    if len(devices) == 1 or not hasattr(devices[0], "coords"):
        return np.asarray(devices, dtype=object).reshape(shape)
    from jax.experimental import mesh_utils

    # The last axis first, on whole sides where sizes allow it.
    array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return _along_sides(array) if _winds(array) else array


def _winds(array: np.ndarray) -> bool:
    """Returns whether the devices along an axis are no box of a torus, such as a diagonal."""
    names = tuple(map(str, range(array.ndim)))
    spans = (torus_spans(array, names, (name,)) for name in names)
    return any(
        each and math.prod(size for size, _ in each) != n
        for each, n in zip(spans, array.shape, strict=True)
    )


def _along_sides(array: np.ndarray) -> np.ndarray:
    """Returns devices with each axis along a side of their torus, or a part of one, if possible.

    JAX lays the axes of small slices, such as v6e:2x2, on a ring through all devices, so that the
    neighbors along one axis are two links apart, which are those of the other axis.
    """
    coordinates = lambda device: (*device.coords, getattr(device, "core_on_chip", 0))
    devices = sorted(array.flat, key=coordinates)
    sizes = [len(set(column)) for column in zip(*map(coordinates, devices), strict=True)]
    if math.prod(sizes) != array.size:
        return array
    sides = np.array(devices, dtype=object).reshape(sizes)
    ways = itertools.permutations(range(len(sizes) - 1))
    laid = (sides.transpose(*way, -1).reshape(array.shape) for way in ways)
    return next((each for each in laid if not _winds(each)), array)


def torus_spans(
    devices: np.ndarray, axis_names: Sequence[str], axes: Collection[str]
) -> list[tuple[int, int]]:
    """Returns the (size, stride) of a group of devices along each dimension of a torus.

    The dimensions are `coords`, then the core of a chip and the slice. A group has the devices that
    differ along `axes` only. It is a box unless its size differs from the product of the sizes: the
    axes of small slices may wind through the torus. The list is empty for other devices than TPUs.
    """
    if not hasattr(devices.flat[0], "coords"):
        return []
    index = tuple(slice(None) if name in axes else 0 for name in axis_names)
    group = [
        (*device.coords, getattr(device, "core_on_chip", 0), getattr(device, "slice_index", 0))
        for device in np.ravel(devices[index])
    ]
    coordinates = [np.unique(column) for column in np.array(group).T]
    return [(len(at), int(at[1] - at[0]) if len(at) > 1 else 1) for at in coordinates]


def shared_sides(devices: np.ndarray, axis_names: Sequence[str]) -> list[str]:
    """Returns the sides of a torus that several mesh axes share, such as "8 = expert 2 x fsdp 4".

    Along a part of a side, devices have no ring, and half of the links or less. The devices of a
    mesh are those of TPUs; others, and small slices whose axes wind through the torus, have none.
    """
    spans = {name: torus_spans(devices, axis_names, (name,)) for name in axis_names}
    sizes = dict(zip(axis_names, devices.shape, strict=True))
    if any(math.prod(size for size, _ in each) != sizes[name] for name, each in spans.items()):
        return []
    shared = []
    for i, (side, _) in enumerate(torus_spans(devices, axis_names, axis_names)[:-2]):
        parts = [f"{name} {each[i][0]}" for name, each in spans.items() if each[i][0] > 1]
        shared += [f"{side} = {' x '.join(parts)}"] if len(parts) > 1 else []
    return shared


def _hosts_first(
    shape: HybridMeshShape, sizes: Sequence[int], axis_names: Sequence[str]
) -> list[int]:
    """Returns the order of axes in which the devices of each slice are contiguous.

    Raises:
        UserError: If several axes lie both inside and across slices: no order does it then.
    """
    across = [size > 1 for size in shape.dcn]
    inside = [size > outer for size, outer in zip(sizes, shape.dcn, strict=True)]
    both = [name for name, a, b in zip(axis_names, across, inside, strict=True) if a and b]
    if len(both) > 1:
        raise UserError(
            f"mesh_shape: {', '.join(both)} have sizes in both ici and dcn, which on GPUs one axis "
            "at most may have; set ici or dcn of the others to 1."
        )
    return sorted(range(len(sizes)), key=lambda axis: (not across[axis], inside[axis]))


def _hybrid_devices(
    shape: HybridMeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> np.ndarray:
    """Returns the devices of a hybrid mesh, each slice contiguous along every `ici` axis."""
    _check_sizes(shape.dcn, axis_names, "mesh_shape.dcn")
    per_slice = _split_into_slices(shape.dcn, axis_names, devices)
    ici = infer_mesh_shape(
        shape.ici, len(per_slice[0]), axis_names=axis_names, field="mesh_shape.ici (one slice)"
    )
    arranged = np.stack([_laid(ici, each) for each in per_slice]).reshape(*shape.dcn, *ici)
    rank = len(ici)
    interleaved = [axis for i in range(rank) for axis in (i, rank + i)]  # dcn_0, ici_0, dcn_1, ...
    sizes = [outer * inner for outer, inner in zip(shape.dcn, ici, strict=True)]
    return arranged.transpose(interleaved).reshape(sizes)


def _split_into_slices(
    dcn: MeshShape, axis_names: Sequence[str], devices: Sequence[Any]
) -> list[list[Any]]:
    """Returns the devices of each slice, for the number of slices that the `dcn` sizes take."""
    num = math.prod(dcn)
    field = f"mesh_shape.dcn ({describe_mesh(dict(zip(axis_names, dcn, strict=True)))})"
    if min(dcn) < 1:
        raise UserError(f"{field}: sizes are 1 or more; only ici may have a -1.")
    found = slices(devices)
    if found is None:
        found = _split_processes(num, field, devices)
    if len(found) != num:
        raise UserError(
            f"{field} takes {num} slices, but there are {len(found)}; choose sizes with that "
            "product."
        )
    if len({len(each) for each in found}) > 1:
        raise UserError(
            f"{field}: the slices have {', '.join(str(len(each)) for each in found)} devices; a "
            "mesh requires slices of one size."
        )
    return found


def slices(devices: Sequence[Any]) -> list[list[Any]] | None:
    """Returns the devices of each slice, or None if devices do not report their slice."""
    if not hasattr(devices[0], "slice_index"):
        return None
    return _grouped(devices, "process_index" if _are_described_gpus(devices) else "slice_index")


def _are_described_gpus(devices: Sequence[Any]) -> bool:
    """Returns whether the devices are GPUs that belong to no running process."""
    return getattr(devices[0], "platform", None) == "gpu" and all(
        device.local_hardware_id is None for device in devices
    )


def _split_processes(num_slices: int, field: str, devices: Sequence[Any]) -> list[list[Any]]:
    """Returns `num_slices` groups of whole processes, or of equal parts of processes."""
    processes = _grouped(devices, "process_index")
    num = len(processes)
    if len(devices) % num_slices or (num % num_slices and num_slices % num):
        possible = [d for d in _divisors(len(devices)) if not (num % d and d % num)]
        raise UserError(
            f"{field} takes {num_slices} slices, which does not divide the {len(devices)} devices "
            f"of {num} processes; choose a number of slices in {', '.join(map(str, possible))}."
        )
    ordered = [device for process in processes for device in process]
    size = len(devices) // num_slices
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _grouped(devices: Sequence[Any], attribute: str) -> list[list[Any]]:
    """Returns the devices grouped by an attribute, ordered by its value and by id."""
    groups: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: (getattr(device, attribute), device.id)):
        groups.setdefault(getattr(device, attribute), []).append(device)
    return list(groups.values())
