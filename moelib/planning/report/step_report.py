"""The report of a compiled training step: figures by key, and rows.

All figures are per step and device; `count` describes how they are counted.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

SMALL_BYTES = 1024  # Collectives up to this size carry scalars or counts and cost latency only.
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind along the same mesh axes."""

    kind: str  # Such as "all-gather".
    axes: Sequence[str]  # Mesh axes along which the devices of a group differ, or "network".
    group_size: int  # Devices per group.
    count: int = 0  # Number in the program.
    # Those that the program starts and awaits apart; what is computed between may be nothing.
    asynchronous: int = 0
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
    locations: Sequence[str] = ()  # Source lines, innermost first.
    count: int = 1  # Number of instructions with the same rule, config_path and advice.


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A compiled training step: figures by the keys of `figures.SECTIONS`, and rows."""

    name: str
    topology: str
    mesh: Mapping[str, int]  # Sizes of the axes, outermost first.
    figures: Mapping[str, float]  # Without those that are unknown.
    collectives: Sequence[Collective] = ()
    kernels: Sequence[Kernel] = ()
    findings: Sequence[Finding] = ()
    largest: Sequence[Finding] = ()  # The largest temporaries, one of each operation.
    loops_of_unknown_length: Sequence[str] = ()  # Loops whose bodies count once.
    stages: Sequence[Row] = ()  # Sizes from the jaxpr to the compiled program.
    fusions: Sequence[Row] = ()  # Number by kind and phase.
    cycles: Sequence[Row] = ()  # By kind of work and phase.
    sources: Sequence[Row] = ()  # Cycles and instructions by function, costliest first.
    costliest: Sequence[Row] = ()  # Instructions, with the cycles of all executions.
    waits: Sequence[Row] = ()  # Seconds that the played step waits for collectives, by source.
    busy: Sequence[Row] = ()  # Seconds in which the links along mesh axes carry bytes.

    def __repr__(self) -> str:
        where, found = f"{self.name} on {self.topology}", f"{len(self.findings)} findings"
        return f"StepReport({where}, mesh {dict(self.mesh)}, {found})"

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepReport":
        """Returns the report of `to_json`."""
        made: dict[str, Any] = dict(values)
        kinds = {"collectives": Collective, "kernels": Kernel}
        for name, kind in (kinds | {"findings": Finding, "largest": Finding}).items():
            made[name] = [kind(**row) for row in values[name]]
        return cls(**made)
