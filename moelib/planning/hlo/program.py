"""Optimized HLO text as data: computations, their instructions, and their executions per step.

Executions are counted from the entry downwards. The body of a loop runs as often as the loop's
known trip count; without one, n times if its condition is i < n for a carried i and a constant n,
or n / c times if it adds a constant c to i, not in a fusion; otherwise it counts once, and
`Program.loops_of_unknown_length` names it. The rounds of a dispatch beyond the first, which
balanced routing does not need, do not count. Of a conditional's branches only the costliest by the
compiler's estimate counts (among equals, the one with the most instructions), unless their shares
are known; executions are then fractions. A computation with several callers runs the sum of their
executions.

A TPU's fusion of an all-reduce and a slice of its result is a reduce-scatter.
"""

import dataclasses
import functools
import graphlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from moelib.layers.moe.rounds import FURTHER_ROUNDS

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX_COMMENT = re.compile(r"/\*.*?\*/")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALL_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count[\\"]*:\s*\{[\\"]*n[\\"]*:[\\"]*(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_UNKNOWN_CYCLES = 2**60  # Estimates from here on stand for an unknown number.
_REDUCE_SCATTER = "all-reduce-scatter"  # Computation of a TPU's fusion, which sends no more.
Shares = Mapping[str, Sequence[float]]
_BRANCHES = ("true_computation", "false_computation", "branch_computations")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction."""

    name: str  # Without its %.
    shape: str  # Shape of the result; that of a tuple in parentheses.
    opcode: str  # Such as "all-gather-start".
    operands: tuple[str, ...]  # Names.
    arguments: str  # Text in the parentheses.
    attributes: str  # Text after them.
    is_root: bool = False  # Whether its result is that of its computation.

    @property
    def op_name(self) -> str:
        """Name scopes of the traced operation, such as "jit(step)/decoder/dot_general", or ""."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 without one."""
        found = _CYCLES.search(self.attributes)
        cycles = int(found.group(1)) if found else 0
        return cycles if cycles < _UNKNOWN_CYCLES else 0

    @property
    def is_async_start(self) -> bool:
        """True for the start of asynchronous work; a GPU's start may be marked synchronous."""
        if self.opcode == "recv":
            return True
        return self.opcode.endswith("-start") and '"is_sync":true' not in self.attributes

    @property
    def is_fusion(self) -> bool:
        """True for a fusion, also an asynchronous one."""
        return self.opcode in ("fusion", "fusion-start")

    @functools.cached_property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The computations that it runs, as (attribute, name); of an async pair, the start only."""
        if self.opcode.endswith(("-done", "-update")):
            return ()
        found = _CALLS.findall(self.attributes)
        for kind, names in _CALL_LISTS.findall(self.attributes):
            found += [(kind, name.strip().lstrip("%")) for name in names.split(",") if name.strip()]
        return tuple(found)

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute up to a space or comma outside brackets; "" if none."""
        found = re.search(rf"(?:^|[\s,]){re.escape(name)}=", self.attributes)
        if not found:
            return ""
        text, depth = self.attributes[found.end() :], 0
        for i, letter in enumerate(text):
            if letter in ", " and depth == 0:
                return text[:i]
            depth += (letter in "{[(") - (letter in "}])")
        return text


@dataclasses.dataclass
class Computation:
    """A list of instructions."""

    name: str  # Without its %.
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)  # In order.
    executions: float = 0  # Per step and device; of a branch, the mean over devices and ticks.
    fused: bool = False  # Whether it is part of a fusion, which is one instruction of its caller.
    asynchronous: bool = False  # Whether it runs between an async-start and its async-done.

    @property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next(each for each in self.instructions.values() if each.is_root)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    computations: Mapping[str, Computation]  # By name.
    entry: str
    loops_of_unknown_length: tuple[str, ...] = ()
    # By instruction, the computations that it runs, and how often: 1 for loops of unknown length.
    runs: Mapping[str, Sequence[tuple[str, float]]] = dataclasses.field(default_factory=dict)

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields every instruction with its computation."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                yield computation, instruction

    def unfused(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the executed instructions outside of fused computations."""
        for computation, instruction in self.instructions():
            if computation.executions and not computation.fused:
                yield computation, instruction


def parse(text: str, shares: Shares | None = None) -> Program:
    """Returns the program of an optimized HLO module's text.

    Args:
        text: The text.
        shares: Share of the executions of a conditional in which each of its branches runs, by the
            scope of the conditional; with a single share, that of the costliest branch.

    Raises:
        ValueError: If there is no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, name, statement in _statements(text):
        computation = computations.setdefault(name, Computation(name))
        if is_entry:
            entry = name
        if statement:
            instruction = _instruction(statement)
            computation.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("The text has no ENTRY computation; give the text of an HLO module.")
    for name, computation in computations.items():
        if name.startswith(_REDUCE_SCATTER):
            for key, each in computation.instructions.items():
                if each.opcode == "all-reduce":
                    computation.instructions[key] = dataclasses.replace(
                        each, opcode="reduce-scatter", shape=computation.root.shape
                    )
    unknown, runs = _count_executions(computations, entry, shares or {})
    return Program(computations, entry, unknown, runs)


def _statements(text: str) -> Iterator[tuple[bool, str, str]]:
    """Yields (is the entry, computation, instruction), first with "" for each computation.

    An attribute may span several lines: a line that starts nothing continues the one before.
    """
    is_entry, name, lines = False, "", list[str]()
    for line in text.splitlines():
        if line == "}" or (name and _INSTRUCTION.match(line)):
            header = None
        elif line[:1].strip() and (header := _HEADER.match(line)):
            pass
        else:
            if lines:
                lines.append(line)
            continue
        if lines:
            yield is_entry, name, "".join(lines)
        lines = []
        if line == "}":
            name = ""
        elif header:
            is_entry, name = header.group(1) is not None, header.group(2)
            yield is_entry, name, ""
        else:
            lines = [line]
    if lines:
        yield is_entry, name, "".join(lines)


def _instruction(statement: str) -> Instruction:
    begin = _INSTRUCTION.match(statement)
    assert begin is not None
    rest = statement[begin.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    assert opcode is not None, statement[:200]
    close = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close - 1]
    return Instruction(
        name=begin.group(2),
        shape=_INDEX_COMMENT.sub("", rest[:end]),
        opcode=opcode.group(1),
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[close:].lstrip(", "),
        is_root=begin.group(1) is not None,
    )


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


# -- Executions ----------------------------------------------------------------------------------


def _count_executions(
    computations: dict[str, Computation], entry: str, shares: Shares
) -> tuple[tuple[str, ...], dict[str, list[tuple[str, float]]]]:
    """Sets how often, and how, each computation runs.

    Returns:
        The loops of unknown length, and `Program.runs`.
    """
    unknown: list[str] = []
    all_runs: dict[str, list[tuple[str, float]]] = {}
    calls = {name: _all_calls(each) & computations.keys() for name, each in computations.items()}
    order = [*graphlib.TopologicalSorter(calls).static_order()]  # Each after all that it calls.
    costs = _costs(computations, order, shares)
    computations[entry].executions, reachable = 1, {entry}
    for name in reversed(order):
        if name not in reachable:
            continue
        reachable |= calls[name]
        caller = computations[name]
        for instruction in caller.instructions.values():
            runs = _runs(instruction, computations, costs, shares)
            if caller.executions and any(times is None for _, times in runs):
                unknown.append(instruction.name)
            counted = [(callee, 1 if times is None else times) for callee, times in runs]
            if counted:
                all_runs[instruction.name] = counted
            for callee, times in counted:
                called = computations[callee]
                called.executions += caller.executions * times
                called.fused |= caller.fused or instruction.is_fusion
                called.asynchronous |= caller.asynchronous or instruction.is_async_start
    return tuple(unknown), all_runs


def _all_calls(computation: Computation) -> set[str]:
    return {name for each in computation.instructions.values() for _, name in each.calls}


def _costs(
    computations: dict[str, Computation], order: list[str], shares: Shares
) -> dict[str, tuple[float, float]]:
    """Returns (cycles, instructions) of one run of each computation, with all its callees."""
    costs: dict[str, tuple[float, float]] = {}
    for name in order:
        cycles, count = 0.0, 0.0
        for instruction in computations[name].instructions.values():
            cycles, count = cycles + instruction.cycles, count + 1
            if instruction.is_fusion:
                continue  # Its estimate includes its computation.
            for callee, times in _runs(instruction, computations, costs, shares):
                cycles += (1 if times is None else times) * costs[callee][0]
                count += (1 if times is None else times) * costs[callee][1]
        costs[name] = cycles, count
    return costs


def _runs(
    instruction: Instruction,
    computations: Mapping[str, Computation],
    costs: Mapping[str, tuple[float, float]],
    shares: Shares,
) -> list[tuple[str, float | None]]:
    """Returns the computations that an instruction runs, and how often: None if unknown."""
    calls = [call for call in instruction.calls if call[1] in computations]
    branches = [name for kind, name in calls if kind in _BRANCHES]
    if branches:
        scope = instruction.op_name.removesuffix("/cond").rpartition("/")[2]
        known = shares.get(scope, (1,))
        if len(known) == len(branches):
            return list(zip(branches, known, strict=True))
        costliest = max(branches, key=lambda name: costs[name])
        return [(costliest, known[0] if len(known) == 1 else 1)]
    is_loop = instruction.opcode == "while" and calls
    times = _trip_count(instruction, computations) if is_loop else 1
    return [(name, times) for _, name in calls]


def _trip_count(loop: Instruction, computations: Mapping[str, Computation]) -> int | None:
    if FURTHER_ROUNDS in loop.op_name:
        return 0
    if found := _TRIP_COUNT.search(loop.attributes):
        return int(found.group(1))
    calls = dict(loop.calls)
    condition, body = (computations.get(calls.get(key, "")) for key in ("condition", "body"))
    return _bound(condition, body, computations) if condition and body else None


def _bound(
    condition: Computation, body: Computation, computations: Mapping[str, Computation]
) -> int | None:
    """Returns the iterations from i = 0 while i < n, for a carried i and a constant n."""
    made, root = dict(condition.instructions), condition.root
    if root.opcode == "fusion":
        fused = computations[dict(root.calls)["calls"]]
        given = [made[name] for name in root.operands]
        for name, each in fused.instructions.items():
            made[name] = given[int(each.arguments)] if each.opcode == "parameter" else each
        root = fused.root
    if root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    carried, bound = (_before_copies(made[name], made) for name in root.operands)
    if carried.opcode not in ("get-tuple-element", "parameter") or bound.opcode != "constant":
        return None
    if not bound.arguments.isdecimal():
        return None
    return math.ceil(int(bound.arguments) / _increment(body, carried.attribute("index")))


def _increment(body: Computation, index: str) -> int:
    """Returns the constant that a loop's body adds to a value of its tuple; 1 if it shows none."""
    made, root = body.instructions, body.root
    if not index or root.opcode != "tuple":
        return 1
    added = _before_copies(made[root.operands[int(index)]], made)
    operands = [_before_copies(made[x], made) for x in added.operands if x in made]
    carried = [x for x in operands if x.attribute("index") == index]
    if added.opcode != "add" or not carried:
        return 1
    steps = (x.arguments for x in operands if x.opcode == "constant")
    return next((int(step) for step in steps if step.isdecimal() and int(step)), 1)


def _before_copies(each: Instruction, made: Mapping[str, Instruction]) -> Instruction:
    while each.opcode in ("bitcast", "copy"):
        each = made[each.operands[0]]
    return each
