"""Lint of what a step sends: gathers that should not be, and collectives that could wait less."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from moelib.core.config_paths import get
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.planning.hlo import values as hlo_values
from moelib.planning.hlo.program import Computation, Instruction
from moelib.planning.lint.facts import Step
from moelib.planning.report.collectives import collective_instructions, runs_beside, sent_bytes
from moelib.planning.report.step_report import COLLECTIVES, Finding
from moelib.train.compiler_options import BY_DEVICE_KIND

_AGAIN = re.compile(r"\.remat\d*(\.|$)")  # What XLA's rematerialization calls a copy.

# Options of XLA that let a kind of collective run beside other work. On GPUs the compiler sees to
# that by itself, and none changes it (`compiler_options`).
_TPU_OPTIONS = {
    "all-to-all": "xla_tpu_enable_async_all_to_all",
    "all-gather": "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "reduce-scatter": "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "all-reduce": "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
}


def gathers_over_experts(step: Step) -> Iterator[Finding]:
    """Experts' weights, or tokens on the way to experts, gathered over the axis `expert`.

    Each device has experts of its own: what moves are the tokens that chose them.
    """
    if step.facts.mesh.get("expert", 1) == 1 or not step.facts.num_experts:
        return
    for computation, each, axes in _large(step, "all-gather"):
        if "expert" not in axes:
            continue
        sizes, dimension = hlo_values.dimensions(hlo_values.result_shape(each)), _gathered(each)
        if _is_weight(step, sizes, experts=True):
            if dimension < len(sizes) and sizes[dimension] in step.facts.num_experts:
                yield step.finding(
                    "all-gather for all-to-all", "warning", computation, each,
                    advice="weights of all experts are gathered on each device; let the rows "
                    "travel instead: a dispatcher that sends them to the experts by all-to-all.",
                )  # fmt: skip
        elif not _is_weight(step, sizes) and _in_experts(step, each.op_name):
            severity = "hint" if _chose_to_gather(step, each.op_name) else "warning"
            yield step.finding(
                "all-gather for all-to-all", severity, computation, each,
                advice="tokens of all devices are gathered where each needs only those that its "
                "experts were chosen by; a dispatcher that sends them by all-to-all moves fewer.",
            )  # fmt: skip


def float32_gathers(step: Step) -> Iterator[Finding]:
    """Weights gathered in float32 that the step then computes with in a smaller dtype."""
    dtype = step.facts.train_dtype
    if dtype is None or dtype == "float32":
        return
    cast = {_plain(a.shape, a.axes) for a in step.facts.parameters() if a.cast}
    for computation, each, _ in _large(step, "all-gather"):
        shape = hlo_values.result_shape(each).lstrip("(")
        if not shape.startswith("f32[") or step.config_path(each.op_name) == "learner":
            continue
        if tuple(size for size in hlo_values.dimensions(shape) if size > 1) in cast:
            yield step.finding(
                "float32 gather of weights", "warning", computation, each,
                path="train_dtype",
                advice=f"a weight is sent in float32 and computed with in {dtype}: twice the "
                "bytes; cast it before it is gathered (the layer's own gather, or a shard_map "
                "whose in_specs take the weight split).",
            )  # fmt: skip


def invariant_collectives(step: Step) -> Iterator[Finding]:
    """Collectives in a loop that give the same result in each of its turns."""
    for caller, loop in step.alone():
        body = step.program.computations.get(dict(loop.calls).get("body", ""))
        if loop.opcode != "while" or body is None or body.executions <= caller.executions:
            continue
        turns, fixed = body.executions // caller.executions, _invariant(body)
        for each in body.instructions.values():
            if not each.operands or not fixed.issuperset(each.operands):
                continue
            for computation, sends in _collectives_of(step, body, each):
                if sent_bytes(sends) >= step.sizes.collective:
                    yield step.finding(
                        "collective that its loop does not change", "hint", computation, sends,
                        advice=f"the same is sent in each of {turns} turns of a loop; send it "
                        "once, before the loop, if there is memory to hold it meanwhile.",
                    )  # fmt: skip


def repeated_collectives(step: Step) -> Iterator[Finding]:
    """Collectives that XLA runs again by itself, where results would have to be held for long."""
    for kind in COLLECTIVES:
        for computation, each, _ in _large(step, kind):
            if _AGAIN.search(each.name):
                yield step.finding(
                    "collective again to save memory", "hint", computation, each,
                    advice="XLA sends it again so as not to hold its result, for it thinks the "
                    "step's memory short; fewer rows at a time, or a remat that keeps less, may "
                    "cost less.",
                )  # fmt: skip


def _collectives_of(
    step: Step, body: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yields a collective, or those that an instruction wraps so that they run beside others."""
    inside = [step.program.computations.get(name) for _, name in instruction.calls]
    held = [(c, each) for c in inside if c is not None for each in c.instructions.values()]
    for computation, each in [(body, instruction), *held]:
        if each.opcode.removesuffix("-start") in COLLECTIVES:
            yield computation, each


