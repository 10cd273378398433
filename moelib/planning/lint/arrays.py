"""Lint of the arrays that a step holds: unsplit arrays, padding, copies between layouts."""

import math
from collections.abc import Iterator

from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction
from moelib.planning.lint.facts import Step, is_shard
from moelib.planning.report.step_report import Finding, StepReport

_PASSED_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}
_MUCH_PADDING = 1.5  # Bytes with padding, as a multiple of those without.
_MUCH_MEMORY = 1.3  # Peak, as a multiple of the estimate.
_MUCH_TIME = 0.01  # Share of the compiler's cycles of a copy.
_UNSCALED = 0.9  # Fraction of the memory on fewer devices from which on it does not scale.


def replicated_state(step: Step) -> Iterator[Finding]:
    """Finds arrays of the state that every device holds in full."""
    devices = math.prod(step.facts.mesh.values())
    for each in step.facts.state if devices > 1 else ():
        if not each.split and each.shard_bytes >= step.thresholds.state:
            axes = ", ".join(repr(axis) for axis in each.axes if axis) or "none"
            yield Finding(
                "replicated state",
                "warning",
                f"{each.path} {list(each.shape)}",
                config_path="sharding_rules",
                advice=f"all {devices} devices hold it in full; its logical axes are {axes}: map "
                "one of them to a mesh axis larger than 1.",
                bytes=each.shard_bytes,
            )


def unsplit_activations(step: Step) -> Iterator[Finding]:
    """Finds arrays with the batch of all devices, although the mesh splits the batch."""
    if step.facts.batch_parts == 1:
        return
    for computation, each in step.program.unfused():
        if each.opcode in _PASSED_ON or each.opcode.endswith("-done"):
            continue
        shape = values.result_shape(each)
        if shape.startswith("(") or values.shape_bytes(shape) < step.thresholds.activation:
            continue
        sizes = values.dimensions(shape)
        if _has_whole_batch(step, sizes, each.opcode) and not _has_own_batch(step, sizes):
            yield step.finding(
                "unsplit activation", "warning", computation, each,
                advice=f"it contains all {step.facts.batch_parts} parts of the batch; keep it "
                "split in its layer: constrain it to the axes ('batch', ...), or remove a "
                "constraint to no axes.",
            )  # fmt: skip


def _has_whole_batch(step: Step, sizes: list[int], opcode: str) -> bool:
    """Returns whether an array begins with the whole batch and its tokens.

    A dimension of batch times sequence counts for gathers only: elsewhere a device may have as many
    rows of its own, those that it sends to several experts.
    """
    facts = step.facts
    real = [size for size in sizes if size > 1]
    if len(real) < 2 or _is_split_width(step, real[-1]) or _is_state(step, real):
        return False
    if len(real) > 2 and real[0] == facts.batch_size:
        return is_shard([real[1]], [facts.seq_len], facts.mesh)
    gathers = opcode.removesuffix("-start") == "all-gather"
    return gathers and real[0] == facts.batch_size * facts.seq_len


def _has_own_batch(step: Step, sizes: list[int]) -> bool:
    """Returns whether an array is one sequence, stacked over layers or split into heads.

    [L, 1, S, D] and [1, H, S, D] have the sizes of [B, S, D] if B is the number L or H.
    """
    first = next(i for i, size in enumerate(sizes) if size > 1)
    if step.facts.batch_size != step.facts.batch_parts:
        return False
    if sizes[first + 1] == 1:
        return sizes[first] in step.facts.sizes_of("layers")
    heads = step.facts.sizes_of("heads") | step.facts.sizes_of("kv_heads")
    is_local = any(is_shard([sizes[first]], [number], step.facts.mesh) for number in heads)
    return is_local and sizes[-1] not in step.facts.sizes_of("embed")


def _is_state(step: Step, real: list[int]) -> bool:
    """Returns whether sizes above 1 are those of an array of the state, or of its shard.

    Some arrays are stacked along a first dimension of layers, which is not split; layers compute
    with a slice. A gathered dimension is two at first: the shards, and the elements of each.
    """
    pairs = ((real[:i], real[i : i + 2], real[i + 2 :]) for i in range(1, len(real) - 1))
    slices = [real, *([*left, math.prod(pair), *right] for left, pair, right in pairs)]
    for each in step.facts.state:
        whole = [size for size in each.shape if size > 1]
        is_stacked = each.axes[:1] == ("layers",) and each.shape[0] > 1
        if is_stacked and any(is_shard(x, whole[1:], step.facts.mesh) for x in slices):
            return True
        if is_stacked and each.shape[0] != real[0]:
            continue
        if is_shard(real, whole, step.facts.mesh):
            return True
    return False


def _is_split_width(step: Step, last: int) -> bool:
    """Returns whether the last dimension is a part of a model's, split instead of the batch."""
    widths = step.facts.sizes_of("embed")  # Last dimensions of activations.
    return last not in widths and last * step.facts.batch_parts in step.facts.sizes_of()


