"""Examination of a trainer's compiled step: its figures, and the findings of lint."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from moelib.core.config_paths import sub_configs
from moelib.parallel.pipeline.engine import ENDS, SLOTS, branch_shares
from moelib.planning.hlo.program import Shares, parse
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.arrays import largest_temporaries
from moelib.planning.lint.compute import remats_that_save_nothing
from moelib.planning.lint.facts import Facts, facts_of
from moelib.planning.lint.facts import Step as LintStep
from moelib.planning.lint.rules import lint, merged
from moelib.planning.report.count import against_model, count
from moelib.planning.report.step_report import Share, Stage, StepReport
from moelib.train.pipeline import layout_of


class Step(NamedTuple):
    """A training step at three stages of compilation."""

    traced: Any  # As `trainer.trace_train_step` returns it.
    lowered: Any
    compiled: Any

    def hlo_before(self) -> str:
        """Returns the text of the compiler's input, an HLO module for all devices."""
        return self.lowered.compiler_ir("hlo").as_hlo_text()


def examine(
    trainer: Any,
    step: Step,
    *,
    name: str,
    topology: str,
    seconds: Mapping[str, float] | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> StepReport:
    """Returns the report of a `SpmdTrainer`'s step, with findings of lint.

    `seconds` are those of tracing, lowering and compiling, and CPU seconds of compiling, by the
    names in `figures`. `compiler_options` are those of the compilation; by default the trainer's.
    """
    text = step.compiled.as_text()
    program, mesh = parse(text, shares_of_branches(trainer)), trainer.mesh()
    facts, model_flops = facts_of(trainer, compiler_options), _model_flops(trainer)
    counts = count(step.compiled, program, mesh.shape)
    numbers = counts.pop("numbers")
    numbers |= against_model(numbers, counts["kernels"], model_flops, _rows_routed(trainer))
    numbers |= {f"seconds.{name}": value for name, value in (seconds or {}).items()}
    source_map = SourceMap(text)
    findings = lint(
        program,
        facts,
        source_map=source_map,
        model_flops=model_flops,
        traced=step.traced,
    )
    sizes = text.count("\n"), numbers["instructions"], numbers["fusions"]
    return StepReport(
        name=name,
        topology=topology,
        mesh=dict(mesh.shape),
        numbers=numbers,
        **counts,
        stages=(*_stages_before(step), Stage("HLO, optimized", *sizes)),
        memory_shares=_memory_shares(facts, numbers),
        findings=tuple(merged([*findings, *remats_that_save_nothing(trainer)])),
        largest=tuple(largest_temporaries(LintStep(program, facts, source_map))),
    )


def shares_of_branches(trainer: Any) -> Shares:
    """Returns how often the mean rank of a trainer's pipeline runs the branches of its program."""
    if trainer.pipeline is None:
        return {}
    layout = layout_of(trainer.model, trainer.pipeline)
    slots = branch_shares(layout, trainer.config.num_microbatches)
    return {SLOTS: slots, ENDS: [1 / len(layout.sizes)]}


def _rows_routed(trainer: Any) -> int | None:
    """Returns the rows that reach a device's experts under balanced routing.

    The result is None without experts, and where layers differ in their experts per token.
    """
    cfg = trainer.config
    shape = cfg.input.global_batch_size, cfg.input.seq_len
    tokens = math.prod(trainer.batch_sharding.shard_shape(shape)) // cfg.num_microbatches
    counts = {
        inside.num_experts_per_token
        for _, inside in sub_configs(cfg.model)
        if isinstance(dict(inside.items()).get("num_experts_per_token"), int)
    }
    return tokens * counts.pop() if len(counts) == 1 else None


def _model_flops(trainer: Any) -> int:
    """Returns the FLOPs per step and device by the model's own count; 0 if unknown."""
    batch = trainer.config.input
    tokens = batch.global_batch_size * batch.seq_len
    return int((trainer.flops_per_token() or 0) * tokens / trainer.mesh().size)


def _stages_before(step: Step) -> tuple[Stage, ...]:
    """Returns the sizes of a step before it is compiled."""
    before = step.hlo_before().splitlines()
    instructions = [line for line in before if " = " in line and line.startswith(" ")]
    fusions = sum(" fusion(" in line for line in instructions)
    return (
        Stage("jaxpr", str(step.traced.jaxpr).count("\n") + 1),
        Stage("StableHLO", step.lowered.as_text().count("\n")),
        Stage("HLO, before", len(before), len(instructions), fusions),
    )


def state_bytes(facts: Facts) -> dict[str, int]:
    """Returns the bytes of the state in a device's own memory, by content."""
    sums = dict.fromkeys(("model", "learner"), 0)
    for each in facts.state:
        sums[each.path.partition("/")[0]] += 0 if each.on_host else each.shard_bytes
    return {"parameters": sums["model"], "learner's state": sums["learner"]}


def _memory_shares(facts: Facts, numbers: Mapping[str, Any]) -> tuple[Share, ...]:
    """Returns the bytes that a device holds during a step, by content, without the host's."""
    shares = state_bytes(facts)
    shares["other arguments"] = max(numbers["memory.arguments"] - sum(shares.values()), 0)
    shares["temporaries"] = numbers["memory.temporaries"]
    shares["new outputs"] = max(numbers["memory.outputs"] - numbers["memory.aliased"], 0)
    shares["code"] = numbers["memory.code"]
    return tuple(Share(content, "", size) for content, size in shares.items())
