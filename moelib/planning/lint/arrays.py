"""Lint of what a step holds: arrays that no axis splits, padding, copies between layouts."""

import itertools
import math
from collections.abc import Iterator

from moelib.planning.hlo import values as hlo_values
from moelib.planning.lint.facts import Step
from moelib.planning.report.step_report import Finding, StepReport

_PASSED_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}
_MUCH_PADDING = 1.5  # Times its own bytes.
_FALLS = 0.9  # Of the bytes before, when there are more devices: what does not fall.


def replicated_state(step: Step) -> Iterator[Finding]:
    """Arrays of the state that each device holds whole."""
    devices = 1
    for size in step.facts.mesh.values():
        devices *= size
    for each in step.facts.state if devices > 1 else ():
        if not each.split and each.shard_bytes >= step.sizes.state:
            axes = ", ".join(repr(axis) for axis in each.axes if axis) or "none"
            yield Finding(
                rule="replicated state",
                severity="warning",
                instruction=f"{each.path} {list(each.shape)}",
                bytes=each.shard_bytes,
                executions=0,
                op_name="",
                places=(),
                config_path="sharding_rules",
                advice=f"all {devices} devices hold it whole; its logical axes are {axes}: give "
                "one of them a mesh axis larger than 1.",
            )


def unsplit_activations(step: Step) -> Iterator[Finding]:
    """Arrays that hold the rows of all devices, though the mesh splits rows."""
    facts = step.facts
    if facts.row_parts == 1:
        return
    for computation, each in step.alone():
        if each.opcode in _PASSED_ON or each.opcode.endswith("-done"):
            continue
        shape = hlo_values.result_shape(each)
        if shape.startswith("(") or hlo_values.shape_bytes(shape) < step.sizes.activation:
            continue
        if _has_all_rows(step, hlo_values.dimensions(shape), each.opcode):
            yield step.finding(
                "activation of all devices", "warning", computation, each,
                advice=f"it has the rows of all {facts.row_parts} parts of the batch; let the "
                "layer keep it split: constrain it to the axes ('batch', ...), or leave out a "
                "constraint to no axes.",
            )  # fmt: skip


def _has_all_rows(step: Step, sizes: list[int], opcode: str) -> bool:
    """Returns whether sizes begin with all rows and their tokens.

    Rows and tokens in one dimension are believed of a gather only: elsewhere as many may be a
    device's own, those that it sends to several experts.
    """
    facts = step.facts
    real = [size for size in sizes if size > 1]
    if len(real) < 2 or _split_last(step, real[-1]) or _is_of_state(step, real):
        return False
    if len(real) > 2 and real[0] == facts.rows:
        return facts.seq_len % real[1] == 0
    gathers = opcode.removesuffix("-start") == "all-gather"
    return gathers and real[0] == facts.rows * facts.seq_len


def _is_of_state(step: Step, real: list[int]) -> bool:
    """Returns whether sizes larger than 1 are those of an array of the state, or of its shard.

    Layers are stacked in front in some, and are not split.
    """
    mesh = step.facts.mesh.values()
    parts = {math.prod(some) for n in range(4) for some in itertools.combinations(mesh, n)}
    for each in step.facts.state:
        stacked = each.axes[:1] == ("layers",)
        whole = [size for size in each.shape if size > 1]
        if len(whole) != len(real) or (stacked and each.shape[0] not in (1, real[0])):
            continue
        if all(w % f == 0 and w // f in parts for w, f in zip(whole, real, strict=True)):
            return True
    return False


def _split_last(step: Step, last: int) -> bool:
    """Returns whether the last dimension is a part of a model's, split in the place of the rows."""
    arrays = list(step.facts.parameters())
    named = [pair for each in arrays for pair in zip(each.axes, each.shape, strict=True)]
    whole = {size for name, size in named if name == "embed"}  # What activations end with.
    return last not in whole and last * step.facts.row_parts in {size for _, size in named}


def padding(step: Step) -> Iterator[Finding]:
    """Arrays whose last dimensions are so small that a TPU's tiles are mostly padding."""
    for computation, each in step.alone():
        if each.opcode in _PASSED_ON - {"parameter"} or each.shape.startswith("("):
            continue
        if each.opcode == "parameter" and computation.name != step.program.entry:
            continue
        plain, padded = hlo_values.shape_bytes(each.shape), hlo_values.padded_bytes(each.shape)
        if padded >= step.sizes.padded and padded >= _MUCH_PADDING * plain:
            yield step.finding(
                "padding", "hint", computation, each,
                num_bytes=padded,
                advice=f"{padded / max(plain, 1):.1f} times the array's own bytes, for its last "
                "dimensions are smaller than the device's tiles (8 by 128); join dimensions, or "
                "put a larger one last.",
            )  # fmt: skip


def copies(step: Step) -> Iterator[Finding]:
    """Copies and transpositions of large arrays that are no part of other work."""
    for computation, each in step.alone():
        if each.opcode not in ("copy", "transpose"):
            continue
        if hlo_values.shape_bytes(each.shape) >= step.sizes.copy:
            what = "transposed" if each.opcode == "transpose" else "copied"
            yield step.finding(
                "copy of a large array", "hint", computation, each,
                advice=f"it is {what} to another layout, read and written for nothing; use it in "
                "the order of dimensions in which it is made, or make it in that in which it is "
                "used.",
            )  # fmt: skip


def memory_that_does_not_fall(few: StepReport, many: StepReport) -> list[Finding]:
    """Returns what of a device's memory stays though the same step has more devices.

    Args:
        few: The report on fewer devices.
        many: The report on more, of the same batch and model.

    Raises:
        ValueError: If the second has not more devices than the first.
    """
    counts = [_devices(few), _devices(many)]
    if counts[1] <= counts[0]:
        raise ValueError(
            f"{few.name} is on {counts[0]} devices and {many.name} on {counts[1]}; give the report "
            "on fewer devices first."
        )
    found = []
    for part in ("arguments", "temporaries"):
        before, after = getattr(few.memory, part), getattr(many.memory, part)
        if after >= 64 * 2**20 and after > _FALLS * before:
            found.append(
                Finding(
                    rule="memory that does not fall",
                    severity="warning",
                    instruction=part,
                    bytes=after,
                    executions=0,
                    op_name="",
                    places=(),
                    config_path="mesh_shape",
                    advice=f"{before / 2**20:,.0f} MiB on each of {counts[0]} devices are "
                    f"{after / 2**20:,.0f} MiB on each of {counts[1]}: the axis that grew splits "
                    "little of it; let another axis grow (fsdp or expert for the state, those of "
                    "the batch for temporaries).",
                )
            )
    return found


def _devices(report: StepReport) -> int:
    devices = 1
    for size in report.mesh.values():
        devices *= size
    return devices
