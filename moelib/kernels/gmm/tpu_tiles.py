"""Tiles of the TPU's grouped matmul: which fit the VMEM, how long they take, and the choice.

Times and bytes follow from the chip's published figures; nothing is measured. Tests compile the
tiles chosen for every generation, so `vmem_bytes` is known to be no less than a kernel needs.

Shapes: m rows, k in, n out, g groups.
"""

import dataclasses
import functools
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

_LANES = 128
MAX_COLUMNS = 512  # Multiplied at once: a kernel's code is as long as its largest product is wide.
_STEP_SECONDS = 0.35e-6  # Fixed cost of a grid step.
_WEIGHT_ROWS = 128  # Loading a block of weights into the MXU takes as long as this many rows.


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's blocks."""

    m: int
    k: int
    n: int
    sub_m: int  # Divides m: rows multiplied at once in a tile that groups share.


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes of a grouped matmul. For the weight gradient, k and n are the sides of its result."""

    m: int
    k: int
    n: int
    g: int
    dtype_bytes: int  # Bytes of an element of the operands and of the result.
    parts: int = 1  # Matrices per group, whose products one activation joins.
    saves: bool = False  # Whether the products are written too.
    num_lhs: int = 1  # Arrays of rows: one, or one per part.
    weight_gradient: bool = False

    @property
    def num_outs(self) -> int:
        """Number of arrays [m, n] that are written."""
        return 1 + (self.parts if self.saves else 0)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one TensorCore."""

    vmem_bytes: int
    flops_per_second: float  # Peak in bfloat16.
    bytes_per_second: float  # Bandwidth of HBM.
    num_cores: int = 1  # TensorCores that share one kernel.


# Figures for an unknown chip: tiles fit all chips from v5e on.
_ANY_CHIP = Chip(64 * 2**20, 9.2e14, 1.64e12, 1)


def current_chip() -> Chip:
    """Returns the chip of the mesh in context, else of the default device.

    If that is no TPU (a program is compiled for one elsewhere, and no mesh is set), it is a chip
    with the least VMEM from v5e on.
    """
    try:
        info = pltpu.get_tpu_info()
    except (ValueError, RuntimeError):
        return _ANY_CHIP
    return Chip(
        info.vmem_capacity_bytes,
        float(info.bf16_ops_per_second),
        float(info.mem_bw_bytes_per_second),
        info.num_cores,
    )


def vmem_bytes(job: Job, tiles: Tiles) -> int:
    """Returns an upper bound of a kernel's VMEM.

    Blocks that are read or written are held twice, the next and the current one; rows are copied
    where they are multiplied. A product is held in float32 before it is added or stored, and so are
    two arrays of an activation's columns.
    """
    tm, tk, tn = tiles.m, _padded(tiles.k), _padded(tiles.n)
    if job.weight_gradient:
        rows = tm * (tk + job.parts * tn) * job.dtype_bytes
        blocks = 2 * (rows + tk * tn * job.dtype_bytes)
        # The sum and a product, and lhs transposed.
        return blocks + 2 * tk * tn * 4 + tm * tk * job.dtype_bytes + _SPARE
    read = job.num_lhs * tm * tk + job.parts * tk * tn
    blocks = 2 * (read + job.num_outs * tm * tn) * job.dtype_bytes
    held = job.parts * (1 if tiles.k >= job.k else 2) * tn
    held += 2 * min(tn, MAX_COLUMNS) if job.parts > 1 else 0
    return blocks + job.num_lhs * tm * tk * job.dtype_bytes + held * tm * 4 + _SPARE


_SPARE = 2**20  # For masks and registers that spill.


