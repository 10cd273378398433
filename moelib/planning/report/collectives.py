"""The collectives of a compiled step, by mesh axes and by groups of devices."""

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.values import COLLECTIVES
from moelib.planning.report.step_report import SMALL_BYTES, Collective, CollectiveGroups

_MAX_GROUPS = 8  # Groups of devices that are written out.


def collective_instructions(program: Program) -> Iterator[tuple[str, Computation, Instruction]]:
    """Yields (kind, computation, instruction) of each executed collective."""
    for computation, each in program.instructions():
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES and computation.executions:
            yield kind, computation, each


def is_asynchronous(computation: Computation, instruction: Instruction) -> bool:
    """Returns whether a collective overlaps with other work."""
    return computation.asynchronous or instruction.is_async_start


def result_bytes(instruction: Instruction) -> int:
    """Returns the bytes of a collective's result."""
    return values.shape_bytes(values.result_shape(instruction))


def collectives_by_axes(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Returns the collectives by kind and mesh axes."""

    def key(groups: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        return values.axes_of_groups(groups, mesh), len(groups[0])

    return tuple(Collective(*row, **sums) for row, sums in _summed(program, mesh, key))


def collectives_by_groups(
    program: Program, mesh: Mapping[str, int], slices: Sequence[int] = ()
) -> tuple[CollectiveGroups, ...]:
    """Returns the collectives by kind and groups of devices; arguments as in `count.count`."""

    def key(groups: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        across = bool(slices) and any(len({slices[i] for i in group}) > 1 for group in groups)
        return _written(groups), "network" if across else "slice"

    counted = ("count", "executions", "bytes")
    return tuple(
        CollectiveGroups(*row, **{name: sums[name] for name in counted})
        for row, sums in _summed(program, mesh, key)
    )


def _summed(
    program: Program,
    mesh: Mapping[str, int],
    key: Callable[[Sequence[Sequence[int]]], tuple[Any, ...]],
) -> list[tuple[tuple[Any, ...], dict[str, int]]]:
    """Returns sums by kind and by a key of the groups, in the order of kinds and bytes."""
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for kind, computation, each in collective_instructions(program):
        groups = values.device_groups(each) or [list(range(math.prod(mesh.values())))]
        size, overlaps = result_bytes(each), is_asynchronous(computation, each)
        small = size <= SMALL_BYTES
        row = rows.setdefault((kind, *key(groups)), collections.defaultdict(float))
        row["count"] += 1
        row["asynchronous"] += overlaps
        row["small"] += small
        row["small_asynchronous"] += small and overlaps
        row["executions"] += computation.executions
        row["bytes"] += size * computation.executions
    sums = [(k, {name: round(x) for name, x in row.items()}) for k, row in rows.items()]
    return sorted(sums, key=lambda row: (COLLECTIVES.index(row[0][0]), -row[1]["bytes"]))


def _written(groups: Sequence[Sequence[int]]) -> str:
    """Returns groups as "0,1 | 2,3"; the first ones and the number of others if there are many."""
    shown = [",".join(map(str, group)) for group in groups[:_MAX_GROUPS]]
    more = len(groups) - _MAX_GROUPS
    return " | ".join(shown) + (f" and {more} more" if more > 0 else "")
