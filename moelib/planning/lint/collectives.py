"""Lint of collectives: unnecessary gathers, and collectives that could overlap or run once."""

import re
from collections.abc import Iterator
from typing import Any

from moelib.core.config_paths import get
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction
from moelib.planning.hlo.values import COLLECTIVES
from moelib.planning.lint.facts import Step, is_shard
from moelib.planning.report.collectives import (
    collective_instructions,
    is_asynchronous,
    result_bytes,
)
from moelib.planning.report.step_report import Finding
from moelib.train.compiler_options import BY_DEVICE_KIND

_REMATERIALIZED = re.compile(r"\.remat\d*(\.|$)")  # XLA's names of rematerialized instructions.

# XLA options that make a kind of collective asynchronous on TPUs. GPU compilers decide themselves.
_TPU_OPTIONS = {
    "all-to-all": "xla_tpu_enable_async_all_to_all",
    "all-gather": "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "reduce-scatter": "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "all-reduce": "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
}


def gathers_over_experts(step: Step) -> Iterator[Finding]:
    """Finds weights of experts, or tokens for experts, gathered over the axis `expert`.

    Each device has its own experts, so that only tokens assigned to them need to be sent.
    """
    if step.facts.mesh.get("expert", 1) == 1 or not step.facts.num_experts:
        return
    for computation, each, axes in _large(step, "all-gather"):
        if "expert" not in axes:
            continue
        sizes, dimension = values.dimensions(values.result_shape(each)), _gathered_dimension(each)
        if _is_weight(step, sizes, experts=True):
            if dimension < len(sizes) and sizes[dimension] in step.facts.num_experts:
                yield step.finding(
                    "all-gather for all-to-all", "warning", computation, each,
                    advice="weights of all experts are gathered on each device; use a dispatcher "
                    "that sends tokens to the experts by all-to-all.",
                )  # fmt: skip
        elif not _is_weight(step, sizes) and _in_experts(step, each.op_name):
            severity = "hint" if _uses_ring(step, each.op_name) else "warning"
            yield step.finding(
                "all-gather for all-to-all", severity, computation, each,
                advice="tokens of all devices are gathered, but each device needs only those of "
                "its experts; a dispatcher that sends them by all-to-all moves fewer bytes.",
            )  # fmt: skip


def float32_gathers(step: Step) -> Iterator[Finding]:
    """Finds weights gathered in float32 and then computed with in a smaller dtype."""
    dtype = step.facts.train_dtype
    if dtype is None or dtype == "float32":
        return
    cast = {_layer_shape(a.shape, a.axes) for a in step.facts.parameters() if a.cast}
    for computation, each, _ in _large(step, "all-gather"):
        shape = values.result_shape(each).lstrip("(")
        if not shape.startswith("f32[") or step.config_path(each.op_name) == "learner":
            continue
        if tuple(size for size in values.dimensions(shape) if size > 1) in cast:
            yield step.finding(
                "float32 gather of weights", "warning", computation, each,
                path="train_dtype",
                advice=f"a weight is gathered in float32 and used in {dtype}: cast it first (in "
                "the layer's own gather, or with a shard_map whose in_specs take split weights) to "
                "halve the bytes.",
            )  # fmt: skip


def invariant_collectives(step: Step) -> Iterator[Finding]:
    """Finds collectives in a loop with the same result in each iteration."""
    for caller, loop in step.program.unfused():
        body = step.program.computations.get(dict(loop.calls).get("body", ""))
        if loop.opcode != "while" or body is None or body.executions <= caller.executions:
            continue
        iterations, fixed = body.executions // caller.executions, _invariant(body)
        for each in body.instructions.values():
            if not each.operands or not fixed.issuperset(each.operands):
                continue
            for computation, collective in _collectives_of(step, body, each):
                if result_bytes(collective) >= step.thresholds.collective:
                    yield step.finding(
                        "loop-invariant collective", "hint", computation, collective,
                        advice=f"it sends the same data in each of {iterations} iterations of a "
                        "loop; send it once before the loop if its result fits in memory.",
                    )  # fmt: skip


def repeated_collectives(step: Step) -> Iterator[Finding]:
    """Finds collectives that XLA repeats instead of holding their results."""
    for kind in COLLECTIVES:
        for computation, each, _ in _large(step, kind):
            if _REMATERIALIZED.search(each.name):
                yield step.finding(
                    "repeated collective", "hint", computation, each,
                    advice="XLA repeats it instead of holding its result, because it expects "
                    "memory to be short; a smaller batch per device, or a remat that saves less, "
                    "may cost less.",
                )  # fmt: skip


