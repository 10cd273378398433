"""The figures of a compiled training step as plain data: memory, collectives, kernels, cycles.

All figures are per step and device; `count` describes how they are counted.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Sequence
from typing import Any

SMALL_BYTES = 1024  # Collectives up to this size carry scalars or counts and cost latency only.


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes."""

    peak: int  # Most bytes at any time, arguments and temporaries together.
    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # Outputs in the memory of arguments.
    code: int
    host: int = 0  # In the host's memory, in addition to all others.


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind along the same mesh axes."""

    kind: str  # Such as "all-gather".
    axes: tuple[str, ...]  # Mesh axes along which the devices of a group differ.
    group_size: int  # Devices per group.
    count: int = 0  # Number in the program.
    asynchronous: int = 0  # Those that overlap with other work.
    small: int = 0  # Those of at most `SMALL_BYTES`.
    small_asynchronous: int = 0
    executions: int = 0
    bytes: int = 0  # Of results.


@dataclasses.dataclass(frozen=True)
class CollectiveGroups:
    """All collectives of one kind among the same groups of devices."""

    kind: str
    groups: str  # Indices of devices in the mesh, such as "0,1 | 2,3".
    link: str  # "slice" if each group lies in one slice, otherwise "network".
    count: int = 0  # Number in the program.
    executions: int = 0
    bytes: int = 0  # Of results.


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All kernels of one name: Pallas kernels, and those of a GPU's libraries."""

    name: str
    count: int  # Number in the program.
    executions: int
    flops: int  # By the kernels' own estimates; 0 without.
    bytes: int  # Read and written, by the kernels' own estimates.
    without_estimate: int = 0  # Those of `count` without an estimate.
    rows: int = 0  # Rows of the left operand of a grouped matmul; 0 for other kernels.
    groups: int = 0  # Groups of a grouped matmul.
    rows_at_once: int = 0  # Rows of a block that a grouped matmul multiplies as a whole.
    # "grouped matmul", "attention", their gradients, "row sum" of tokens, "matmul" or "other".
    kind: str = "other"
    library: str = "pallas tpu"  # Or "mosaic gpu", "triton", "cublas", "cudnn".


@dataclasses.dataclass(frozen=True)
class Stage:
    """The size of the step at a stage of compilation; 0 for counts that a stage does not have."""

    name: str
    lines: int
    instructions: int = 0
    fusions: int = 0


@dataclasses.dataclass(frozen=True)
class Fusions:
    """All fusions of one kind in one phase of the step."""

    kind: str  # loop, input, output or custom; for a GPU's own fusions their name.
    phase: str  # One of `hlo.source.PHASES`.
    count: int = 0  # Number in the program.
    executions: int = 0
    instructions: int = 0  # Instructions inside, without parameters.


@dataclasses.dataclass(frozen=True)
class Share:
    """The amount of a category, in the unit of its table (bytes or cycles)."""

    category: str
    phase: str  # One of `hlo.source.PHASES`, or "".
    amount: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """A part of a compiled step that costs more than necessary."""

    rule: str  # Name of the rule, such as "padding".
    severity: str  # "warning" for a mistake, "hint" for a trade-off.
    instruction: str  # The largest instruction found, or the name of another subject.
    config_path: str  # Field of the trainer's config to change.
    advice: str  # The problem, and the setting that avoids it.
    bytes: int = 0  # Of the instruction's result, or of an array of the state, per device.
    executions: float = 0  # Per step; 0 if the subject is not an instruction.
    op_name: str = ""
    locations: tuple[str, ...] = ()  # Source lines, innermost first.
    count: int = 1  # Number of instructions with the same rule, config_path and advice.


@dataclasses.dataclass(frozen=True)
class Operation:
    """All instructions of one opcode."""

    opcode: str
    count: int
    executions: int
    bytes: int  # Of results outside fusions.


@dataclasses.dataclass(frozen=True)
class Source:
    """The cost of the instructions that one function made."""

    name: str
    cycles: int
    instructions: int


