"""A compiled step played in its own order: what its devices wait for.

A device computes the instructions of a program one after the other, while its links carry what
collectives send. A collective holds the links of its mesh axes, which it may have to wait for, from
its start on, and takes its bytes at their peak rate; its `done` waits for the end. A synchronous
collective is a wait from its beginning to its end. Time is

    an instruction  the compiler's cycles; without such, its FLOPs or its bytes at the peak rates
    a kernel        its own estimate of FLOPs and bytes at the peak rates
    a GPU's launch  2 us at least

It is an estimate of order and overlap, of what waits and why, not of the time on hardware, which is
longer. A branch counts with its share of the executions, as in `hlo.program`. Not counted is
asynchronous work other than collectives: a TPU's copies into VMEM, and what its SparseCores gather.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from moelib.parallel.auto_sharding.choice import sent_bytes
from moelib.planning.estimate.links import Links, Traffic
from moelib.planning.hlo import values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.source import SourceMap, phase
from moelib.planning.report.collectives import result_bytes
from moelib.planning.report.hbm import hbm_bytes, instruction_bytes
from moelib.planning.report.kernels import estimate_of, library
from moelib.planning.report.step_report import Row
from moelib.runtime.accelerators import Accelerator

_LAUNCH_SECONDS = 2e-6  # Shortest interval between the kernels of a GPU.
_LATENCY_SECONDS = 1e-6  # Of a message to a neighbor.
_NO_QUEUE_BYTES = 65_536  # Messages up to this size pass between the packets of others.


_Key = tuple[str, Any]  # What seconds are spent on: ("compute", None), ("wait", Wait(...)), ...


class Wait(NamedTuple):
    """Collectives of one kind and source, for which a device waits."""

    kind: str  # Such as "all-gather".
    phase: str  # One of `source.PHASES`.
    axes: tuple[str, ...]  # Mesh axes along which devices exchange.
    source: str  # Innermost source lines.
    asynchronous: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step that was played: seconds of one device."""

    seconds: float  # Of the step.
    compute: float  # Of the instructions of XLA.
    kernels: float  # Of kernels.
    waits: Mapping[Wait, float]  # Of waiting, by what is waited for, longest first.
    busy: Mapping[str, float]  # In which each name of `Links.used` is held.

    def wait_rows(self) -> list[Row]:
        """Returns what is waited for, longest first."""
        return [
            {**each._asdict(), "axes": [*each.axes], "seconds": seconds}
            for each, seconds in self.waits.items()
        ]

    def busy_rows(self) -> list[Row]:
        """Returns the links, the busiest first."""
        found = sorted(self.busy.items(), key=lambda each: -each[1])
        return [{"name": name, "seconds": seconds} for name, seconds in found]


def times(
    program: Program, played: Timeline, chip: Accelerator, figures: Mapping[str, float]
) -> dict[str, float]:
    """Returns the figures of a step that was played, and of the bounds of its time.

    The bounds are the work of the program, recomputation included, at the device's peak rates:
    `figures` has its FLOPs, and the bytes of kernels.
    """
    moved = hbm_bytes(program)
    flops = figures["matmul_flops"] + figures["kernel_flops"]
    return {
        "played.seconds": played.seconds,
        "played.compute": played.compute,
        "played.kernels": played.kernels,
        "played.waits": sum(played.waits.values()),
        "bound.flops": flops / chip.flops_per_second,
        "bound.hbm": (moved + figures["kernel_bytes"]) / chip.hbm_bytes_per_second,
        "bound.links": max(played.busy.values(), default=0.0),
        "hbm_bytes": moved,
    }


class _Work(NamedTuple):
    """The work of a device for an instruction."""

    part: str  # "compute" or "kernel".
    seconds: float


class _Sent(NamedTuple):
    """What links carry for a collective."""

    seconds: float
    links: tuple[str, ...]  # Links that it holds.
    wait: Wait