def _collectives_of(
    step: Step, body: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yields a collective, or the collectives that an asynchronous instruction wraps."""
    inside = [step.program.computations.get(name) for _, name in instruction.calls]
    held = [(c, each) for c in inside if c is not None for each in c.instructions.values()]
    for computation, each in [(body, instruction), *held]:
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            yield computation, each


def synchronous_collectives(step: Step) -> Iterator[Finding]:
    """Finds synchronous collectives that an unset compiler option would make asynchronous."""
    for kind in COLLECTIVES:
        if not (options := _missing_options(step, kind)):
            continue
        for computation, each, _ in _large(step, kind):
            size = result_bytes(each) * computation.executions
            if is_asynchronous(computation, each) or size < step.thresholds.synchronous:
                continue
            yield step.finding(
                "synchronous collective", "hint", computation, each,
                path="compiler_options",
                advice=f"the device waits for this {kind}; compiler_options {options} let it "
                "overlap with independent work.",
            )  # fmt: skip


def _missing_options(step: Step, kind: str) -> dict[str, str]:
    """Returns the unset options that would make a kind of collective asynchronous."""
    facts, wanted = step.facts, dict[str, str]()
    if facts.platform == "tpu" and kind in _TPU_OPTIONS:
        option = _TPU_OPTIONS[kind]
        known = BY_DEVICE_KIND.get(facts.device_kind, {})
        if option in known:
            wanted = {k: v for k, v in known.items() if "sparse_core" in k or "_sc" in k}
        elif kind == "all-to-all":
            wanted = {option: "true"}
    return {k: v for k, v in wanted.items() if facts.compiler_options.get(k) != v}


def _large(step: Step, wanted: str) -> Iterator[tuple[Computation, Instruction, tuple[str, ...]]]:
    """Yields (computation, instruction, mesh axes) of the large collectives of a kind."""
    for kind, computation, each in collective_instructions(step.program):
        if kind == wanted and result_bytes(each) >= step.thresholds.collective:
            axes = values.axes_of_groups(values.device_groups(each), step.facts.mesh)
            yield computation, each, axes


def _gathered_dimension(instruction: Instruction) -> int:
    text = instruction.attribute("dimensions").strip("{}")
    return int(text) if text.isdigit() else 0


def _layer_shape(shape: tuple[int, ...], axes: tuple[object, ...]) -> tuple[int, ...]:
    """Returns the sizes above 1 of one layer's parameter."""
    own = shape[1:] if axes[:1] == ("layers",) else shape
    return tuple(size for size in own if size > 1)


def _is_weight(step: Step, sizes: list[int], *, experts: bool = False) -> bool:
    """Returns whether sizes are those of a parameter, or of a shard of one."""
    found = sorted(size for size in sizes if size > 1)
    return any(
        is_shard(found, sorted(_layer_shape(each.shape, each.axes)), step.facts.mesh)
        for each in step.facts.parameters()
        if not experts or "experts" in each.axes
    )


def _uses_ring(step: Step, op_name: str) -> bool:
    """Returns whether the layer that made an instruction has a dispatcher that gathers tokens."""
    layer = _layer_config(step, op_name)
    dispatcher = dict(layer.items()).get("dispatcher") if layer is not None else None
    klass = None if dispatcher is None else dict(dispatcher.items()).get("klass")
    return isinstance(klass, type) and issubclass(klass, RingDispatcher)


def _in_experts(step: Step, op_name: str) -> bool:
    """Returns whether a layer with experts made an instruction, outside its shared experts."""
    layer = _layer_config(step, op_name)
    return layer is not None and "num_experts" in dict(layer.items())


def _layer_config(step: Step, op_name: str) -> Any:
    """Returns the config of the layer that made an instruction, or None if unknown."""
    path, model = step.config_path(op_name), step.facts.model
    if model is None or path == "learner" or "shared_experts" in path:
        return None
    inside = path.removeprefix("model").lstrip(".")
    return get(model.config, inside) if inside else model.config


# Opcodes whose results may differ for the same operands, or that are not analyzed.
_UNKNOWN = {"parameter", "while", "conditional", "call", "custom-call", "rng", "infeed", "recv",
            "rng-bit-generator", "rng-get-and-update-state", "partition-id"}  # fmt: skip


def _invariant(body: Computation) -> set[str]:
    """Returns the instructions of a loop's body with the same result in every iteration."""
    root = next((each for each in body.instructions.values() if each.is_root), None)
    if root is None or root.opcode != "tuple":
        return set()
    inputs = {n for n, each in body.instructions.items() if each.opcode == "parameter"}
    fixed = {
        name
        for i, name in enumerate(root.operands)
        if (each := body.instructions.get(name)) is not None
        and each.opcode == "get-tuple-element"
        and inputs.issuperset(each.operands)
        and each.attribute("index") == str(i)
    }
    for name, each in body.instructions.items():
        known = each.opcode not in _UNKNOWN or '"AllocateBuffer"' in each.attributes
        if known and fixed.issuperset(each.operands):
            fixed.add(name)
    return fixed
