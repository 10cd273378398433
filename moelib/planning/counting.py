"""Counts what is in a compiled training step.

Everything is of one step on one device, counted in the optimized HLO with the trip counts of loops
multiplied out, or read from `memory_analysis()`. `cost_analysis()` is not used: it counts the body
of a loop once.

Cycles are the compiler's own estimates, not measurements: the sum of `estimated_cycles` over the
instructions outside fused computations (a fusion's own estimate is of all it holds), times how
often they run. The compiler has no estimate for Pallas kernels and collectives, so both are left
out. Figures of other programs that were summed in the same way can stand beside ours.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from moelib.planning import hlo, hlo_values
from moelib.planning.hlo import Computation, Instruction, Program
from moelib.planning.hlo_places import Places
from moelib.planning.report import (
    COLLECTIVES,
    SMALL_BYTES,
    Collective,
    Costly,
    Kernel,
    Memory,
    Operation,
    Seconds,
    Source,
    StepReport,
)

OPERATIONS = ("copy", "transpose", "sort", "gather", "scatter")
_NO_SECONDS = Seconds()


def step_report(
    compiled: Any,
    *,
    name: str,
    topology: str,
    mesh: Mapping[str, int],
    rows_routed: int | None = None,
    seconds: Seconds = _NO_SECONDS,
    num_costliest: int = 20,
) -> StepReport:
    """Returns the report of a `jax.stages.Compiled`.

    Args:
        compiled: The step.
        name: What it is.
        topology: What it was compiled for.
        mesh: Sizes of the mesh's axes, outermost first.
        rows_routed: Rows that reach a device's experts if routing is balanced.
        seconds: What compiling took.
        num_costliest: How many instructions to list.
    """
    text = compiled.as_text()
    program = hlo.parse(text)
    cycles = _cycles(program, Places(text))
    return StepReport(
        name=name,
        topology=topology,
        mesh=dict(mesh),
        memory=_memory(compiled.memory_analysis()),
        cycles=sum(each.cycles for each in cycles),
        sources=_sources(cycles),
        costliest=tuple(cycles[:num_costliest]),
        collectives=_collectives(program, mesh),
        kernels=_kernels(program),
        operations=tuple(_operation(program, opcode) for opcode in OPERATIONS),
        matmul_flops=_matmul_flops(program),
        **_counts(program),
        rows_routed=rows_routed,
        loops_of_unknown_length=program.loops_of_unknown_length,
        seconds=seconds,
    )


def _memory(analysis: Any) -> Memory:
    peak = analysis.peak_memory_in_bytes
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    if host:  # It is in the peak, too; what is allocated on the device is the closest bound.
        kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        peak = analysis.argument_size_in_bytes + kept + analysis.temp_size_in_bytes
    return Memory(
        peak=peak,
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        host=host,
    )


def _cycles(program: Program, places: Places) -> list[Costly]:
    """Returns what has an estimate, costliest first."""
    found = [
        Costly(
            name=each.name,
            opcode=each.opcode,
            shape=hlo_values.plain_shape(each.shape),
            op_name=each.op_name,
            source=_source(places, each),
            places=tuple(str(place) for place in places.stack(each)),
            executions=computation.executions,
            cycles=each.cycles * computation.executions,
        )
        for computation, each in program.instructions()
        if not computation.fused and each.cycles and computation.executions
    ]
    return sorted(found, key=lambda each: (-each.cycles, each.name))


def _source(places: Places, instruction: Instruction) -> str:
    """Returns the function that made an instruction, and in which pass; else the opcode.

    `again` is what the backward pass computes again of the forward pass.
    """
    name = instruction.op_name
    when = "again " if "rematted_computation" in name else ""
    when = when or ("backward " if "transpose(" in name else "")
    if stack := places.stack(instruction, 1):
        return f"{when}{stack[0].file} {stack[0].function}"
    return f"{when}({instruction.opcode}) {name.rpartition('/')[2]}".rstrip()


def _sources(costly: Iterable[Costly]) -> tuple[Source, ...]:
    cycles, counts = collections.Counter[str](), collections.Counter[str]()
    for each in costly:
        cycles[each.source] += each.cycles
        counts[each.source] += 1
    return tuple(Source(name, total, counts[name]) for name, total in cycles.most_common())


def _collectives(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    rows: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for computation, each in program.instructions():
        kind = each.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or not computation.executions:
            continue
        groups = hlo_values.device_groups(each)
        size = len(groups[0]) if groups else math.prod(mesh.values())
        key = kind, hlo_values.axes_of_groups(groups, mesh), size
        _add_collective(rows.setdefault(key, collections.Counter()), computation, each)
    order = sorted(rows, key=lambda key: (COLLECTIVES.index(key[0]), -rows[key]["bytes"]))
    return tuple(Collective(*key, **rows[key]) for key in order)


def _add_collective(
    row: collections.Counter[str], computation: Computation, instruction: Instruction
) -> None:
    result = hlo_values.shape_bytes(hlo_values.result_shape(instruction))
    beside = computation.asynchronous or instruction.opcode.endswith("-start")
    small = result <= SMALL_BYTES
    row["count"] += 1
    row["asynchronous"] += beside
    row["small"] += small
    row["small_asynchronous"] += small and beside
    row["executions"] += computation.executions
    row["bytes"] += result * computation.executions


_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"', re.DOTALL)


def _kernels(program: Program) -> tuple[Kernel, ...]:
    rows: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for computation, each in program.instructions():
        if each.opcode != "custom-call" or '"tpu_custom_call"' not in each.attributes:
            continue
        if not computation.executions:
            continue
        key = _kernel_name(each), *(_said(each, k) for k in ("rows", "groups", "rows_at_once"))
        row = rows.setdefault(key, collections.Counter())
        estimate = _ESTIMATE.search(each.attributes)
        flops, read = map(int, estimate.groups()) if estimate else (0, 0)
        row["count"] += 1
        row["without_estimate"] += estimate is None
        row["executions"] += computation.executions
        row["flops"] += flops * computation.executions
        row["bytes"] += read * computation.executions
    return tuple(
        Kernel(name, **rows[key], rows=key[1], groups=key[2], rows_at_once=key[3])
        for key in sorted(rows)
        for name in key[:1]
    )


def _kernel_name(instruction: Instruction) -> str:
    """Returns what `pallas_call` was given as a name, else the instruction's."""
    if found := re.search(r'kernel_name[\\"]*[:=]\s*[\\"]*([\w.\-]+)', instruction.attributes):
        return found.group(1)
    path = instruction.op_name.split("/")
    if len(path) > 1 and path[-1] == "pallas_call" and "(" not in path[-2]:
        return path[-2]
    return re.sub(r"[.\d]*$", "", instruction.name)


