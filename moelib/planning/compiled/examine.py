"""All that can be said of a trainer's compiled step: its figures, and what lint finds in it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_paths import sub_configs
from moelib.parallel.mesh import slices
from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import Places
from moelib.planning.lint.rules import lint_step
from moelib.planning.report.count import step_report
from moelib.planning.report.step_report import Memory, Seconds, Share, Stage, StepReport

_NO_SECONDS = Seconds()


def examine(
    trainer: Any,
    *,
    traced: Any,
    lowered: Any,
    compiled: Any,
    name: str,
    topology: str,
    seconds: Seconds = _NO_SECONDS,
    num_costliest: int = 20,
    compiler_options: Mapping[str, str] | None = None,
) -> StepReport:
    """Returns the report of a trainer's step, findings of lint included.

    Args:
        trainer: A `SpmdTrainer`.
        traced: The step as `trainer.trace_train_step` gives it.
        lowered: The same, lowered.
        compiled: The same, compiled.
        name: What the report calls it.
        topology: What it was compiled for.
        seconds: What compiling took.
        num_costliest: How many instructions the report lists.
        compiler_options: What the step was compiled with; by default what the trainer takes.
    """
    text = compiled.as_text()
    program, places = hlo.parse(text), Places(text)
    model_flops = model_flops_of_a_device(trainer)
    mesh = trainer.mesh()
    report = step_report(
        compiled,
        name=name,
        topology=topology,
        mesh=dict(mesh.shape),
        program=program,
        rows_routed=_rows_routed(trainer),
        seconds=seconds,
        num_costliest=num_costliest,
        model_flops=model_flops,
        stages=stages(traced, lowered),
        slices=_slice_of_each(mesh.devices.flat),
    )
    findings = lint_step(
        trainer,
        program,
        places,
        traced=traced,
        model_flops=model_flops,
        compiler_options=compiler_options,
    )
    return dataclasses.replace(
        report, memory_shares=memory_shares(trainer, report.memory), findings=tuple(findings)
    )


def _slice_of_each(devices: Iterable[Any]) -> list[int]:
    """Returns the slice of each device; 0 of those that do not say of which they are."""
    devices = list(devices)
    number = {id(d): i for i, each in enumerate(slices(devices) or [devices]) for d in each}
    return [number[id(device)] for device in devices]


def _rows_routed(trainer: Any) -> int | None:
    """Returns the rows that reach a device's experts if routing is balanced, or None.

    It is None without experts, and where layers differ in how many each token goes to.
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


def model_flops_of_a_device(trainer: Any) -> int:
    """Returns the FLOPs that the model needs for a step, over the devices; 0 if it does not say."""
    per_token, of_input = trainer.flops_per_token(), trainer.config.input
    tokens = of_input.global_batch_size * of_input.seq_len
    return int((per_token or 0) * tokens / trainer.mesh().size)


def stages(traced: Any, lowered: Any) -> tuple[Stage, ...]:
    """Returns the sizes of a step before it is compiled, in lines and instructions."""
    before = hlo_before(lowered).splitlines()
    instructions = [line for line in before if " = " in line and line.startswith(" ")]
    fusions = sum(" fusion(" in line for line in instructions)
    return (
        Stage("jaxpr", str(traced.jaxpr).count("\n") + 1),
        Stage("StableHLO", lowered.as_text().count("\n")),
        Stage("HLO, before", len(before), len(instructions), fusions),
    )


def hlo_before(lowered: Any) -> str:
    """Returns the text of the HLO that goes into the compiler, of all devices together."""
    return lowered.compiler_ir("hlo").as_hlo_text()


def memory_shares(trainer: Any, memory: Memory) -> tuple[Share, ...]:
    """Returns the bytes that a device holds during a step, by what they are.

    The state that waits in the host's memory is in `memory.host`, and not among these.
    """
    places, specs = trainer.trainer_state_shardings, trainer.trainer_state_specs
    shares = {
        "parameters": _bytes(places.model, specs.model),
        "learner's state": _bytes(places.learner, specs.learner),
    }
    shares["other arguments"] = max(memory.arguments - sum(shares.values()), 0)
    shares["temporaries"] = memory.temporaries
    shares["outputs in a place of their own"] = max(memory.outputs - memory.aliased, 0)
    shares["code"] = memory.code
    return tuple(Share(what, "", size) for what, size in shares.items())


def _bytes(shardings: Any, specs: Any) -> int:
    """Returns the bytes of its own memory that a device holds of what the specs describe."""
    sizes = jax.tree.map(
        lambda place, spec: (
            0
            if place.memory_kind == "pinned_host"
            else math.prod(place.shard_shape(spec.shape)) * jnp.dtype(spec.dtype).itemsize
        ),
        shardings,
        specs,
    )
    return sum(jax.tree.leaves(sizes))
