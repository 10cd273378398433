"""Lint of a compiled training step: what in it costs more than it needs to.

Each rule is a function over the parsed program and what the trainer meant. A finding names the
instruction, its bytes, and the place in the config that decides.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from moelib.planning.hlo.program import Program
from moelib.planning.hlo.source import Places
from moelib.planning.lint import arrays as lint_arrays
from moelib.planning.lint import collectives as lint_sends
from moelib.planning.lint import compute as lint_compute
from moelib.planning.lint.facts import Facts, Sizes, Step, facts_of
from moelib.planning.report.step_report import Finding

_ALL_SIZES = Sizes()

RULES = {
    "dense grouped matmul": lint_compute.dense_grouped_matmuls,
    "all-gather for all-to-all": lint_sends.gathers_over_experts,
    "float32 gather of weights": lint_sends.float32_gathers,
    "activation of all devices": lint_arrays.unsplit_activations,
    "replicated state": lint_arrays.replicated_state,
    "collective that its loop does not change": lint_sends.invariant_collectives,
    "collective again to save memory": lint_sends.repeated_collectives,
    "synchronous collective": lint_sends.synchronous_collectives,
    "padding": lint_arrays.padding,
    "copy of a large array": lint_arrays.copies,
}


def lint(
    program: Program,
    facts: Facts,
    *,
    places: Places | None = None,
    sizes: Sizes = _ALL_SIZES,
    model_flops: int = 0,
    traced: Any = None,
) -> list[Finding]:
    """Returns what the rules find in a compiled step, warnings first, then by bytes of a step.

    Findings of one rule with the same advice for the same place of the config are one, of the
    largest instruction, with their number.

    Args:
        program: The step.
        facts: What it was meant to be.
        places: Where its instructions were made, if that is known.
        sizes: From which bytes on to speak of something.
        model_flops: What the model needs of a step on one device; 0 if that is not known.
        traced: The step as a `jax.stages.Traced`, if it is at hand.
    """
    step = Step(program, facts, places or Places(""), sizes)
    found = [finding for rule in RULES.values() for finding in rule(step)]
    found += lint_compute.more_matmuls_than_the_model(step, model_flops)
    if traced is not None:
        found += lint_compute.dense_grouped_matmuls_traced(step, traced)
    return merged(found)


def lint_step(
    trainer: Any,
    program: Program,
    places: Places,
    *,
    traced: Any,
    model_flops: int,
    compiler_options: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Returns what `lint` finds in a trainer's own step, and in its remat."""
    facts = facts_of(trainer, compiler_options)
    found = lint(program, facts, places=places, model_flops=model_flops, traced=traced)
    return merged([*found, *lint_compute.remat_that_keeps_nothing(trainer)])


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings sorted, those that say the same of one place of the config as one."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for each in findings:
        key = each.rule, each.config_path, each.advice
        if each.executions == 0 and not each.op_name:
            key = (*key[:2], each.instruction)  # An array of the state speaks for itself.
        groups.setdefault(key, []).append(each)
    kept = [
        dataclasses.replace(max(group, key=_cost), count=sum(each.count for each in group))
        for group in groups.values()
    ]
    return sorted(kept, key=lambda each: (each.severity != "warning", -_cost(each)))


def _cost(finding: Finding) -> int:
    return finding.bytes * max(finding.executions, 1)
