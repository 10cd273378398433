"""What a compiled step sends: its collectives, by mesh axes and by groups of devices."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moelib.planning.hlo import values as hlo_values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.report.step_report import (
    COLLECTIVES,
    SMALL_BYTES,
    Collective,
    CollectiveGroups,
)

_SHOWN = 8  # Groups that are written out.


def collective_instructions(program: Program) -> Iterator[tuple[str, Computation, Instruction]]:
    """Yields (kind, computation, instruction) of each collective that a step runs."""
    for computation, each in program.instructions():
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES and computation.executions:
            yield kind, computation, each


def runs_beside(computation: Computation, instruction: Instruction) -> bool:
    """Returns whether a collective runs beside other work."""
    return computation.asynchronous or instruction.starts


def sent_bytes(instruction: Instruction) -> int:
    """Returns the bytes of a collective's result."""
    return hlo_values.shape_bytes(hlo_values.result_shape(instruction))


def collectives(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Returns what a step sends by kind and by the mesh axes along which it is sent."""
    rows: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for kind, computation, each in collective_instructions(program):
        groups = hlo_values.device_groups(each)
        size = len(groups[0]) if groups else math.prod(mesh.values())
        key = kind, hlo_values.axes_of_groups(groups, mesh), size
        row = rows.setdefault(key, collections.Counter())
        result, beside = sent_bytes(each), runs_beside(computation, each)
        small = result <= SMALL_BYTES
        row["count"] += 1
        row["asynchronous"] += beside
        row["small"] += small
        row["small_asynchronous"] += small and beside
        row["executions"] += computation.executions
        row["bytes"] += result * computation.executions
    order = sorted(rows, key=lambda key: (COLLECTIVES.index(key[0]), -rows[key]["bytes"]))
    return tuple(Collective(*key, **rows[key]) for key in order)


def collective_groups(
    program: Program, mesh: Mapping[str, int], slices: Sequence[int] = ()
) -> tuple[CollectiveGroups, ...]:
    """Returns what a step sends by kind and by the groups of devices among which it is sent.

    Args:
        program: The step.
        mesh: Sizes of the mesh's axes, outermost first.
        slices: The slice of each device of the mesh, in its order; by default all are in one.
    """
    rows: dict[tuple[str, str, str], collections.Counter[str]] = {}
    for kind, computation, each in collective_instructions(program):
        groups = hlo_values.device_groups(each) or [list(range(math.prod(mesh.values())))]
        across = bool(slices) and any(len({slices[i] for i in group}) > 1 for group in groups)
        key = kind, _written(groups), "network" if across else "slice"
        row = rows.setdefault(key, collections.Counter())
        row["count"] += 1
        row["executions"] += computation.executions
        row["bytes"] += sent_bytes(each) * computation.executions
    order = sorted(rows, key=lambda key: (COLLECTIVES.index(key[0]), -rows[key]["bytes"]))
    return tuple(CollectiveGroups(*key, **rows[key]) for key in order)


def _written(groups: Sequence[Sequence[int]]) -> str:
    """Returns "0,1 | 2,3"; of many groups the first, and how many more there are."""
    shown = [",".join(map(str, group)) for group in groups[:_SHOWN]]
    more = len(groups) - _SHOWN
    return " | ".join(shown) + (f" and {more} more" if more > 0 else "")