def synchronous_collectives(step: Step) -> Iterator[Finding]:
    """Collectives that stop all work, where an option that is not set lets them run beside it."""
    for kind in COLLECTIVES:
        options = _missing_options(step, kind)
        if not options:
            continue
        for computation, each, _ in _large(step, kind):
            sent = sent_bytes(each) * computation.executions
            if runs_beside(computation, each) or sent < step.sizes.waited_for:
                continue
            yield step.finding(
                "synchronous collective", "hint", computation, each,
                path="compiler_options",
                advice=f"the device waits for {kind}; compiler_options {options} let the compiler "
                "run those beside other work that do not need each other's results.",
            )  # fmt: skip


def _missing_options(step: Step, kind: str) -> dict[str, str]:
    """Returns the options that would make a kind of collective asynchronous and are not set."""
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
        if kind == wanted and sent_bytes(each) >= step.sizes.collective:
            groups = hlo_values.device_groups(each)
            yield computation, each, hlo_values.axes_of_groups(groups, step.facts.mesh)


def _gathered(instruction: Instruction) -> int:
    text = instruction.attribute("dimensions").strip("{}")
    return int(text) if text.isdigit() else 0


def _plain(shape: tuple[int, ...], axes: tuple[object, ...]) -> tuple[int, ...]:
    """Returns the sizes of one layer's parameter, those of 1 left out."""
    own = shape[1:] if axes[:1] == ("layers",) else shape
    return tuple(size for size in own if size > 1)


def _is_weight(step: Step, sizes: list[int], *, experts: bool = False) -> bool:
    """Returns whether sizes are those of a parameter, or of its part if other axes split it."""
    mesh = step.facts.mesh.values()
    parts = {math.prod(some) for n in range(3) for some in itertools.combinations(mesh, n)}
    found = sorted(size for size in sizes if size > 1)
    for each in step.facts.parameters():
        if experts and "experts" not in each.axes:
            continue
        whole = sorted(_plain(each.shape, each.axes))
        if len(whole) == len(found) and all(
            w % f == 0 and w // f in parts for w, f in zip(whole, found, strict=True)
        ):
            return True
    return False


def _chose_to_gather(step: Step, op_name: str) -> bool:
    """Returns whether the config asks for a dispatcher that gathers tokens."""
    made_by = _made_by(step, op_name)
    dispatcher = dict(made_by.items()).get("dispatcher") if made_by is not None else None
    chosen = None if dispatcher is None else dict(dispatcher.items()).get("klass")
    return isinstance(chosen, type) and issubclass(chosen, RingDispatcher)


def _in_experts(step: Step, op_name: str) -> bool:
    """Returns whether a layer with experts made an instruction, outside its shared experts."""
    made_by = _made_by(step, op_name)
    return made_by is not None and "num_experts" in dict(made_by.items())


def _made_by(step: Step, op_name: str) -> Any:
    """Returns the config of the layer that made an instruction, or None if none is known."""
    path, model = step.config_path(op_name), step.facts.model
    if model is None or path == "learner" or "shared_experts" in path:
        return None
    inside = path.removeprefix("model").lstrip(".")
    return get(model.config, inside) if inside else model.config


# What may give another result with the same operands, or is not looked into.
_UNKNOWN = {"parameter", "while", "conditional", "call", "custom-call", "rng", "infeed", "recv",
            "rng-bit-generator", "rng-get-and-update-state", "partition-id"}  # fmt: skip


def _invariant(body: Computation) -> set[str]:
    """Returns the instructions of a loop's body that give the same in every turn."""
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