def modelled_seconds(job: Job, tiles: Tiles, chip: Chip) -> float:
    """Returns a kernel's time for groups of one size that begin anywhere.

    In each visit the MXU works while the next visit's blocks are fetched, so a visit takes the
    longer of the two; nothing hides the first fetch and the last store.
    """
    rows = job.m / job.g  # Rows of a group.
    visits = job.g * (max(rows - 1, 0) / tiles.m + 1)
    fetched = (visits - job.g) if tiles.k >= job.k or job.weight_gradient else 0
    passed = job.g * _rows_through_mxu(rows, tiles)
    tk, tn = _padded(tiles.k), _padded(tiles.n)
    peak = chip.flops_per_second * (1 if job.dtype_bytes <= 2 else 1 / 6)
    tiles_k, tiles_n = -(-job.k // tiles.k), -(-job.n // tiles.n)
    multiply = 2 * passed * tk * tn * job.parts / peak / visits  # One visit, one (k, n) tile.
    tiles_m = min(visits, -(-job.m // tiles.m))
    if job.weight_gradient:
        return _weight_seconds(job, tiles, chip, visits, multiply) / _cores(chip, tiles_k)
    matrix = job.parts * tk * tn * job.dtype_bytes / chip.bytes_per_second
    once = tiles_m / visits if tiles_k == 1 else 1.0  # A tile of rows stays between its visits.
    rows_in = once * job.num_lhs * tiles.m * tk * job.dtype_bytes / chip.bytes_per_second
    rows_out = tiles_m / visits * tiles.m * tn * job.dtype_bytes * job.num_outs
    rows_out /= chip.bytes_per_second * tiles_k
    stay = max(multiply, rows_in + rows_out) + _STEP_SECONDS
    change = max(multiply, matrix + rows_in + rows_out) + _STEP_SECONDS
    seconds = tiles_n * tiles_k * (fetched * stay + (visits - fetched) * change)
    return seconds / _cores(chip, tiles_n) + matrix + rows_in


def _rows_through_mxu(rows: float, tiles: Tiles) -> float:
    """Returns the rows of a group that pass the MXU, loading its weights counted as rows."""
    full = max(rows - tiles.m + 1, 0) / tiles.m  # Tiles whose rows all belong to the group.
    shared = max(rows - 1, 0) / tiles.m + 1 - full
    blocks = max(rows - 1, 0) / tiles.sub_m + 1 - full * (tiles.m // tiles.sub_m)
    # Blocks go in pairs, so half of the time one remains.
    waits = shared / 2 * max(_WEIGHT_ROWS - tiles.sub_m, 0)
    return full * max(tiles.m, _WEIGHT_ROWS) + blocks * tiles.sub_m + waits


def _weight_seconds(job: Job, tiles: Tiles, chip: Chip, visits: float, multiply: float) -> float:
    tk, tn = _padded(tiles.k), _padded(tiles.n)
    tiles_k, tiles_n = -(-job.k // tiles.k), -(-job.n // tiles.n)
    rows_in = tiles.m * (tk + tn) * job.dtype_bytes / chip.bytes_per_second
    matrix = tk * tn * job.dtype_bytes / chip.bytes_per_second
    stay = max(multiply, rows_in) + _STEP_SECONDS
    change = max(multiply, rows_in + matrix) + _STEP_SECONDS
    return tiles_k * tiles_n * ((visits - job.g) * stay + job.g * change) + rows_in + matrix


def _cores(chip: Chip, parallel: int) -> float:
    """Returns the average number of busy cores in a dimension of `parallel` independent tiles."""
    return parallel / -(-parallel // chip.num_cores)


def candidates(job: Job) -> Iterator[Tiles]:
    """Yields the tiles that the kernels' layout allows, whatever VMEM they take.

    The last two dimensions of a block are multiples of (16, 128), or the array's own.
    """
    rows = 16
    while rows < min(job.m, 512):
        rows *= 2
    for m in sorted({rows, max(rows // 2, 16), max(rows // 4, 16)}):
        for k in _sides(job.k):
            for n in _sides(job.n):
                yield Tiles(m, k, n, min(m, 64))


def _sides(size: int) -> list[int]:
    """Returns the size itself, and smaller multiples of 128 whose last tile has little padding.

    They divide a size that is a multiple of 128.
    """
    sides = {size, min(size, _LANES)}
    for parts in range(2, min(size // _LANES, 32) + 1):
        side = -(-size // (parts * _LANES)) * _LANES
        if size % _LANES or size % side == 0:
            sides.add(side)
    return sorted(sides, reverse=True)


@functools.lru_cache(maxsize=512)
def choose(job: Job, chip: Chip) -> Tiles:
    """Returns the tiles of least modelled time among those that fit half of the chip's VMEM.

    The other half is for buffers that XLA keeps there and for its transfers in flight.
    """
    limit = chip.vmem_bytes // 2
    fitting = [tiles for tiles in candidates(job) if vmem_bytes(job, tiles) <= limit]
    assert fitting, "Tiles of 128 by 128 fit every chip."
    return min(fitting, key=lambda tiles: modelled_seconds(job, tiles, chip))


def _padded(side: int) -> int:
    return -(-side // _LANES) * _LANES
