"""HBM traffic of a compiled step: what its instructions read and write.

A fusion reads its operands and writes its result once, but only the slices that it takes of an
operand, and the part of a buffer that it updates. Values in a TPU's VMEM, and what caches save, do
not count; kernels have estimates of their own.
"""

import re
from collections.abc import Mapping

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.report.kernels import library

# Instructions that move nothing themselves.
_NOTHING = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "opt-barrier", "domain", "add-dependency",
    "call-start", "async-start",
}  # fmt: skip
_UNWRITTEN = 'custom_call_target="AllocateBuffer"'  # A buffer that nothing fills.
_SLICES = ("dynamic-slice", "slice", "gather")  # Read as much of their operand as they return.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # Index of the operand that is written.
_PASSED = ("bitcast", "reshape", "convert", "copy", "transpose")
_Made = Mapping[str, Instruction]
# Memory spaces other than HBM; 7 is that which GPUs share.
_ELSEWHERE = re.compile(r"S\([1-6]\)")


def hbm_bytes(program: Program) -> float:
    """Returns the bytes that a step's instructions, but not its kernels, read and write in HBM."""
    return sum(
        computation.executions * instruction_bytes(program, computation, each)
        for computation, each in program.unfused()
        if not library(each) or values.is_matmul(each)
    )


def instruction_bytes(program: Program, computation: Computation, each: Instruction) -> float:
    """Returns the bytes in HBM that one run of an unfused instruction reads and writes."""
    if each.opcode in _NOTHING or each.opcode.endswith(("-done", "-update")):
        return 0.0
    if _UNWRITTEN in each.attributes:
        return 0.0
    made = computation.instructions
    if each.is_fusion:
        return _fusion_bytes(program, made, each)
    if each.opcode in _UPDATES:
        return 2.0 * _held(_operand_shape(made, each, _UPDATES[each.opcode]))
    if each.opcode in _SLICES:
        return 2.0 * _held(each.shape)
    if each.opcode in ("copy-start", "slice-start"):
        ends = values.tuple_elements(each.shape, layouts=True)[:2]
        return float(sum(min(map(values.shape_bytes, ends)) for x in ends if _in_hbm(x)))
    is_start = each.opcode.endswith("-start")
    result = values.result_shape(each, layouts=True) if is_start else each.shape
    result = "" if each.opcode == "send" else result  # It is the operand.
    return _held(result) + sum(_held(made[name].shape) for name in each.operands if name in made)


def _fusion_bytes(program: Program, made: _Made, each: Instruction) -> float:
    inside = program.computations[each.calls[0][1]].instructions
    in_hbm = [name in made and _in_hbm(made[name].shape) for name in each.operands]
    read = sum(
        _bytes_read(program, inside, one)
        for one in inside.values()
        if one.opcode == "parameter" and in_hbm[int(one.arguments)]
    )
    root = next(one for one in inside.values() if one.is_root)
    parts = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    shapes = values.tuple_elements(each.shape, layouts=True)
    written = (
        _bytes_written(inside, part)
        for part, shape in zip(parts, shapes, strict=False)
        if _in_hbm(shape)
    )
    return read + sum(written)


def _bytes_read(program: Program, inside: _Made, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of a parameter, or of what passes it on."""
    total, whole = 0.0, float(values.shape_bytes(value.shape))
    for user in inside.values():
        for index, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in _SLICES and index == 0:
                total += values.shape_bytes(user.shape)
            elif user.opcode == "bitcast":
                total += _bytes_read(program, inside, user)
            elif user.is_fusion:
                nested = program.computations[user.calls[0][1]].instructions
                given = next(x for x in nested.values() if _is_parameter(x, index))
                total += _bytes_read(program, nested, given)
            elif user.opcode not in _UPDATES or index > 0:
                return whole
    return min(total, whole)


def _is_parameter(each: Instruction, index: int) -> bool:
    return each.opcode == "parameter" and int(each.arguments) == index


def _bytes_written(inside: _Made, part: Instruction) -> float:
    """Returns the bytes that a fusion writes of one of its results."""
    while part.opcode in _PASSED and part.operands[0] in inside:
        part = inside[part.operands[0]]
    if part.opcode in _UPDATES:
        return float(values.shape_bytes(_operand_shape(inside, part, _UPDATES[part.opcode])))
    return 0.0 if part.opcode == "parameter" else float(values.shape_bytes(part.shape))


def _operand_shape(made: _Made, each: Instruction, index: int) -> str:
    operand = made.get(each.operands[index])
    return operand.shape if operand is not None else each.shape


def _held(shape: str) -> float:
    """Returns the bytes of a shape that are in HBM."""
    parts = values.tuple_elements(shape, layouts=True)
    return float(sum(values.shape_bytes(part) for part in parts if _in_hbm(part)))


def _in_hbm(shape: str) -> bool:
    return not _ELSEWHERE.search(shape)