def padding(step: Step) -> Iterator[Finding]:
    """Finds arrays whose small last dimensions fill a TPU's tiles mostly with padding."""
    for computation, each in step.program.unfused():
        if each.opcode in _PASSED_ON - {"parameter"} or each.shape.startswith("("):
            continue
        if each.opcode == "parameter" and computation.name != step.program.entry:
            continue
        plain, padded = values.shape_bytes(each.shape), values.padded_bytes(each.shape)
        if padded >= step.thresholds.padded and padded >= _MUCH_PADDING * plain:
            yield step.finding(
                "padding", "hint", computation, each,
                num_bytes=padded,
                advice=f"it takes {padded / max(plain, 1):.1f} times its own bytes, because its "
                "last dimensions are smaller than the device's tiles (8 x 128); merge dimensions, "
                "or put a larger one last.",
            )  # fmt: skip


def copies(step: Step) -> Iterator[Finding]:
    """Finds copies and transpositions outside of fusions, of large arrays or of 1% of the cycles.

    A copy between two layouts is made for its user; one to the same layout keeps a value, whose
    memory is written again.
    """
    cycles = sum(each.cycles * c.executions for c, each in step.program.unfused())
    for computation, each in step.program.unfused():
        if each.opcode not in ("copy", "transpose"):
            continue
        share = each.cycles * computation.executions / cycles if cycles else 0.0
        if share < _MUCH_TIME and values.shape_bytes(each.shape) < step.thresholds.copy:
            continue
        took = f", {100 * share:.1f}% of the compiler's cycles" if share else ""
        yield step.finding(
            "copy of a large array", "hint", computation, each,
            advice=f"{_cause(step, computation, each)}{took}; {_COPY_CURE[each.opcode]}.",
        )  # fmt: skip


_COPY_CURE = {
    "copy": "produce and use it in one layout, and make buffers where they are written",
    "transpose": "produce and use it with the same order of dimensions",
}


def _cause(step: Step, computation: Computation, copy: Instruction) -> str:
    """Returns who makes the operand of a copy, and for whom it is copied, with both layouts."""
    made = computation.instructions.get(copy.operands[0])
    users = [x for x in computation.instructions.values() if copy.name in x.operands]
    before, after = (values.layout(x.shape) if x else "" for x in (made, copy))
    end = "its result" if copy.is_root or not users else _origin(step, users[0])
    start = "another computation" if made is None else _origin(step, made)
    if before == after:
        return f"a value of {start} is kept, and its copy written by {end}"
    return f"{start} makes it as {before}, {end} uses it as {after}"


def _origin(step: Step, each: Instruction) -> str:
    """Returns the innermost source line of an instruction, or its opcode."""
    lines = step.source_map.lines(each)
    return f"{each.opcode} ({lines[0]})" if lines else each.opcode


def largest_temporaries(step: Step, num: int = 3) -> list[Finding]:
    """Returns the largest results outside of fusions, one of each operation, largest first."""
    found: dict[str, Finding] = {}
    for computation, each in step.program.unfused():
        if each.opcode not in _PASSED_ON and not each.opcode.endswith("-done"):
            made = step.finding("large temporary", "hint", computation, each, advice="")
            known = found.setdefault(each.op_name, made)
            found[each.op_name] = max(known, made, key=lambda one: one.bytes)
    return sorted(found.values(), key=lambda one: -one.bytes)[:num]


def memory_above_estimate(report: StepReport, estimate: float) -> list[Finding]:
    """Returns a finding if the peak memory is more than 30% above an estimate, in bytes."""
    peak = round(report.figures["memory.peak"])
    if peak <= _MUCH_MEMORY * estimate:
        return []
    named = "; ".join(
        f"{each.instruction} of {each.bytes / 2**20:,.0f} MiB at "
        f"{' '.join(each.locations[:1]) or each.config_path or each.op_name}"
        for each in report.largest
    )
    advice = f"it is {peak / estimate:.2f} times the estimate; the largest temporaries are {named}."
    return [Finding("memory above the estimate", "warning", "peak memory", "", advice, bytes=peak)]


def unscaled_memory(few: StepReport, many: StepReport) -> list[Finding]:
    """Returns findings for memory per device that more devices do not reduce.

    Both reports are of the same batch and model. Raises ValueError if the second one does not have
    more devices than the first.
    """
    before, after = (math.prod(report.mesh.values()) for report in (few, many))
    if after <= before:
        raise ValueError(
            f"{few.name} is on {before} devices and {many.name} on {after}; give the report on "
            "fewer devices first."
        )
    found = []
    for part in ("arguments", "temporaries"):
        sizes = [round(report.figures[f"memory.{part}"]) for report in (few, many)]
        if sizes[1] >= 64 * 2**20 and sizes[1] > _UNSCALED * sizes[0]:
            advice = (
                f"{sizes[0] / 2**20:,.0f} MiB on each of {before} devices are "
                f"{sizes[1] / 2**20:,.0f} MiB on each of {after}: the axis that grew splits little "
                "of it; increase another axis (fsdp or expert for the state, a batch axis for "
                "temporaries)."
            )
            rule = "memory that does not scale"
            found.append(Finding(rule, "warning", part, "mesh_shape", advice, bytes=sizes[1]))
    return found
