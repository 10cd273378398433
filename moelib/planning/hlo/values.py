"""Values in the text of an HLO instruction: shapes, groups of devices, FLOPs of a matmul."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moelib.planning.hlo.program import Computation, Instruction

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# -- Shapes --------------------------------------------------------------------------------------

_ARRAY = re.compile(r"\b([a-z]+[0-9][0-9a-z]*|pred)\[([0-9,<=]*)\]")
_TILED = re.compile(r"\b([a-z]+[0-9][0-9a-z]*|pred)\[([0-9,]*)\]\{([0-9,]*):T\(([0-9,]+)\)")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4}
_SIZE = re.compile(r"[a-z]+?(\d+)")


def shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape's elements, without padding; the sum for a tuple."""
    total = 0.0
    for dtype, dims in _ARRAY.findall(_LAYOUT.sub("", shape)):
        total += _bits(dtype) / 8 * math.prod(_sizes(dims))
    return math.ceil(total)


def padded_bytes(shape: str) -> int:
    """Returns the bytes of an array in a TPU's tiled layout, with padding; 0 for a tuple."""
    if shape.startswith("("):
        return 0
    if not (found := _TILED.match(shape)):
        return shape_bytes(shape)
    dtype, dims, order, tile = found.groups()
    sizes, tiles = _sizes(dims), _sizes(tile)
    physical = [sizes[axis] for axis in reversed(_sizes(order))]
    physical = [1] * (len(tiles) - len(physical)) + physical
    inside = [-(-size // t) * t for size, t in zip(physical[-len(tiles) :], tiles, strict=True)]
    whole = math.prod(physical[: -len(tiles)]) * math.prod(inside)
    return math.ceil(_bits(dtype) / 8 * whole)


def _bits(dtype: str) -> int:
    """Returns the bits of an element: the first number in a name such as bf16 or f8e4m3fn."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = _SIZE.match(dtype)
    return int(found.group(1)) if found else 0


def _sizes(dims: str) -> list[int]:
    return [int(size.lstrip("<=")) for size in dims.split(",") if size]


def dimensions(shape: str) -> list[int]:
    """Returns the sizes of an array's dimensions, or of the first array of a tuple."""
    found = _ARRAY.search(shape)
    return _sizes(found.group(2)) if found else []


def plain_shape(shape: str) -> str:
    """Returns a shape without layouts, such as bf16[8,128]."""
    return _LAYOUT.sub("", shape)


def layout(shape: str) -> str:
    """Returns the layout of an array, such as {1,0:T(8,128)}, without its memory space."""
    found = _LAYOUT.search(shape)
    return re.sub(r"S\(\d+\)", "", found.group()) if found else ""


def tuple_elements(shape: str, *, layouts: bool = False) -> list[str]:
    """Returns the shapes in a tuple, or the shape itself in a list, without or with layouts."""
    shape = shape if layouts else plain_shape(shape)
    if not shape.startswith("("):
        return [shape]
    elements, depth, begin = [], 0, 1
    for i, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            elements.append(shape[begin:i].strip())
            begin = i + 1
    return [element for element in elements if element]


def result_shape(instruction: Instruction, *, layouts: bool = False) -> str:
    """Returns the shape of the final result of an instruction, also for an asynchronous start.

    `all-gather-start` returns (operands, results, ...), `all-reduce-start` the results only, but
    ((operands), results) on GPUs.
    """
    elements = tuple_elements(instruction.shape, layouts=layouts)
    only_results = instruction.opcode == "all-reduce-start" and not elements[0].startswith("(")
    if instruction.opcode == "recv":
        return elements[0]
    if not instruction.opcode.endswith("-start") or only_results:
        return instruction.shape
    return elements[1] if len(elements) > 1 else instruction.shape


# -- Collectives ---------------------------------------------------------------------------------

# A collective between slices of TPUs is a `send` and a `recv`, which has the result; hosts do it.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_FIRST_GROUP = re.compile(r"_xla_megascale_target=\W*([\d,>-]+)")


def collective_kind(instruction: Instruction) -> str:
    """Returns the kind of the collective that an instruction is or starts; "" for others."""
    kind = instruction.opcode.removesuffix("-start")
    found = _BETWEEN_SLICES.search(instruction.attributes) if kind == "recv" else None
    if found is None:
        return kind if kind in COLLECTIVES else ""
    kind = found.group(1).lower().replace("_", "-")
    return kind if kind in COLLECTIVES else "collective-permute"  # Called one-to-one there.


def group_of(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes of a collective and its devices per group.

    Between slices of TPUs, returns ("network",) and the number of slices: XLA writes ids of devices
    for their hosts there, not indices in the mesh.
    """
    if instruction.opcode == "recv":
        found = _FIRST_GROUP.search(instruction.attributes)
        ids = map(int, re.findall(r"\d+", found.group(1) if found else ""))
        # Ids of slices; or of devices, which begin with that of the slice.
        return ("network",), max(len({each // 100_000 or each for each in ids}), 1)
    groups = device_groups(instruction) or [range(math.prod(mesh.values()))]
    return axes_of_groups(groups, mesh), len(groups[0])


_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def device_groups(instruction: Instruction) -> list[list[int]]:
    """Returns the groups of devices of a collective, as indices in the mesh; [] stands for all.

    HLO writes them as `{{0,1},{2,3}}`, as `[2,2]<=[4]T(1,0)` with an optional transposition, or by
    axes or parts of axes as `mesh['a'=2,'b'=4] {'b'}` and `'b':(1)2`. Pairs of a permutation are
    groups of two.
    """
    if found := _MESH_GROUPS.search(instruction.attributes):
        return _groups_along_axes(*found.groups())
    text = instruction.attribute("replica_groups") or instruction.attribute("source_target_pairs")
    if found := _IOTA.match(text):
        return _iota(found).tolist()
    groups = re.findall(r"\{([\d,\s]+)\}", text)
    return [[int(device) for device in group.split(",")] for group in groups]


def _iota(found: re.Match[str]) -> np.ndarray:
    """Returns the devices of `[shape]<=[sizes]T(order)`."""
    shape, sizes, order = (_sizes(part or "") for part in found.groups())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(order or None).reshape(shape)


def _groups_along_axes(mesh: str, order: str, group: str) -> list[list[int]]:
    """Returns the groups of devices that differ only along the axes named in `group`.

    Args:
        mesh: Axes of the mesh, such as `'a'=2,'b'=4`.
        order: Text with the order of its devices, such as `[2,4]<=[4,2]T(1,0)`, if any.
        group: Axes, or parts of axes: `'b':(2)2` has size 2 inside an outer part of size 2.
    """
    chosen = {name: (pre, size) for name, pre, size in _GROUP_AXIS.findall(group)}
    sizes: list[int] = []
    along: list[int] = []
    for name, text in _MESH_AXIS.findall(mesh):
        whole = int(text)
        pre, size = chosen.get(name, ("1", "1"))
        first, inner = int(pre or 1), int(size or whole)
        along += [len(sizes) + 1] if name in chosen else []
        sizes += [first, inner, whole // (first * inner)]
    found = _IOTA.search(order)
    ids = _iota(found) if found else np.arange(math.prod(sizes))
    ids = np.moveaxis(ids.reshape(sizes), along, range(-len(along), 0))
    return ids.reshape(-1, math.prod(sizes[axis] for axis in along)).tolist()


def axes_of_groups(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh along which the devices of a group differ.

    Groups hold indices in the mesh, whose axes are given outermost first. No groups stand for one
    group of all devices.
    """
    sizes = tuple(mesh.values())
    groups = groups or [range(math.prod(sizes))]
    varying = set[int]()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group), sizes))
        varying |= set(np.flatnonzero(np.ptp(coordinates, axis=1)).tolist())
    return tuple(name for i, name in enumerate(mesh) if i in varying)


