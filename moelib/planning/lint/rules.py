"""Lint of a compiled training step: rules about unnecessary cost.

Each rule is a function of the parsed program and the facts of its trainer. A finding names an
instruction, its bytes, and the field of the config that decides.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from moelib.planning.hlo.program import Program
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint import arrays, collectives, compute
from moelib.planning.lint.facts import Facts, Step, Thresholds
from moelib.planning.report.step_report import Finding

_DEFAULT_THRESHOLDS = Thresholds()

RULES = (
    compute.dense_grouped_matmuls,
    collectives.gathers_over_experts,
    collectives.float32_gathers,
    arrays.unsplit_activations,
    arrays.replicated_state,
    arrays.padding,
    arrays.copies,
)


def lint(
    program: Program,
    facts: Facts,
    *,
    source_map: SourceMap | None = None,
    thresholds: Thresholds = _DEFAULT_THRESHOLDS,
    model_flops: int = 0,
    traced: Any = None,
) -> list[Finding]:
    """Returns the findings in a compiled step, warnings first, then by bytes per step.

    Findings of one rule with the same advice for the same config path become one: the largest, with
    their number.

    Args:
        program: The step.
        facts: Settings of its trainer.
        source_map: Source lines of its instructions, if known.
        thresholds: Sizes from which on to report.
        model_flops: FLOPs per step and device by the model's own count; 0 if unknown.
        traced: The step as a `jax.stages.Traced`, if available.
    """
    step = Step(program, facts, source_map or SourceMap(""), thresholds)
    found = [finding for rule in RULES for finding in rule(step)]
    found += compute.more_flops_than_the_model(step, model_flops)
    if traced is not None:
        found += compute.traced_dense_grouped_matmuls(step, traced)
        found += compute.traced_large_arrays(step, traced)
    return merged(found)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Returns sorted findings, with those of the same rule, config path and advice as one."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for each in findings:
        key = each.rule, each.config_path, each.advice
        if each.executions == 0 and not each.op_name:
            key = (*key[:2], each.instruction)  # Arrays of the state stay separate.
        groups.setdefault(key, []).append(each)
    kept = [
        dataclasses.replace(max(group, key=_cost), count=sum(each.count for each in group))
        for group in groups.values()
    ]
    return sorted(kept, key=lambda each: (each.severity != "warning", -_cost(each)))


def _cost(finding: Finding) -> float:
    return finding.bytes * (finding.executions or 1)