@dataclasses.dataclass(frozen=True)
class Costly:
    """An instruction and the cost of all its executions."""

    name: str
    opcode: str
    shape: str
    op_name: str
    source: str  # Function that made it.
    locations: tuple[str, ...]  # Innermost source lines of the calls to it.
    executions: float
    cycles: int


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of tracing, lowering and compiling."""

    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    compile_cpu: float = 0.0  # CPU seconds of `compile`, over all cores.


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The figures of a compiled training step."""

    name: str
    topology: str
    mesh: dict[str, int]  # Sizes of the axes, outermost first.
    memory: Memory
    cycles: int  # The compiler's estimate, without kernels and collectives.
    sources: tuple[Source, ...]  # Costliest first.
    costliest: tuple[Costly, ...]
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    operations: tuple[Operation, ...]
    matmul_flops: int  # Executed by XLA, outside of kernels.
    fusions: int  # Number in the program.
    fusion_executions: int
    instructions: int  # Number in the program, with those in fusions.
    instructions_outside_fusions: int
    rows_routed: int | None = None  # Assigned rows of a grouped matmul; None if unknown.
    loops_of_unknown_length: tuple[str, ...] = ()  # Loops whose bodies count once.
    seconds: Seconds = Seconds()
    model_flops: int = 0  # By the model's own count; 0 if unknown.
    stages: tuple[Stage, ...] = ()  # From the jaxpr to the compiled program.
    collective_groups: tuple[CollectiveGroups, ...] = ()
    fusion_kinds: tuple[Fusions, ...] = ()
    memory_shares: tuple[Share, ...] = ()  # Bytes by content.
    cycle_shares: tuple[Share, ...] = ()  # Cycles by kind of work and phase.
    findings: tuple[Finding, ...] = ()
    largest: tuple[Finding, ...] = ()  # The largest temporaries, one of each operation.

    @property
    def kernel_flops(self) -> int:
        """FLOPs of kernels by their own estimates."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def executed_over_model_flops(self) -> float | None:
        """Executed FLOPs over those of the model, or None if those are unknown.

        Recomputation, unfilled rows of grouped matmuls and masked attention raise it.
        """
        executed = self.matmul_flops + self.kernel_flops
        return executed / self.model_flops if self.model_flops else None

    @property
    def rows_computed_over_routed(self) -> float | None:
        """Rows that grouped matmuls multiply over assigned rows; None without grouped matmuls.

        Routing is taken as balanced: groups have one size, the first begins at row 0, and the first
        rows of the others fall anywhere in a block, which is computed for both of its groups.
        Kernels are weighted by their executions. Without `rows_routed` all rows count as assigned.
        """
        computed, routed = 0.0, 0.0
        for kernel in self.kernels:
            if kernel.groups and kernel.kind != "row sum":
                rows = min(self.rows_routed or kernel.rows, kernel.rows)
                block = kernel.rows_at_once
                routed += kernel.executions * rows
                shared = (kernel.groups - 1) * (block - 1)
                computed += kernel.executions * (math.ceil(rows / block) * block + shared)
        return computed / routed if routed else None

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StepReport":
        """Returns the report of `to_json`. Raises TypeError for unknown fields."""
        return _build(cls, json.loads(text))


def _build(kind: Any, value: Any) -> Any:
    """Returns a JSON value as an instance of a field's type."""
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{name: _build(types.get(name, Any), inside) for name, inside in value.items()}
        )
    if typing.get_origin(kind) is tuple:
        return tuple(_build(typing.get_args(kind)[0], inside) for inside in value)
    return value


def total(rows: Sequence[Collective], kind: str) -> Collective | None:
    """Returns the sum over all collectives of a kind, or None if there are none."""
    of_kind = [row for row in rows if row.kind == kind]
    if not of_kind:
        return None
    names = [field.name for field in dataclasses.fields(Collective)][3:]
    sums = {name: sum(getattr(row, name) for row in of_kind) for name in names}
    axes = tuple(dict.fromkeys(axis for row in of_kind for axis in row.axes))
    return Collective(kind, axes, max(row.group_size for row in of_kind), **sums)
