"""The fusions of a compiled step, by kind and phase, and the largest ones."""

import collections
import re
from collections.abc import Iterator

from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.source import PHASES, phase
from moelib.planning.report.step_report import DeepFusion, Fusions

_KIND = re.compile(r"\bkind=k(\w+)")
_OWN_KIND = re.compile(r'"fusion_backend_config":\{"kind":"_*([\w]+)"')
_MAX_DEEPEST = 10


def fusion_kinds(program: Program) -> tuple[Fusions, ...]:
    """Returns the fusions by kind and phase, in the order of phases."""
    rows: dict[tuple[str, str], collections.Counter[str]] = {}
    for computation, each in _fusions(program):
        key = _kind(each), phase_of(program, each)
        row = rows.setdefault(key, collections.Counter())
        row["count"] += 1
        row["executions"] += computation.executions
        row["instructions"] += len(instructions_inside(program, each))
    order = sorted(rows, key=lambda key: (key[0], PHASES.index(key[1])))
    return tuple(Fusions(*key, **rows[key]) for key in order)


def deepest_fusions(program: Program) -> tuple[DeepFusion, ...]:
    """Returns the fusions with the most instructions inside."""
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
    return tuple(sorted(found, key=lambda f: (-f.instructions, -f.levels, f.name))[:_MAX_DEEPEST])


def _fusions(program: Program) -> Iterator[tuple[Computation, Instruction]]:
    return ((computation, each) for computation, each in program.unfused() if each.is_fusion)


def _kind(fusion: Instruction) -> str:
    """Returns loop, input, output or custom; the own name of a GPU's custom fusion."""
    if found := _OWN_KIND.search(fusion.attributes):
        return found.group(1)
    found = _KIND.search(fusion.attributes)
    return found.group(1).lower() if found else "other"


def _contents(program: Program, fusion: Instruction) -> Iterator[Instruction]:
    for _, name in fusion.calls:
        if name in program.computations:
            yield from program.computations[name].instructions.values()


def instructions_inside(program: Program, fusion: Instruction) -> list[Instruction]:
    """Returns the instructions in a fusion and in its nested fusions, without parameters."""
    found: list[Instruction] = []
    for each in _contents(program, fusion):
        if each.is_fusion:
            found += instructions_inside(program, each)
        elif each.opcode != "parameter":
            found.append(each)
    return found


def _levels(program: Program, fusion: Instruction) -> int:
    inner = [_levels(program, each) for each in _contents(program, fusion) if each.is_fusion]
    return 1 + max(inner, default=0)


def phase_of(program: Program, instruction: Instruction) -> str:
    """Returns the phase of an instruction; for a fusion without one, that of most inside it."""
    own = phase(instruction.op_name)
    if own != "other" or not instruction.is_fusion:
        return own
    inside = (phase(each.op_name) for each in instructions_inside(program, instruction))
    known = collections.Counter(each for each in inside if each != "other")
    return known.most_common(1)[0][0] if known else "other"
