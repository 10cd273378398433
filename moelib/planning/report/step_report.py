"""The report of a compiled training step: numbers by key, and rows of what they are made of.

All numbers are per step and device; `count` describes how they are counted.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

SMALL_BYTES = 1024  # Collectives up to this size carry scalars or counts and cost latency only.


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
class StepReport:
    """The numbers of a compiled training step, and their parts."""

    name: str
    topology: str
    mesh: dict[str, int]  # Sizes of the axes, outermost first.
    numbers: dict[str, Any]  # By the keys of `figures.SECTIONS`; unknown ones are absent.
    sources: tuple[Source, ...] = ()  # Costliest first.
    costliest: tuple[Costly, ...] = ()
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    fusion_kinds: tuple[Fusions, ...] = ()
    cycle_shares: tuple[Share, ...] = ()  # Cycles by kind of work and phase.
    memory_shares: tuple[Share, ...] = ()  # Bytes by content.
    stages: tuple[Stage, ...] = ()  # From the jaxpr to the compiled program.
    findings: tuple[Finding, ...] = ()
    largest: tuple[Finding, ...] = ()  # The largest temporaries, one of each operation.
    loops_of_unknown_length: tuple[str, ...] = ()  # Loops whose bodies count once.

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StepReport":
        """Returns the report of `to_json`. Raises TypeError for unknown fields."""
        values = json.loads(text)
        for name, kind in _ROWS.items():
            values[name] = [kind(**_with_tuples(row)) for row in values.get(name, ())]
        return cls(**_with_tuples(values))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


_ROWS: Mapping[str, Any] = {  # Kinds of rows by field.
    "sources": Source,
    "costliest": Costly,
    "collectives": Collective,
    "kernels": Kernel,
    "fusion_kinds": Fusions,
    "cycle_shares": Share,
    "memory_shares": Share,
    "stages": Stage,
    "findings": Finding,
    "largest": Finding,
}
