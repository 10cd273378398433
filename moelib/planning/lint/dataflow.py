"""Data flow of a compiled program: the producer and the consumers of an instruction's result.

A result is followed through copies, tuples, fusions, asynchronous calls, and loops that return it
unchanged.
"""

import collections
from collections.abc import Iterator

from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.values import result_shape, shape_bytes

Value = tuple[Computation, Instruction]

# Opcodes whose result has the elements of their operand.
_SAME = {"copy", "bitcast", "copy-start", "copy-done", "reshape", "convert"}
_INDEX_BYTES = 2**14  # Most bytes of an array from which an index is computed.


class Dataflow:
    """Producers and consumers of results in a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._callers: dict[str, list[Value]] = collections.defaultdict(list)
        self._users: dict[tuple[str, str], list[tuple[Instruction, int]]] = collections.defaultdict(
            list
        )
        for computation, each in program.instructions():
            for _, name in each.calls:
                self._callers[name].append((computation, each))
            for number, name in enumerate(each.operands):
                self._users[computation.name, name].append((each, number))

    def producer(self, computation: Computation, name: str, index: int | None = None) -> Value:
        """Returns the instruction that makes a result, or element `index` of a tuple."""
        each = computation.instructions[name]
        if each.opcode == "get-tuple-element":
            return self.producer(computation, each.operands[0], int(each.attribute("index")))
        if each.opcode == "tuple" and index is not None:
            return self.producer(computation, each.operands[index])
        if each.opcode in _SAME:
            return self.producer(computation, each.operands[0])
        if each.is_fusion:
            body = self._program.computations[dict(each.calls)["calls"]]
            return self.producer(body, _root(body).name, index)
        if each.opcode == "parameter" and (argument := self._argument(computation, each, index)):
            return self.producer(*argument, index)
        return computation, each

    def _argument(
        self, computation: Computation, parameter: Instruction, index: int | None
    ) -> tuple[Computation, str] | None:
        """Returns the argument that a parameter stands for; None if it is not known."""
        if len(self._callers[computation.name]) != 1:
            return None
        ((caller, call),) = self._callers[computation.name]
        number, operands = int(parameter.arguments), call.operands
        if call.opcode == "while":
            if index is None or not _returns_unchanged(computation, index):
                return None
        elif not operands:  # An asynchronous call takes its arguments after its start.
            ((update, _), *_) = self._users[caller.name, call.name]
            operands = update.operands[1:]
        return (caller, operands[number]) if number < len(operands) else None

    def consumers(self, computation: Computation, name: str) -> Iterator[Value]:
        """Yields the instructions that use a result."""
        for each, number in self._users[computation.name, name]:
            if each.is_fusion:
                body = self._program.computations[dict(each.calls)["calls"]]
                for inside in body.instructions.values():
                    if inside.opcode == "parameter" and inside.arguments == str(number):
                        yield from self.consumers(body, inside.name)
            elif each.opcode in _SAME or each.opcode.endswith(("-done", "-update", "-element")):
                yield from self.consumers(computation, each.name)
            else:
                yield computation, each
        if computation.asynchronous and computation.instructions[name].is_root:
            for caller, call in self._callers[computation.name]:
                yield from self.consumers(caller, call.name)

    def is_zero(self, computation: Computation, name: str) -> bool:
        """Returns whether a result is an array of zeros."""
        where, each = self.producer(computation, name)
        if each.opcode == "broadcast":
            where, each = self.producer(where, each.operands[0])
        return each.opcode == "constant" and each.arguments in ("0", "-0")

    def depends_on_device(self, computation: Computation, name: str) -> bool:
        """Returns whether an index is computed from the device's number."""
        todo, seen = [self.producer(computation, name)], set[tuple[str, str]]()
        while todo:
            where, each = todo.pop()
            if each.opcode in ("partition-id", "replica-id"):
                return True
            small = shape_bytes(result_shape(each)) <= _INDEX_BYTES
            if small and (where.name, each.name) not in seen:
                seen.add((where.name, each.name))
                todo += [self.producer(where, n) for n in each.operands if n in where.instructions]
        return False


def _root(computation: Computation) -> Instruction:
    return next(each for each in computation.instructions.values() if each.is_root)


def _returns_unchanged(body: Computation, index: int) -> bool:
    """Returns whether the body of a loop passes on an element of its parameter."""
    root = _root(body)
    kept = body.instructions[root.operands[index]] if root.opcode == "tuple" else root
    inside = body.instructions[kept.operands[0]] if kept.operands else kept
    passed = kept.opcode == "get-tuple-element" and inside.opcode == "parameter"
    return passed and kept.attribute("index") == str(index)
