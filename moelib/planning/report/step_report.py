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
PHASES = ("forward", "recomputed", "backward", "optimizer", "other")
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
class CollectiveGroups:
    """All collectives of one kind among the same groups of devices.

    Attributes:
        kind: Such as all-gather.
        groups: Of devices, as places in the mesh: "0,1 | 2,3".
        link: "slice" if each group lies in one slice, "network" if one reaches over several.
        count: Number in the program.
        executions: How often a step runs them.
        bytes: Of results, in a step.
    """

    kind: str
    groups: str
    link: str
    count: int = 0
    executions: int = 0
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel by its name: of Pallas, or of a GPU's libraries (cuBLAS, cuDNN).

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
        kind: What it is for: "grouped matmul", "attention" or their gradients, "matmul", "other".
        library: "pallas tpu", "mosaic gpu", "triton", "cublas" or "cudnn".
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
    kind: str = "other"
    library: str = "pallas tpu"


@dataclasses.dataclass(frozen=True)
class Stage:
    """The size of the step on its way through the compiler; 0 for what a stage does not have."""

    name: str
    lines: int
    instructions: int = 0
    fusions: int = 0


@dataclasses.dataclass(frozen=True)
class Fusions:
    """All fusions of one kind in one part of a step.

    Attributes:
        kind: Such as loop, input, output or custom; of a GPU's own, its name (triton_gemm).
        phase: One of `PHASES`.
        count: Number in the program.
        executions: How often a step runs them.
        instructions: In them, parameters not counted: what would run alone without them.
    """

    kind: str
    phase: str
    count: int = 0
    executions: int = 0
    instructions: int = 0


@dataclasses.dataclass(frozen=True)
class DeepFusion:
    """One fusion: how many instructions are in it, and how many levels of fusions."""

    name: str
    kind: str
    instructions: int
    levels: int
    executions: int
    op_name: str


@dataclasses.dataclass(frozen=True)
class Share:
    """What a category takes, in the unit of the table that it is in (bytes or cycles)."""

    category: str
    phase: str
    amount: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a compiled step that costs more than it needs to.

    Attributes:
        rule: What was looked for, such as "padding".
        severity: "warning" where something is wrong, "hint" where there is a trade to think about.
        instruction: The largest one found, or the array of the state.
        bytes: Of that instruction's result, or the array, on a device.
        executions: How often a step runs it; 0 for an array.
        op_name: Where the program made it.
        places: Lines of the source, innermost first.
        config_path: What to change in the trainer's config.
        advice: What is wrong, and what to set instead.
        count: How many instructions were found that have the same rule, config_path and advice.
    """

    rule: str
    severity: str
    instruction: str
    bytes: int
    executions: int
    op_name: str
    places: tuple[str, ...]
    config_path: str
    advice: str
    count: int = 1


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
        kernels: Pallas kernels, and those of libraries.
        operations: Instructions worth watching.
        matmul_flops: Executed by XLA, outside of kernels.
        fusions: Number in the program.
        fusion_executions: How often a step runs one.
        instructions: Number in the program, those in fusions included.
        instructions_outside_fusions: Number of those that run on their own.
        rows_routed: Rows of a grouped matmul that belong to a token, where that is known.
        loops_of_unknown_length: Loops whose bodies were counted once; empty is good.
        seconds: What compiling took.
        model_flops: What the model needs of a step on one device, by its own count; 0 if unknown.
        stages: Sizes from jaxpr to the compiled program.
        collective_groups: What is sent, by groups of devices.
        fusion_kinds: Fusions by kind and phase.
        deepest_fusions: Those with the most instructions.
        memory_shares: Bytes of the arguments and of what else is held, by what they are.
        cycle_shares: Cycles by what is done and phase.
        findings: Of `moelib.planning.lint.rules`.
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
    model_flops: int = 0
    stages: tuple[Stage, ...] = ()
    collective_groups: tuple[CollectiveGroups, ...] = ()
    fusion_kinds: tuple[Fusions, ...] = ()
    deepest_fusions: tuple[DeepFusion, ...] = ()
    memory_shares: tuple[Share, ...] = ()
    cycle_shares: tuple[Share, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def executed_flops(self) -> int:
        """FLOPs of matmuls, those that kernels say they do included."""
        return self.matmul_flops + sum(kernel.flops for kernel in self.kernels)

    @property
    def executed_over_model_flops(self) -> float | None:
        """How many FLOPs run for each that the model needs; None if that is not known.

        Recomputation, rows of grouped matmuls that no token fills, and masked attention are in it.
        """
        return self.executed_flops / self.model_flops if self.model_flops else None

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
