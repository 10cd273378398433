"""The fusions of a compiled step, by kind and phase."""

import collections
import re

from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import phase
from moelib.planning.report.step_report import Row

_KIND = re.compile(r"\bkind=k(\w+)")
_OWN_KIND = re.compile(r'"fusion_backend_config":\{"kind":"_*([\w]+)"')


def fusions_by_kind(program: Program) -> list[Row]:
    """Returns the number of fusions by kind and phase."""
    found = [
        (_kind(each), phase_of(program, each)) for _, each in program.unfused() if each.is_fusion
    ]
    return [
        {"kind": kind, "phase": phase, "count": number}
        for (kind, phase), number in sorted(collections.Counter(found).items())
    ]


def _kind(fusion: Instruction) -> str:
    """Returns loop, input, output or custom; the own name of a GPU's custom fusion."""
    if found := _OWN_KIND.search(fusion.attributes):
        return found.group(1)
    found = _KIND.search(fusion.attributes)
    return found.group(1).lower() if found else "other"


def instructions_inside(program: Program, fusion: Instruction) -> list[Instruction]:
    """Returns the instructions in a fusion and in its nested fusions, without parameters."""
    found: list[Instruction] = []
    for _, name in fusion.calls:
        inside = program.computations.get(name)
        for each in () if inside is None else inside.instructions.values():
            if each.is_fusion:
                found += instructions_inside(program, each)
            elif each.opcode != "parameter":
                found.append(each)
    return found


def phase_of(program: Program, instruction: Instruction) -> str:
    """Returns the phase of an instruction; for a fusion without one, that of most inside it."""
    own = phase(instruction.op_name)
    if own != "other" or not instruction.is_fusion:
        return own
    inside = (phase(each.op_name) for each in instructions_inside(program, instruction))
    known = collections.Counter(each for each in inside if each != "other")
    return known.most_common(1)[0][0] if known else "other"