def play(
    program: Program,
    mesh: Mapping[str, int],
    links: Links,
    accelerator: Accelerator,
    source_map: SourceMap,
) -> Timeline:
    """Returns the timeline of a compiled step.

    Args:
        program: The step.
        mesh: Sizes of the mesh axes, outermost first.
        links: The links, as the mesh uses them.
        accelerator: The device.
        source_map: Source lines of the instructions.
    """
    player = _Player(program, mesh, links, accelerator, source_map)
    player.play(program.entry)
    sums = player.sums
    pick = lambda part: {key[1]: x for key, x in sums.items() if key[0] == part}
    waits = sorted(pick("wait").items(), key=lambda each: -each[1])
    return Timeline(
        seconds=player.now,
        compute=sums["compute", None],
        kernels=sums["kernel", None],
        waits=dict(waits),
        busy=pick("busy"),
    )


class _Player:
    """The clock of a device, and of its links."""

    def __init__(
        self,
        program: Program,
        mesh: Mapping[str, int],
        links: Links,
        accelerator: Accelerator,
        source_map: SourceMap,
    ) -> None:
        self._program, self._mesh, self._links = program, mesh, links
        self._chip, self._source_map = accelerator, source_map
        self._known: dict[tuple[str, str], _Work | _Sent] = {}  # By computation and instruction.
        self.now = 0.0
        self._free = collections.defaultdict[str, float](float)  # When links are free again.
        self.sums = collections.defaultdict[_Key, float](float)
        self._scale = 1.0  # Share of the executions, inside a branch.

    def play(self, name: str) -> None:
        """Plays a computation."""
        computation = self._program.computations[name]
        ends: dict[str, tuple[float, Wait]] = {}  # By the start of a collective.
        starts: dict[str, str] = {}  # By an update.
        unsent: dict[str, _Sent] = {}  # A SparseCore gets its data after its start, by an update.
        for each in computation.instructions.values():
            if each.opcode.endswith("-done"):
                done = (ends.pop(starts.get(x, x), None) for x in each.operands)
                for end in filter(None, done):
                    self._wait(*end)
            elif each.opcode.endswith("-update"):
                starts[each.name] = start = starts.get(each.operands[0], each.operands[0])
                if start in unsent:
                    ends[start] = self._send(unsent.pop(start))
            elif each.opcode in ("while", "call", "conditional"):
                self._run(each)
            elif isinstance(found := self._read(computation, each), _Work):
                self._spend(found.part, None, found.seconds * self._scale)
            elif each.opcode.endswith("-start") and not each.operands:
                unsent[each.name] = found
            elif found.wait.asynchronous:
                ends[each.name] = self._send(found)
            else:
                self._wait(*self._send(found))

    def _spend(self, part: str, key: Any, seconds: float) -> None:
        self.now += seconds
        self.sums[part, key] += seconds

    def _send(self, sent: _Sent) -> tuple[float, Wait]:
        """Returns the time at which a collective that starts now has ended, and the wait for it."""
        seconds = sent.seconds * self._scale
        begin = max([self.now, *(self._free[name] for name in sent.links)])
        for name in sent.links:
            self._free[name] = begin + seconds
            self.sums["busy", name] += seconds
        return begin + seconds, sent.wait

    def _wait(self, end: float, wait: Wait) -> None:
        if end > self.now:
            self._spend("wait", wait, end - self.now)

    def _run(self, each: Instruction) -> None:
        """Plays the computations that a loop, a call or a branch runs."""
        for name, times in self._program.runs.get(each.name, ()):
            if each.opcode == "while":
                if name == dict(each.calls).get("body"):
                    self._loop(name, round(times))
            elif times:
                before, self._scale = self._scale, self._scale * times
                self.play(name)
                self._scale = before

    def _loop(self, name: str, times: int) -> None:
        """Plays the turns of a loop, of which the later ones are equal."""
        last: dict[_Key, float] | None = None
        for turn in range(times):
            begin, before, free = self.now, dict(self.sums), dict(self._free)
            self.play(name)
            seconds = self.now - begin
            grown = {key: x - before.get(key, 0.0) for key, x in self.sums.items()}
            grown["turn", None] = seconds
            if last is not None and _are_close(grown, last):
                rest = times - turn - 1
                grown.pop(("turn", None))
                for key, x in grown.items():
                    self.sums[key] += rest * x
                for link, time in self._free.items():
                    if time != free.get(link):  # Another one carries what began before the loop.
                        self._free[link] += rest * seconds
                self.now += rest * seconds
                return
            last = grown

    def _read(self, computation: Computation, each: Instruction) -> _Work | _Sent:
        """Returns what an instruction does that runs no other computation."""
        key = computation.name, each.name
        if key not in self._known:
            self._known[key] = (
                self._work(computation, each)
                if (sent := self._collective(each)) is None
                else self._sent(computation, each, sent)
            )
        return self._known[key]

    def _collective(self, each: Instruction) -> Instruction | None:
        """Returns the collective that an instruction is or starts."""
        if values.collective_kind(each):
            return each
        is_fused = each.is_fusion and not each.cycles
        called = (name for _, name in each.calls if is_fused or each.opcode.endswith("-start"))
        inside = (
            one
            for name in called
            if name in self._program.computations
            for one in self._program.computations[name].instructions.values()
        )
        return next((found for one in inside if (found := self._collective(one))), None)

    def _sent(self, computation: Computation, each: Instruction, sent: Instruction) -> _Sent:
        axes, num = values.group_of(sent, self._mesh)
        traffic, between_slices = self._traffic(sent, axes, num), sent.opcode == "recv"
        lines = self._source_map.lines(each) or self._source_map.lines(sent)
        has_queue = axes and result_bytes(sent) > _NO_QUEUE_BYTES
        return _Sent(
            traffic.links_seconds + traffic.network_seconds + _LATENCY_SECONDS,
            (axes if between_slices else self._links.used(axes)) if has_queue else (),
            Wait(
                values.collective_kind(sent),
                phase(each.op_name or sent.op_name),
                axes,
                " < ".join(lines[:2]) or each.op_name,
                computation.asynchronous or each.is_async_start,
            ),
        )

    def _traffic(self, sent: Instruction, axes: tuple[str, ...], num: int) -> Traffic:
        if not axes:
            return Traffic()
        kind, size = values.collective_kind(sent), float(result_bytes(sent))
        if sent.opcode == "recv":
            size = sent_bytes(kind, size, num)
            return Traffic(0.0, size, 0.0, size / self._chip.network_bytes_per_second)
        if kind == "all-gather":
            return self._links.all_gather(axes, size)
        if kind == "reduce-scatter":
            return self._links.all_gather(axes, size * num)
        if kind == "all-reduce":
            return self._links.all_reduce(axes, size)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return self._links.all_to_all(axes, size)
        return self._links.ring(axes, size)

    def _work(self, computation: Computation, each: Instruction) -> _Work:
        chip = self._chip
        least = _LAUNCH_SECONDS if chip.platform == "gpu" else 0.0
        at_peak = lambda flops, moved: max(
            flops / chip.flops_per_second, moved / chip.hbm_bytes_per_second
        )
        if library(each) and not values.is_matmul(each):  # cuBLAS has no estimates.
            return _Work("kernel", max(at_peak(*(estimate_of(each) or (0, 0))), least))
        if each.opcode.endswith("-start"):
            return _Work("compute", 0.0)
        if chip.platform == "tpu":
            return _Work("compute", each.cycles / chip.cycles_per_second)
        inside, home = [each], computation
        if each.is_fusion:
            home = self._program.computations[each.calls[0][1]]
            inside = [*home.instructions.values()]
        flops = sum(values.matmul_flops(one, home) for one in inside if values.is_matmul(one))
        moved = instruction_bytes(self._program, computation, each)
        return _Work("compute", max(at_peak(flops, moved), least) if moved or flops else 0.0)


def _are_close(one: Mapping[_Key, float], other: Mapping[_Key, float]) -> bool:
    total = 1e-6 * one["turn", None]
    return all(abs(one.get(k, 0.0) - other.get(k, 0.0)) <= total for k in {*one, *other})
