"""Counts of a compiled training step.

All counts are per step and device, from the optimized HLO with the trip counts of loops, or from
`memory_analysis()`. `cost_analysis()` is not used, because it counts the body of a loop once.

Cycles are the compiler's estimates, not measurements: the sum of `estimated_cycles` over the
instructions outside fused computations (the estimate of a fusion includes its contents), times
their executions. The compiler has no estimate for Pallas kernels and collectives, which therefore
do not count. Other programs can be compared if their cycles are summed in the same way.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import SourceMap, phase
from moelib.planning.report.collectives import collectives_by_axes, collectives_by_groups
from moelib.planning.report.fusions import fusion_kinds, instructions_inside, phase_of
from moelib.planning.report.kernels import kernels
from moelib.planning.report.step_report import (
    SMALL_BYTES,
    Costly,
    Memory,
    Operation,
    Share,
    Source,
)

OPERATIONS = ("copy", "transpose", "sort", "gather", "scatter")
_MAX_COSTLIEST = 200  # Instructions in a report.


def count(
    compiled: Any, program: Program, mesh: Mapping[str, int], slices: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the fields of a `StepReport` that a compiled program decides.

    Args:
        compiled: A `jax.stages.Compiled`.
        program: Program parsed from its text.
        mesh: Sizes of the mesh axes, outermost first.
        slices: Slice of each device, in the order of the mesh; by default one for all.
    """
    costly = _costly(program, SourceMap(compiled.as_text()))
    unfused = [(c, each) for c, each in program.instructions() if not c.fused]
    fusions = [c for c, each in unfused if each.is_fusion]
    return {
        "memory": _memory(compiled.memory_analysis()),
        "cycles": sum(each.cycles for each in costly),
        "sources": _sources(costly),
        "costliest": tuple(costly[:_MAX_COSTLIEST]),
        "collectives": collectives_by_axes(program, mesh),
        "collective_groups": collectives_by_groups(program, mesh, slices),
        "kernels": kernels(program),
        "operations": tuple(_operation(program, opcode) for opcode in OPERATIONS),
        "matmul_flops": matmul_flops(program),
        "fusions": len(fusions),
        "fusion_executions": round(sum(c.executions for c in fusions)),
        "fusion_kinds": fusion_kinds(program),
        "instructions": sum(1 for _ in program.instructions()),
        "instructions_outside_fusions": len(unfused),
        "loops_of_unknown_length": program.loops_of_unknown_length,
        "cycle_shares": _cycle_shares(program),
    }


def _memory(analysis: Any) -> Memory:
    peak, temporaries = analysis.peak_memory_in_bytes, analysis.temp_size_in_bytes
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    permanent = analysis.argument_size_in_bytes + new_outputs
    # The peak includes the host's memory, and that of a CPU excludes temporaries: the allocations
    # on the device are then the closest bound.
    if host or peak - permanent < min(temporaries, SMALL_BYTES):
        peak = permanent + temporaries
    return Memory(
        peak=peak,
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=temporaries,
        aliased=analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        host=host,
    )


def _costly(program: Program, source_map: SourceMap) -> list[Costly]:
    """Returns the instructions with an estimate, costliest first."""
    found = [
        Costly(
            name=each.name,
            opcode=each.opcode,
            shape=values.plain_shape(each.shape),
            op_name=each.op_name,
            source=_source(source_map, each),
            locations=tuple(map(str, source_map.stack(each))),
            executions=computation.executions,
            cycles=round(each.cycles * computation.executions),
        )
        for computation, each in program.unfused()
        if each.cycles
    ]
    return sorted(found, key=lambda each: (-each.cycles, each.name))


def _source(source_map: SourceMap, instruction: Instruction) -> str:
    """Returns the phase and the function that made an instruction; its opcode if unknown."""
    own = phase(instruction.op_name)
    prefix = f"{own} " if own in ("recomputed", "backward") else ""
    if stack := source_map.stack(instruction, 1):
        return f"{prefix}{stack[0].file} {stack[0].function}"
    return f"{prefix}({instruction.opcode}) {instruction.op_name.rpartition('/')[2]}".rstrip()


def _cycle_shares(program: Program) -> tuple[Share, ...]:
    """Returns the cycles by kind of work and phase, largest first."""
    sums = collections.defaultdict[tuple[str, str], float](float)
    for computation, each in program.unfused():
        if each.cycles:
            key = _work(program, each), phase_of(program, each)
            sums[key] += each.cycles * computation.executions
    ordered = sorted(sums.items(), key=lambda each: -each[1])
    return tuple(Share(*key, round(amount)) for key, amount in ordered)


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


def _sources(costly: Iterable[Costly]) -> tuple[Source, ...]:
    cycles, counts = collections.Counter[str](), collections.Counter[str]()
    for each in costly:
        cycles[each.source] += each.cycles
        counts[each.source] += 1
    return tuple(Source(name, total, counts[name]) for name, total in cycles.most_common())


def _operation(program: Program, opcode: str) -> Operation:
    found = [(c, each) for c, each in program.instructions() if each.opcode == opcode]
    outside = [(c, each) for c, each in found if not c.fused]
    return Operation(
        opcode=opcode,
        count=len(found),
        executions=round(sum(c.executions for c, _ in found)),
        bytes=round(sum(values.shape_bytes(i.shape) * c.executions for c, i in outside)),
    )


def matmul_flops(program: Program) -> int:
    """Returns the FLOPs of all matmuls that a device executes."""
    flops = (
        values.matmul_flops(each, computation) * computation.executions
        for computation, each in program.instructions()
        if values.is_matmul(each)
    )
    return round(sum(flops))
