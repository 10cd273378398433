"""The fusions of a compiled step, by kind and phase."""

import collections
import re

from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import PHASES, phase
from moelib.planning.report.step_report import Fusions

_KIND = re.compile(r"\bkind=k(\w+)")
_OWN_KIND = re.compile(r'"fusion_backend_config":\{"kind":"_*([\w]+)"')


def fusion_kinds(program: Program) -> tuple[Fusions, ...]:
    """Returns the fusions by kind and phase, in the order of phases."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for computation, each in program.unfused():
        if not each.is_fusion:
            continue
        key = _kind(each), phase_of(program, each)
        row = rows.setdefault(key, collections.defaultdict(float))
        row["count"] += 1
        row["executions"] += computation.executions
        row["instructions"] += len(instructions_inside(program, each))
    order = sorted(rows, key=lambda key: (key[0], PHASES.index(key[1])))
    return tuple(Fusions(*key, **{n: round(x) for n, x in rows[key].items()}) for key in order)


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