# -- Matmuls -------------------------------------------------------------------------------------

_CUBLAS_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def is_matmul(instruction: Instruction) -> bool:
    """Returns whether an instruction is a matmul of XLA, or a call of cuBLAS."""
    if instruction.opcode == "custom-call":
        return 'custom_call_target="__cublas$' in instruction.attributes
    return instruction.opcode in ("convolution", "dot")


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Returns the FLOPs of one run of a matmul: two per multiplication.

    On TPUs every matmul is a convolution. Taps on padding, or between the elements of a dilated
    operand, multiply nothing and do not count.
    """
    operands = [computation.instructions.get(name) for name in instruction.operands[:2]]
    if len(operands) < 2 or None in operands:
        return 0
    lhs, rhs = (dimensions(operand.shape) for operand in operands if operand is not None)
    out = dimensions(instruction.shape)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        contracted = contracted or _CUBLAS_CONTRACTED.search(instruction.attributes)
        axes = _sizes(contracted.group(1).replace('"', "")) if contracted else []
        return 2 * math.prod(out) * math.prod(lhs[axis] for axis in axes)
    of_lhs, of_rhs, of_out = labels.groups()
    products = out[of_out.index("b")] * out[of_out.index("f")] * rhs[of_rhs.index("i")]
    num_spatial = sum(letter.isdigit() for letter in of_rhs)
    for i, window in enumerate(_windows(instruction.attributes, num_spatial)):
        products *= _taps(lhs[of_lhs.index(str(i))], out[of_out.index(str(i))], *window)
    return 2 * products


# Settings of a window, and their defaults.
_WINDOW = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}


def _windows(attributes: str, num: int) -> Iterator[tuple[int, ...]]:
    """Returns the settings of `_WINDOW`, with the low padding, per spatial dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in found.group(1).split()) if found else {}
    rows = (
        [int(text.partition("_")[0]) for text in parts[key].split("x")]
        if key in parts
        else [default] * num
        for key, default in _WINDOW.items()
    )
    return zip(*rows, strict=True)


def _taps(
    num_in: int, num_out: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Returns the number of (output, tap) pairs of one dimension that meet an input element."""
    index = np.arange(num_out)[:, None] * stride + np.arange(size) * rhs_dilate - pad
    inside = (index >= 0) & (index <= (num_in - 1) * lhs_dilate)
    return int(np.count_nonzero(inside & (index % lhs_dilate == 0)))