def _said(instruction: Instruction, key: str) -> int:
    """Returns a number in a kernel's metadata; 0 without."""
    found = re.search(rf'"{key}":"(\d+)"', instruction.attribute("frontend_attributes"))
    return int(found.group(1)) if found else 0


def _operation(program: Program, opcode: str) -> Operation:
    found = [(c, each) for c, each in program.instructions() if each.opcode == opcode]
    alone = [(c, each) for c, each in found if not c.fused]
    return Operation(
        opcode=opcode,
        count=len(found),
        executions=sum(c.executions for c, _ in found),
        bytes=sum(hlo_values.shape_bytes(each.shape) * c.executions for c, each in alone),
    )


def _matmul_flops(program: Program) -> int:
    return sum(
        hlo_values.matmul_flops(each, computation) * computation.executions
        for computation, each in program.instructions()
        if each.opcode in ("convolution", "dot")
    )


def _counts(program: Program) -> Mapping[str, Any]:
    alone = [(c, each) for c, each in program.instructions() if not c.fused]
    fusions = [c for c, each in alone if each.opcode == "fusion"]
    return {
        "fusions": len(fusions),
        "fusion_executions": sum(c.executions for c in fusions),
        "instructions": sum(1 for _ in program.instructions()),
        "instructions_outside_fusions": len(alone),
    }
