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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moelib.planning.hlo import program as hlo
from moelib.planning.hlo import values as hlo_values
from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import Places
from moelib.planning.report.collectives import collective_groups, collectives
from moelib.planning.report.fusions import (
    deepest_fusions,
    fusion_kinds,
    instructions_inside,
    phase_of,
)
from moelib.planning.report.kernels import kernels
from moelib.planning.report.step_report import (
    SMALL_BYTES,
    Costly,
    Memory,
    Operation,
    Seconds,
    Share,
    Source,
    Stage,
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
    program: Program | None = None,
    rows_routed: int | None = None,
    seconds: Seconds = _NO_SECONDS,
    num_costliest: int = 20,
    model_flops: int = 0,
    stages: Sequence[Stage] = (),
    slices: Sequence[int] = (),
) -> StepReport:
    """Returns the report of a `jax.stages.Compiled`.

    Args:
        compiled: The step.
        name: What it is.
        topology: What it was compiled for.
        mesh: Sizes of the mesh's axes, outermost first.
        program: The step's text, parsed, if that is at hand.
        rows_routed: Rows that reach a device's experts if routing is balanced.
        seconds: What compiling took.
        num_costliest: How many instructions to list.
        model_flops: What the model needs of a step on one device; 0 if that is not known.
        stages: Sizes of the step before it was compiled.
        slices: The slice of each device of the mesh, in its order; by default all are in one.
    """
    text = compiled.as_text()
    program = hlo.parse(text) if program is None else program
    cycles = _cycles(program, Places(text))
    memory = _memory(compiled.memory_analysis())
    counts = _counts(program)
    after = Stage("HLO, optimized", text.count("\n"), counts["instructions"], counts["fusions"])
    return StepReport(
        name=name,
        topology=topology,
        mesh=dict(mesh),
        memory=memory,
        cycles=sum(each.cycles for each in cycles),
        sources=_sources(cycles),
        costliest=tuple(cycles[:num_costliest]),
        collectives=collectives(program, mesh),
        kernels=kernels(program),
        operations=tuple(_operation(program, opcode) for opcode in OPERATIONS),
        matmul_flops=_matmul_flops(program),
        **counts,
        rows_routed=rows_routed,
        loops_of_unknown_length=program.loops_of_unknown_length,
        seconds=seconds,
        model_flops=model_flops,
        stages=(*stages, after),
        collective_groups=collective_groups(program, mesh, slices),
        fusion_kinds=fusion_kinds(program),
        deepest_fusions=deepest_fusions(program),
        cycle_shares=_cycle_shares(program),
    )


def _memory(analysis: Any) -> Memory:
    peak = analysis.peak_memory_in_bytes
    host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
    kept = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    lasting, temporaries = analysis.argument_size_in_bytes + kept, analysis.temp_size_in_bytes
    # The host's memory is in the peak, too, and a CPU's peak leaves temporaries out: what is
    # allocated on the device is then the closest bound.
    if host or peak - lasting < min(temporaries, SMALL_BYTES):
        peak = lasting + temporaries
    return Memory(
        peak=peak,
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=temporaries,
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


def _cycle_shares(program: Program) -> tuple[Share, ...]:
    """Returns the cycles by what is done and in which part of the step, most first."""
    sums = collections.Counter[tuple[str, str]]()
    for computation, each in program.instructions():
        if not computation.fused and each.cycles and computation.executions:
            key = _work(program, each), phase_of(program, each)
            sums[key] += each.cycles * computation.executions
    return tuple(Share(*key, amount) for key, amount in sums.most_common())


_MOVES = {"copy", "transpose", "copy-start", "bitcast-convert", "concatenate", "slice", "pad"}
_INDEXES = {"gather", "scatter", "sort", "dynamic-slice", "dynamic-update-slice"}


def _work(program: Program, instruction: Instruction) -> str:
    """Returns what an instruction is for: of a fusion, the heaviest of what is in it."""
    inside = [instruction]
    if instruction.is_fusion:
        inside = instructions_inside(program, instruction)
    opcodes = {each.opcode for each in inside}
    if any(hlo_values.is_matmul(each) for each in inside):
        return "matmul"
    for opcode in ("sort", "scatter", "gather"):
        if opcode in opcodes:
            return opcode
    if any(opcode.startswith("reduce") for opcode in opcodes):
        return "reduction"
    opcodes -= {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
    if opcodes <= {"broadcast", "iota"}:
        return "filling with a constant"
    if opcodes <= _MOVES | _INDEXES:
        return "copies and slices"
    return "elementwise"


def _sources(costly: Iterable[Costly]) -> tuple[Source, ...]:
    cycles, counts = collections.Counter[str](), collections.Counter[str]()
    for each in costly:
        cycles[each.source] += each.cycles
        counts[each.source] += 1
    return tuple(Source(name, total, counts[name]) for name, total in cycles.most_common())


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
        if hlo_values.is_matmul(each)
    )


def _counts(program: Program) -> Mapping[str, Any]:
    alone = [(c, each) for c, each in program.instructions() if not c.fused]
    fusions = [c for c, each in alone if each.is_fusion]
    return {
        "fusions": len(fusions),
        "fusion_executions": sum(c.executions for c in fusions),
        "instructions": sum(1 for _ in program.instructions()),
        "instructions_outside_fusions": len(alone),
    }
