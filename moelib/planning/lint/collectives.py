"""Lint of collectives: unnecessary gathers."""

from collections.abc import Iterable, Iterator
from typing import Any

from moelib.core.config_text import get
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction
from moelib.planning.lint.facts import Step, is_shard
from moelib.planning.report.collectives import collective_instructions
from moelib.planning.report.step_report import Finding, Row


def gathers_over_experts(step: Step) -> Iterator[Finding]:
    """Finds weights of experts, or tokens for experts, gathered over the axis `expert`.

    Each device has its own experts, so that only tokens assigned to them need to be sent.
    """
    if step.facts.mesh.get("expert", 1) == 1 or not step.facts.num_experts:
        return
    for computation, each, axes, shape in _large(step, "all-gather"):
        if "expert" not in axes:
            continue
        sizes, dimension = values.dimensions(shape), _gathered_dimension(each)
        if _is_weight(step, sizes, experts=True):
            if dimension < len(sizes) and sizes[dimension] in step.facts.num_experts:
                yield step.finding(
                    "all-gather for all-to-all", "warning", computation, each, shape=shape,
                    advice="weights of all experts are gathered on each device; use a dispatcher "
                    "that sends tokens to the experts by all-to-all.",
                )  # fmt: skip
        elif not _is_weight(step, sizes) and _in_experts(step, each.op_name):
            severity = "hint" if _uses_ring(step, each.op_name) else "warning"
            yield step.finding(
                "all-gather for all-to-all", severity, computation, each, shape=shape,
                advice="tokens of all devices are gathered, but each device needs only those of "
                "its experts; a dispatcher that sends them by all-to-all moves fewer bytes.",
            )  # fmt: skip


def float32_gathers(step: Step) -> Iterator[Finding]:
    """Finds weights gathered in float32 and then computed with in a smaller dtype."""
    dtype = step.facts.train_dtype
    if dtype is None or dtype == "float32":
        return
    cast = {_layer_shape(a.shape, a.axes) for a in step.facts.parameters() if a.cast}
    for computation, each, _, shape in _large(step, "all-gather"):
        if not shape.startswith("f32[") or step.config_path(each.op_name) == "learner":
            continue
        if tuple(size for size in values.dimensions(shape) if size > 1) in cast:
            yield step.finding(
                "float32 gather of weights", "warning", computation, each,
                path="train_dtype", shape=shape,
                advice=f"a weight is gathered in float32 and used in {dtype}: cast it first (in "
                "the layer's own gather, or with a shard_map whose in_specs take split weights) to "
                "halve the bytes.",
            )  # fmt: skip


def exposed_waits(
    waits: Iterable[Row], seconds: float, *, at_least: float = 0.02
) -> Iterator[Finding]:
    """Finds what a played step of `seconds` waits for: rows of `StepReport.waits`, by source."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in waits:
        groups.setdefault((row["kind"], row["source"]), []).append(row)
    for (kind, source), rows in groups.items():
        share = sum(row["seconds"] for row in rows) / seconds
        if share < at_least:
            continue
        axes = sorted({axis for row in rows for axis in row["axes"]})
        phases = ", ".join(dict.fromkeys(row["phase"] for row in rows))
        begins = "begins too late" if rows[0]["asynchronous"] else "is synchronous"
        yield Finding(
            "wait for a collective",
            "hint",
            f"{kind} over {' '.join(axes)} ({phases})",
            "mesh_shape",
            f"{100 * share:.0f}% of the played step waits for it: it {begins}, or its links carry "
            "more than the step computes meanwhile; send less over these axes, or enlarge the "
            "batch of a device.",
            locations=tuple(source.split(" < ")) if source else (),
            count=len(rows),
        )


def _large(
    step: Step, wanted: str
) -> Iterator[tuple[Computation, Instruction, tuple[str, ...], str]]:
    """Yields (computation, instruction, mesh axes, shape) of the large results of a kind.

    Compilers combine collectives into one with a result for each array.
    """
    for kind, computation, each in collective_instructions(step.program):
        for shape in values.tuple_elements(values.result_shape(each)) if kind == wanted else ():
            if values.shape_bytes(shape) >= step.thresholds.collective:
                yield computation, each, values.group_of(each, step.facts.mesh)[0], shape


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
