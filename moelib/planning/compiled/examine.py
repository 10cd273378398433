"""Examination of a trainer's compiled step: its figures, and the findings of lint."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from moelib.core.config_text import sub_configs
from moelib.parallel.pipeline.engine import ENDS, SLOTS, branch_shares
from moelib.planning.estimate.candidates import own_mesh
from moelib.planning.estimate.links import Layout, Links
from moelib.planning.hardware.topologies import TopologyShape
from moelib.planning.hlo.program import Shares, parse
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.arrays import largest_temporaries
from moelib.planning.lint.collectives import exposed_waits
from moelib.planning.lint.compute import remats_that_save_nothing
from moelib.planning.lint.facts import Facts, facts_of
from moelib.planning.lint.facts import Step as LintStep
from moelib.planning.lint.rules import lint, merged
from moelib.planning.report.count import count
from moelib.planning.report.step_report import Row, StepReport
from moelib.planning.report.timeline import play, times
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
    shape: TopologyShape | None,
    seconds: Mapping[str, float] | None = None,
) -> StepReport:
    """Returns the report of a `SpmdTrainer`'s step, with findings of lint.

    Args:
        trainer: The trainer.
        step: Its step.
        name: Name of the step.
        topology: Name of the hardware.
        shape: Its shape, for the step played in its order; None if it is unknown.
        seconds: Seconds of stages of the compilation, by stage.
    """
    text = step.compiled.as_text()
    program, mesh = parse(text, shares_of_branches(trainer)), trainer.mesh()
    facts, model_flops = facts_of(trainer), _model_flops(trainer)
    rows_routed, source_map = _rows_routed(trainer), SourceMap(text)
    counts = count(
        step.compiled, program, mesh.shape, rows_routed=rows_routed, model_flops=model_flops
    )
    found = lint(program, facts, source_map=source_map, model_flops=model_flops, traced=step.traced)
    figures, played = counts["figures"], None
    if shape is not None:
        links = links_of(trainer, shape)
        played = play(program, mesh.shape, links, shape.accelerator, source_map)
        figures |= times(program, played, shape.accelerator, figures)
        found += exposed_waits(played.wait_rows(), played.seconds)
    figures |= {f"memory.{part}": size for part, size in state_bytes(facts).items()}
    figures |= {f"seconds.{stage}": value for stage, value in (seconds or {}).items()}
    sizes = text.count("\n"), figures["instructions"], figures["fusions"]
    stages = [*_stages_before(step), _stage("HLO, optimized", *sizes)]
    return StepReport(
        name=name,
        topology=topology,
        mesh=dict(mesh.shape),
        **counts,
        findings=merged([*found, *remats_that_save_nothing(trainer)]),
        largest=largest_temporaries(LintStep(program, facts, source_map)),
        stages=stages,
        waits=() if played is None else played.wait_rows(),
        busy=() if played is None else played.busy_rows(),
    )


def links_of(trainer: Any, shape: TopologyShape) -> Links:
    """Returns the links of a topology, as the mesh of a `SpmdTrainer` uses them."""
    mesh, own = trainer.mesh(), own_mesh(trainer.config, shape)
    if shape.accelerator.platform != "tpu":
        return Links(shape, own)
    one_slice = tuple(slice(own.inside.get(axis, 1)) for axis in mesh.axis_names)
    devices = mesh.devices[one_slice].reshape([*own.inside.values()])
    return Links(shape, own, lambda topology, sizes: Layout(topology, sizes, devices))


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
    found = (getattr(x, "num_experts_per_token", None) for _, x in sub_configs(cfg.model))
    counts = {number for number in found if isinstance(number, int)}
    return tokens * counts.pop() if len(counts) == 1 else None


def _model_flops(trainer: Any) -> int:
    """Returns the FLOPs per step and device by the model's own count; 0 if unknown."""
    batch = trainer.config.input
    tokens = batch.global_batch_size * batch.seq_len
    return int((trainer.flops_per_token() or 0) * tokens / trainer.mesh().size)


def _stages_before(step: Step) -> list[Row]:
    """Returns the sizes of a step before it is compiled."""
    before = step.hlo_before().splitlines()
    instructions = [line for line in before if " = " in line and line.startswith(" ")]
    fusions = sum(" fusion(" in line for line in instructions)
    return [
        _stage("jaxpr", str(step.traced.jaxpr).count("\n") + 1),
        _stage("StableHLO", step.lowered.as_text().count("\n")),
        _stage("HLO, before", len(before), len(instructions), fusions),
    ]


def _stage(name: str, lines: int, instructions: int = 0, fusions: int = 0) -> Row:
    return {"name": name, "lines": lines, "instructions": instructions, "fusions": fusions}


def state_bytes(facts: Facts) -> dict[str, int]:
    """Returns the bytes of parameters and of the learner's state in a device's own memory."""
    sums = dict.fromkeys(("model", "learner"), 0)
    for each in facts.state:
        sums[each.path.partition("/")[0]] += 0 if each.on_host else each.shard_bytes
    return {"parameters": sums["model"], "learner": sums["learner"]}
