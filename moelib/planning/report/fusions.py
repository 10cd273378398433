"""Fusions of a compiled step: which kinds, in which part of the step, and how deep they are."""

import collections
import re
from collections.abc import Iterator

from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.source import phase
from moelib.planning.report.step_report import PHASES, DeepFusion, Fusions

_KIND = re.compile(r"\bkind=k(\w+)")
_OWN_KIND = re.compile(r'"fusion_backend_config":\{"kind":"_*([\w]+)"')
_DEEPEST = 10


def fusion_kinds(program: Program) -> tuple[Fusions, ...]:
    """Returns how many fusions there are of each kind in each part of a step, in its order."""
    rows: dict[tuple[str, str], collections.Counter[str]] = {}
    for computation, each in _fusions(program):
        inside = instructions_inside(program, each)
        key = _kind(each), phase_of(program, each)
        row = rows.setdefault(key, collections.Counter())
        row["count"] += 1
        row["executions"] += computation.executions
        row["instructions"] += len(inside)
    order = sorted(rows, key=lambda key: (key[0], PHASES.index(key[1])))
    return tuple(Fusions(*key, **rows[key]) for key in order)


def deepest_fusions(program: Program) -> tuple[DeepFusion, ...]:
    """Returns the fusions with the most instructions inside, most first."""
    found = [
        DeepFusion(
            name=each.name,
            kind=_kind(each),
            instructions=len(instructions_inside(program, each)),
            levels=_levels(program, each),
            executions=computation.executions,
            op_name=each.op_name,
        )
        for computation, each in _fusions(program)
    ]
    return tuple(sorted(found, key=lambda f: (-f.instructions, -f.levels, f.name))[:_DEEPEST])


def _fusions(program: Program) -> Iterator[tuple[Computation, Instruction]]:
    for computation, each in program.instructions():
        if each.is_fusion and not computation.fused and computation.executions:
            yield computation, each


def _kind(fusion: Instruction) -> str:
    """Returns loop, input, output or custom; of a custom fusion of a GPU its own name."""
    if found := _OWN_KIND.search(fusion.attributes):
        return found.group(1)
    found = _KIND.search(fusion.attributes)
    return found.group(1).lower() if found else "other"


def _called(program: Program, fusion: Instruction) -> list[Computation]:
    return [program.computations[n] for _, n in fusion.calls if n in program.computations]


def instructions_inside(program: Program, fusion: Instruction) -> list[Instruction]:
    """Returns the instructions in a fusion and in those inside it, parameters left out."""
    found: list[Instruction] = []
    for computation in _called(program, fusion):
        for each in computation.instructions.values():
            if each.is_fusion:
                found += instructions_inside(program, each)
            elif each.opcode != "parameter":
                found.append(each)
    return found


def _levels(program: Program, fusion: Instruction) -> int:
    inner = [
        _levels(program, each)
        for computation in _called(program, fusion)
        for each in computation.instructions.values()
        if each.is_fusion
    ]
    return 1 + max(inner, default=0)


def phase_of(program: Program, instruction: Instruction) -> str:
    """Returns the part of the step that an instruction belongs to.

    A fusion without a part of its own is of that of most instructions inside.
    """
    own = phase(instruction.op_name)
    if own != "other" or not instruction.is_fusion:
        return own
    inside = (phase(each.op_name) for each in instructions_inside(program, instruction))
    known = collections.Counter(part for part in inside if part != "other")
    return known.most_common(1)[0][0] if known else "other"
