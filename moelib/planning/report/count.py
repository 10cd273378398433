"""Counts of a compiled training step.

All counts are per step and device, from the optimized HLO with the trip counts of loops, or from
`memory_analysis()`. `cost_analysis()` is not used, because it counts the body of a loop once.

Cycles are the compiler's estimates, not measurements: the sum of `estimated_cycles` over the
instructions outside fused computations (the estimate of a fusion includes its contents), times
their executions. The compiler has no estimate for Pallas kernels and collectives, which therefore
do not count. Other programs can be compared if their cycles are summed in the same way.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import SourceMap, phase
from moelib.planning.report.collectives import collectives_by_axes
from moelib.planning.report.fusions import fusions_by_kind, instructions_inside, phase_of
from moelib.planning.report.kernels import kernels
from moelib.planning.report.step_report import SMALL_BYTES, Collective, Kernel, Row

OPERATIONS = ("copy", "transpose", "sort", "gather", "scatter")
_MAX_COSTLIEST = 200  # Instructions in a report.


def count(
    compiled: Any,
    program: Program,
    mesh: Mapping[str, int],
    *,
    rows_routed: int | None = None,
    model_flops: int = 0,
) -> dict[str, Any]:
    """Returns the fields of a `StepReport` that a compiled program decides.

    Args:
        compiled: A `jax.stages.Compiled`.
        program: Program parsed from its text.
        mesh: Sizes of the mesh axes, outermost first.
        rows_routed: Assigned rows of a grouped matmul; None if unknown.
        model_flops: FLOPs by the model's own count; 0 if unknown.
    """
    costly = _costly(program, SourceMap(compiled.as_text()))
    unfused = [(c, each) for c, each in program.instructions() if not c.fused]
    fusions = [c for c, each in unfused if each.is_fusion]
    sent, calls = collectives_by_axes(program, mesh), kernels(program)
    matmuls, of_kernels = matmul_flops(program), sum(each.flops for each in calls)
    # Recomputation, unfilled rows of grouped matmuls and masked attention raise the ratio.
    ratio = (matmuls + of_kernels) / model_flops if model_flops else None
    figures = {
        **_memory(compiled.memory_analysis()),
        **_collective_figures(sent),
        # GPU compilers do not estimate cycles.
        "cycles": sum(each["cycles"] for each in costly) or None,
        "matmul_flops": matmuls,
        "kernel_flops": of_kernels,
        "kernel_bytes": sum(each.bytes for each in calls),
        "model_flops": model_flops or None,
        "executed_over_model_flops": ratio,
        "rows_computed_over_routed": rows_computed_over_routed(calls, rows_routed),
        "fusions": len(fusions),
        "fusion_executions": round(sum(c.executions for c in fusions)),
        "instructions": sum(1 for _ in program.instructions()),
        "instructions_outside_fusions": len(unfused),
        **_operation_figures(program),
    }
    return {
        "figures": {key: value for key, value in figures.items() if value is not None},
        "collectives": sent,
        "kernels": calls,
        "loops_of_unknown_length": program.loops_of_unknown_length,
        "fusions": fusions_by_kind(program),
        "cycles": _cycles(program),
        "sources": _sources(costly),
        "costliest": costly[:_MAX_COSTLIEST],
    }


def _memory(analysis: Any) -> dict[str, int]:
    peak, temporaries = analysis.peak_memory_in_bytes, analysis.temp_size_in_bytes
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    permanent = analysis.argument_size_in_bytes + new_outputs
    # The peak includes the host's memory, and that of a CPU excludes temporaries: the allocations
    # on the device are then the closest bound.
    if host or peak - permanent < min(temporaries, SMALL_BYTES):
        peak = permanent + temporaries
    return {
        "memory.peak": peak,  # Most bytes at any time, arguments and temporaries together.
        "memory.arguments": analysis.argument_size_in_bytes,
        "memory.outputs": analysis.output_size_in_bytes,
        "memory.temporaries": temporaries,
        "memory.aliased": analysis.alias_size_in_bytes,  # Outputs in the memory of arguments.
        "memory.code": analysis.generated_code_size_in_bytes,
        "memory.host": host,  # In the host's memory, in addition to all others.
    }


def _collective_figures(rows: Iterable[Collective]) -> dict[str, int]:
    """Returns the sums of each kind over mesh axes."""
    sums = collections.Counter[str]()
    for row in rows:
        for name in ("bytes", "count", "asynchronous", "small", "executions"):
            sums[f"{row.kind}.{name}"] += getattr(row, name)
    return dict(sums)


def _operation_figures(program: Program) -> dict[str, int]:
    """Returns the numbers of the `OPERATIONS`, and the bytes of those outside fusions."""
    numbers, sizes = dict.fromkeys(OPERATIONS, 0), dict.fromkeys(OPERATIONS, 0.0)
    for computation, each in program.instructions():
        if each.opcode in numbers:
            numbers[each.opcode] += 1
            if not computation.fused:
                sizes[each.opcode] += values.shape_bytes(each.shape) * computation.executions
    return {f"{opcode}.count": number for opcode, number in numbers.items()} | {
        f"{opcode}.bytes": round(size) for opcode, size in sizes.items()
    }


def rows_computed_over_routed(rows: Iterable[Kernel], rows_routed: int | None) -> float | None:
    """Returns the rows that grouped matmuls multiply over assigned rows; None without such.

    Routing is taken as balanced: groups have one size, the first begins at row 0, and the first
    rows of the others fall anywhere in a block, which is computed for both of its groups.
    Kernels are weighted by their executions. Without `rows_routed` all rows count as assigned.
    """
    computed, routed = 0.0, 0.0
    for kernel in rows:
        if kernel.groups and kernel.kind != "row sum":
            assigned, block = min(rows_routed or kernel.rows, kernel.rows), kernel.rows_at_once
            routed += kernel.executions * assigned
            shared = (kernel.groups - 1) * (block - 1)
            computed += kernel.executions * (math.ceil(assigned / block) * block + shared)
    return computed / routed if routed else None


def _costly(program: Program, source_map: SourceMap) -> list[Row]:
    """Returns the instructions with an estimate, costliest first."""
    found = [
        {
            "name": each.name,
            "shape": values.plain_shape(each.shape),
            "op_name": each.op_name,
            "source": _source(source_map, each),
            "locations": [*map(str, source_map.stack(each))],
            "executions": computation.executions,
            "cycles": round(each.cycles * computation.executions),
        }
        for computation, each in program.unfused()
        if each.cycles
    ]
    return sorted(found, key=lambda each: (-each["cycles"], each["name"]))


def _source(source_map: SourceMap, instruction: Instruction) -> str:
    """Returns the phase and the function that made an instruction; its opcode if unknown."""
    own = phase(instruction.op_name)
    prefix = f"{own} " if own in ("recomputed", "backward") else ""
    if stack := source_map.stack(instruction, 1):
        return f"{prefix}{stack[0].file} {stack[0].function}"
    return f"{prefix}({instruction.opcode}) {instruction.op_name.rpartition('/')[2]}".rstrip()


def _cycles(program: Program) -> list[Row]:
    """Returns the cycles by kind of work and phase, largest first."""
    sums = collections.defaultdict[tuple[str, str], float](float)
    for computation, each in program.unfused():
        if each.cycles:
            key = _work(program, each), phase_of(program, each)
            sums[key] += each.cycles * computation.executions
    return [
        {"kind": kind, "phase": phase, "cycles": round(amount)}
        for (kind, phase), amount in sorted(sums.items(), key=lambda each: -each[1])
    ]


_MOVES = {"copy", "transpose", "copy-start", "bitcast-convert", "concatenate", "slice", "pad"}
_INDEXES = {"gather", "scatter", "sort", "dynamic-slice", "dynamic-update-slice"}


def _work(program: Program, instruction: Instruction) -> str:
    """Returns the kind of work of an instruction; for a fusion, the heaviest inside it."""
    inside = [instruction]
    if instruction.is_fusion:
        inside = instructions_inside(program, instruction)
    opcodes = {each.opcode for each in inside}
    if any(values.is_matmul(each) for each in inside):
        return "matmul"
    for opcode in ("sort", "scatter", "gather"):
        if opcode in opcodes:
            return opcode
    if any(opcode.startswith("reduce") for opcode in opcodes):
        return "reduction"
    opcodes -= {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
    if opcodes <= {"broadcast", "iota"}:
        return "filling with a constant"
    return "copies and slices" if opcodes <= _MOVES | _INDEXES else "elementwise"


def _sources(costly: Sequence[Row]) -> list[Row]:
    cycles, counts = collections.Counter[str](), collections.Counter[str]()
    for each in costly:
        cycles[each["source"]] += each["cycles"]
        counts[each["source"]] += 1
    return [
        {"name": name, "cycles": total, "instructions": counts[name]}
        for name, total in cycles.most_common()
    ]


def matmul_flops(program: Program) -> int:
    """Returns the FLOPs of all matmuls that a device executes."""
    flops = (
        values.matmul_flops(each, computation) * computation.executions
        for computation, each in program.instructions()
        if values.is_matmul(each)
    )
    return round(sum(flops))
