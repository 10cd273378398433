"""Lint of collectives: unnecessary gathers, and collectives that could overlap or run once."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moelib.core.config_text import get
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.parallel.mesh import describe_mesh
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

# Options for collectives on the SparseCores of a TPU. GPU compilers decide themselves.
_SPARSE_CORE = re.compile("sparse_core|_sc(_|$)|prefer_async")
_MANY_DEVICES = 16  # Devices of a group from which on another mesh may avoid an all-gather.


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
        iterations, fixed = round(body.executions / caller.executions), _invariant(body)
        for each in body.instructions.values():
            if not each.operands or not fixed.issuperset(each.operands):
                continue
            if all(_is_zero(step, body, body.instructions[name]) for name in each.operands):
                continue  # The first turn of a windowed matmul passes on zeros.
            for computation, collective in _collectives_of(step, body, each):
                if result_bytes(collective) >= step.thresholds.collective:
                    yield step.finding(
                        "loop-invariant collective", "hint", computation, collective,
                        advice=f"it sends the same data in each of {iterations} iterations of a "
                        "loop; send it once before the loop if its result fits in memory.",
                    )  # fmt: skip


def _is_zero(step: Step, computation: Computation, each: Instruction) -> bool:
    """Returns whether an instruction makes an array of zeros."""
    if each.is_fusion:
        computation = step.program.computations[dict(each.calls)["calls"]]
        each = computation.root
    if each.opcode in ("broadcast", "copy", "bitcast", "convert"):
        made = computation.instructions.get(each.operands[0])
        return made is not None and _is_zero(step, computation, made)
    return each.opcode == "constant" and each.arguments in ("0", "-0")


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
    """Finds large synchronous collectives on TPUs that an option or another mesh may change."""
    if step.facts.platform != "tpu":
        return  # GPU compilers decide themselves.
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        missing = _unset_options(step, kind)
        for computation, each, axes in _large(step, kind):
            size = result_bytes(each) * computation.executions
            if is_asynchronous(computation, each) or size < step.thresholds.synchronous:
                continue
            wide = math.prod(step.facts.mesh[axis] for axis in axes) >= _MANY_DEVICES
            if missing or kind == "reduce-scatter" or (kind == "all-gather" and wide):
                yield step.finding(
                    "synchronous collective", "hint", computation, each,
                    path="compiler_options" if missing else "mesh_shape",
                    advice=f"the device waits for this {kind}, which could overlap with "
                    f"independent work; {_cure(step, missing, axes)}.",
                )  # fmt: skip


def _unset_options(step: Step, kind: str) -> dict[str, str]:
    """Returns the unset options that make a kind of collective asynchronous or more direct."""
    facts = step.facts
    known = BY_DEVICE_KIND.get(facts.device_kind, {}) if facts.platform == "tpu" else {}
    wanted = {k: v for k, v in known.items() if _SPARSE_CORE.search(k)}
    if kind == "all-to-all":
        wanted = {"xla_tpu_enable_async_all_to_all": "True"}
    return {k: v for k, v in wanted.items() if facts.compiler_options.get(k) != v}


def _cure(step: Step, missing: Mapping[str, str], axes: Iterable[str]) -> str:
    """Returns what to set: options of the compiler, or another mesh."""
    if missing:
        return f"set compiler_options {dict(missing)}"
    sizes = describe_mesh({axis: step.facts.mesh[axis] for axis in axes})
    return f"no compiler option is left for it; a mesh other than {sizes} may avoid it"


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
    klass = getattr(getattr(layer, "dispatcher", None), "klass", None)
    return isinstance(klass, type) and issubclass(klass, RingDispatcher)


def _in_experts(step: Step, op_name: str) -> bool:
    """Returns whether a layer with experts made an instruction, outside its shared experts."""
    layer = _layer_config(step, op_name)
    return layer is not None and "num_experts" in layer


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
    if body.root.opcode != "tuple":
        return set()
    inputs = {n for n, each in body.instructions.items() if each.opcode == "parameter"}
    fixed = {
        name
        for i, name in enumerate(body.root.operands)
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
