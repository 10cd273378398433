"""A compiled training step in figures: memory, what it sends, kernels, cycles. Plain data.

Everything is of one step on one device; `counting` says how it is counted.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Sequence
from typing import Any

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
SMALL_BYTES = 1024  # A collective of no more is a scalar's or a few counts': latency only.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device. `peak` is the most at any time, arguments and temporaries together."""

    peak: int
    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # Of the outputs, what lies in the place of arguments.
    code: int
    host: int = 0  # In the host's memory, beside all these.


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind along the same axes of the mesh.

    Attributes:
        kind: Such as all-gather.
        axes: The mesh axes along which devices of a group differ.
        group_size: Devices of a group.
        count: Number in the program.
        asynchronous: Of these, those that run beside other work.
        small: Of these, those of at most `SMALL_BYTES`.
        small_asynchronous: Of the small, those that run beside other work.
        executions: How often a step runs them.
        bytes: Of results, in a step.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int = 0
    asynchronous: int = 0
    small: int = 0
    small_asynchronous: int = 0
    executions: int = 0
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel: a custom call of target tpu_custom_call.

    Attributes:
        name: Its name.
        count: Number in the program.
        executions: How often a step runs them.
        flops: Of a step, by the kernels' own estimates; 0 for a kernel without.
        bytes: Read and written in a step, by the same.
        without_estimate: Of `count`, those without.
        rows: Of a grouped matmul, the rows of its left side; 0 for other kernels.
        groups: Of a grouped matmul, its groups.
        rows_at_once: Of a grouped matmul, rows of a block that is multiplied as a whole.
    """

    name: str
    count: int
    executions: int
    flops: int
    bytes: int
    without_estimate: int = 0
    rows: int = 0
    groups: int = 0
    rows_at_once: int = 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """All instructions of one opcode; `bytes` of results in a step, of those outside fusions."""

    opcode: str
    count: int
    executions: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Source:
    """What the instructions that one function made cost in a step."""

    name: str
    cycles: int
    instructions: int


@dataclasses.dataclass(frozen=True)
class Costly:
    """An instruction, and what all its executions in a step cost.

    `source` is the function that made it, `places` the innermost lines of the calls to it.
    """

    name: str
    opcode: str
    shape: str
    op_name: str
    source: str
    places: tuple[str, ...]
    executions: int
    cycles: int


@dataclasses.dataclass(frozen=True)
class Seconds:
    """How long it took to trace, lower and compile, by the clock; `compile_cpu` over all cores."""

    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    compile_cpu: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A compiled training step in figures, for one step on one device.

    Attributes:
        name: What was compiled.
        topology: For what.
        mesh: Sizes of the axes.
        memory: Bytes.
        cycles: The compiler's estimate, without kernels and collectives.
        sources: Where the cycles are, costliest first.
        costliest: The costliest instructions.
        collectives: What is sent.
        kernels: Pallas kernels.
        operations: Instructions worth watching.
        matmul_flops: Executed by XLA, outside of kernels.
        fusions: Number in the program.
        fusion_executions: How often a step runs one.
        instructions: Number in the program, those in fusions included.
        instructions_outside_fusions: Number of those that run on their own.
        rows_routed: Rows of a grouped matmul that belong to a token, where that is known.
        loops_of_unknown_length: Loops whose bodies were counted once; empty is good.
        seconds: What compiling took.
    """

    name: str
    topology: str
    mesh: dict[str, int]
    memory: Memory
    cycles: int
    sources: tuple[Source, ...]
    costliest: tuple[Costly, ...]
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    operations: tuple[Operation, ...]
    matmul_flops: int
    fusions: int
    fusion_executions: int
    instructions: int
    instructions_outside_fusions: int
    rows_routed: int | None = None
    loops_of_unknown_length: tuple[str, ...] = ()
    seconds: Seconds = Seconds()

    @property
    def rows_computed_over_routed(self) -> float | None:
        """Rows that grouped matmuls multiply over rows that are routed; None without any.

        The rule: routing is balanced, so groups are of one size; the first begins at row 0, the
        others' first rows fall on any place of a block, which is computed for both its groups.
        Kernels count by their executions. Where `rows_routed` is not known, all rows are.
        """
        computed, routed = 0.0, 0.0
        for kernel in self.kernels:
            if kernel.groups:
                rows = min(self.rows_routed or kernel.rows, kernel.rows)
                once = kernel.rows_at_once
                routed += kernel.executions * rows
                straddled = (kernel.groups - 1) * (once - 1)
                computed += kernel.executions * (math.ceil(rows / once) * once + straddled)
        return computed / routed if routed else None

    def to_json(self) -> str:
        """Returns the report as JSON text, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StepReport":
        """Returns the report that `to_json` wrote. Raises TypeError if fields are not its own."""
        return _build(cls, json.loads(text))


def _build(kind: Any, value: Any) -> Any:
    """Returns a value of JSON as what a field's type says."""
    if dataclasses.is_dataclass(kind):
        types_ = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{name: _build(types_.get(name, Any), inside) for name, inside in value.items()}
        )
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], inside) for inside in value)
    return value


def total(rows: Sequence[Collective], kind: str) -> Collective | None:
    """Returns the sums over all collectives of a kind, or None if there are none."""
    of_kind = [row for row in rows if row.kind == kind]
    if not of_kind:
        return None
    names = [field.name for field in dataclasses.fields(Collective)][3:]
    sums = {name: sum(getattr(row, name) for row in of_kind) for name in names}
    axes = tuple(dict.fromkeys(axis for row in of_kind for axis in row.axes))
    return Collective(kind, axes, max(row.group_size for row in of_kind), **sums)
