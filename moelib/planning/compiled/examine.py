"""Examination of a trainer's compiled step: its figures, and the findings of lint."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_paths import sub_configs
from moelib.parallel.mesh import slices
from moelib.planning.hlo.program import parse
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.rules import lint_trainer
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
    """Returns the report of a trainer's step, with findings of lint.

    Args:
        trainer: A `SpmdTrainer`.
        traced: The step, as `trainer.trace_train_step` returns it.
        lowered: The same step, lowered.
        compiled: The same step, compiled.
        name: Name of the step in the report.
        topology: Topology that it was compiled for.
        seconds: Durations of compilation.
        num_costliest: Number of costliest instructions in the report.
        compiler_options: Options of the compilation; by default those of the trainer.
    """
    text = compiled.as_text()
    program, mesh, model_flops = parse(text), trainer.mesh(), model_flops_per_device(trainer)
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
        stages=_stages(traced, lowered),
        slices=slice_indices(mesh.devices.flat),
    )
    findings = lint_trainer(
        trainer,
        program,
        SourceMap(text),
        traced=traced,
        model_flops=model_flops,
        compiler_options=compiler_options,
    )
    return dataclasses.replace(
        report, memory_shares=memory_shares(trainer, report.memory), findings=tuple(findings)
    )


def slice_indices(devices: Iterable[Any]) -> list[int]:
    """Returns the slice of each device; 0 for devices that do not report one."""
    devices = list(devices)
    index = {id(d): i for i, each in enumerate(slices(devices) or [devices]) for d in each}
    return [index[id(device)] for device in devices]


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


def model_flops_per_device(trainer: Any) -> int:
    """Returns the FLOPs per step and device by the model's own count; 0 if unknown."""
    batch = trainer.config.input
    tokens = batch.global_batch_size * batch.seq_len
    return int((trainer.flops_per_token() or 0) * tokens / trainer.mesh().size)


def _stages(traced: Any, lowered: Any) -> tuple[Stage, ...]:
    """Returns the sizes of a step before it is compiled."""
    before = hlo_before(lowered).splitlines()
    instructions = [line for line in before if " = " in line and line.startswith(" ")]
    fusions = sum(" fusion(" in line for line in instructions)
    return (
        Stage("jaxpr", str(traced.jaxpr).count("\n") + 1),
        Stage("StableHLO", lowered.as_text().count("\n")),
        Stage("HLO, before", len(before), len(instructions), fusions),
    )


def hlo_before(lowered: Any) -> str:
    """Returns the text of the compiler's input, an HLO module for all devices."""
    return lowered.compiler_ir("hlo").as_hlo_text()


def memory_shares(trainer: Any, memory: Memory) -> tuple[Share, ...]:
    """Returns the bytes that a device holds during a step, by content.

    State in the host's memory is not included; it is part of `memory.host`.
    """
    shardings, specs = trainer.trainer_state_shardings, trainer.trainer_state_specs
    shares = {
        "parameters": _device_bytes(shardings.model, specs.model),
        "learner's state": _device_bytes(shardings.learner, specs.learner),
    }
    shares["other arguments"] = max(memory.arguments - sum(shares.values()), 0)
    shares["temporaries"] = memory.temporaries
    shares["new outputs"] = max(memory.outputs - memory.aliased, 0)
    shares["code"] = memory.code
    return tuple(Share(content, "", size) for content, size in shares.items())


def _device_bytes(shardings: Any, specs: Any) -> int:
    """Returns the bytes that described arrays take in a device's own memory."""
    sizes = jax.tree.map(
        lambda sharding, spec: (
            0
            if sharding.memory_kind == "pinned_host"
            else math.prod(sharding.shard_shape(spec.shape)) * jnp.dtype(spec.dtype).itemsize
        ),
        shardings,
        specs,
    )
    return sum(jax.tree.leaves(sizes))
