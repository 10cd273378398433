"""Tiles of the Hopper GPU's grouped matmul: which fit the shared memory, and the choice.

Times follow from the chip's published figures; nothing is measured.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import dataclasses
import functools

from moelib.kernels.hopper import ROW_BYTES, SIDE, SMEM_BYTES

_SPARE_BYTES = 1024  # For barriers.
_OUT_SLOTS = 2
_FLOPS_PER_CYCLE = 4096  # One SM's tensor cores, in 16-bit floats.
_BYTES_PER_CYCLE = 64  # From L2 to one SM.


@dataclasses.dataclass(frozen=True)
class GpuTiles:
    """Sizes of the blocks of one block of threads: two warpgroups multiply, a third one loads.

    With 128 rows each of the two takes 64 of them; with 64, each takes half of the columns.
    """

    m: int  # 64 or 128. For the weight gradient, rows of its result: 128.
    n: int  # A multiple of 64; of 128 if m is 64.
    stages: int  # Steps whose operands are loaded, or in flight, at a time.

    @property
    def halves(self) -> int:
        """Number of warpgroups that share the rows: 2, or 1 if they share the columns."""
        return self.m // SIDE

    @property
    def wide(self) -> int:
        """Number of columns that one warpgroup multiplies."""
        return self.n if self.halves == 2 else self.n // 2


def stage_bytes(m: int, n: int) -> int:
    """Returns the shared memory of one stage: 64 columns of m + n rows."""
    return (m + n) * SIDE * 2


def smem_bytes(tiles: GpuTiles) -> int:
    """Returns an upper bound of a kernel's shared memory.

    It holds the stages, two slots of 64 rows of 128 bytes for each of two warpgroups, through which
    results leave, and barriers.
    """
    out = 2 * _OUT_SLOTS * SIDE * ROW_BYTES
    return tiles.stages * stage_bytes(tiles.m, tiles.n) + out + _SPARE_BYTES


def _with_stages(m: int, n: int) -> GpuTiles:
    least = smem_bytes(GpuTiles(m, n, 0))
    return GpuTiles(m, n, min((SMEM_BYTES - least) // stage_bytes(m, n), 8))


def modelled_cycles(tiles: GpuTiles, num_tiles: int, steps: int, num_sms: int) -> float:
    """Returns the cycles of all tiles, in rounds of one tile per SM, each of `steps` steps.

    A step of 64 takes the longer of 2 * 64 * m * n floating-point operations at 4096 per cycle, and
    of 2 * 64 * (m + n) bytes at 64 per cycle; then the tile leaves, in chunks of some 250 cycles
    each, which are converted, written to shared memory and handed to the copy engine.
    """
    multiply = 2 * SIDE * tiles.m * tiles.n / _FLOPS_PER_CYCLE
    load = stage_bytes(tiles.m, tiles.n) / _BYTES_PER_CYCLE
    leave = 250 * -(-tiles.wide // SIDE) + 500
    return -(-num_tiles // num_sms) * (steps * max(multiply, load) + leave)


@functools.lru_cache(maxsize=512)
def choose(m: int, k: int, n: int, g: int, num_sms: int) -> GpuTiles:
    """Returns the tiles of least modelled time for rows times matrices.

    Each group's rows begin a tile of their own, so a group of m / g rows has ceil(m / g / tiles.m)
    of them, for each of ceil(n / tiles.n) tiles of columns, and each takes ceil(k / 64) steps.
    128 x 256 is best for large groups: 1024 cycles of multiplying hide the 768 of loading. With 64
    rows or fewer in a group, 64 x 256 takes 640 instead of 1024. As many stages as fit, up to 8:
    for 128 x 256, of 48 KiB each, there are 4 in 192 of 227 KiB.
    """
    rows = -(-m // g)

    def cycles(tiles: GpuTiles) -> float:
        num_tiles = g * -(-rows // tiles.m) * -(-n // tiles.n)
        return modelled_cycles(tiles, num_tiles, -(-k // SIDE), num_sms)

    sides = [(128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128)]
    return min((_with_stages(*side) for side in sides), key=cycles)


@functools.lru_cache(maxsize=512)
def choose_for_gradient(m: int, k: int, n: int, g: int, p: int, num_sms: int) -> GpuTiles:
    """Returns the tiles of least modelled time for the weight gradient [g, p, k, n].

    Each group has p * ceil(k / 128) * ceil(n / tiles.n) tiles of ceil(m / g / 64) steps.
    """

    def cycles(tiles: GpuTiles) -> float:
        num_tiles = g * p * -(-k // tiles.m) * -(-n // tiles.n)
        return modelled_cycles(tiles, num_tiles, -(-m // (g * SIDE)), num_sms)

    return min((_with_stages(128, side) for side in (256, 192, 128, 64)), key=cycles)
