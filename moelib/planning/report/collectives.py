"""The collectives of a compiled step, by mesh axes."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.values import COLLECTIVES
from moelib.planning.report.step_report import SMALL_BYTES, Collective


def collective_instructions(program: Program) -> Iterator[tuple[str, Computation, Instruction]]:
    """Yields (kind, computation, instruction) of each executed collective."""
    for computation, each in program.instructions():
        if (kind := values.collective_kind(each)) and computation.executions:
            yield kind, computation, each


def result_bytes(instruction: Instruction) -> int:
    """Returns the bytes of a collective's result."""
    return values.shape_bytes(values.result_shape(instruction))


def collectives_by_axes(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Returns the collectives by kind and mesh axes, in the order of kinds and bytes."""
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for kind, computation, each in collective_instructions(program):
        size, overlaps = result_bytes(each), computation.asynchronous or each.is_async_start
        small = size <= SMALL_BYTES
        key = kind, *values.group_of(each, mesh)
        row = rows.setdefault(key, collections.defaultdict(float))
        row["count"] += 1
        row["asynchronous"] += overlaps
        row["small"] += small
        row["small_asynchronous"] += small and overlaps
        row["executions"] += computation.executions
        row["bytes"] += size * computation.executions
    found = [
        Collective(*k, **{name: round(x) for name, x in row.items()}) for k, row in rows.items()
    ]
    return sorted(found, key=lambda row: (COLLECTIVES.index(row.kind), -row.bytes))
