"""Plans: estimates of a config's step on topologies, and the best candidates compiled."""

import dataclasses
import itertools
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moelib.core.config import ConfigBase
from moelib.core.errors import UserError
from moelib.parallel.pipeline.engine import MOST_OVER_1F1B
from moelib.planning.compiled.in_subprocess import (
    CompileOptions,
    Outcome,
    compile_in_subprocess,
)
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.estimate import Estimate
from moelib.planning.estimate.sweep import sweep
from moelib.planning.hlo.values import COLLECTIVES
from moelib.planning.lint.arrays import memory_above_estimate, unscaled_memory
from moelib.planning.report.figures import Column, figures_table, gib, mib
from moelib.planning.report.step_report import Finding, StepReport
from moelib.planning.report.tables import collectives_table, kernels_table, waits_table
from moelib.runtime.progress import Progress
from moelib.runtime.table import Table

_GIB = 2**30
# Fields of an estimate in JSON.
_ESTIMATED = ("memory", "capacity", "fits", "model_flops", "hardware_flops", "collectives",
              "links_bytes", "network_bytes", "seconds", "seconds_at_peak", "tokens_per_second",
              "mfu", "dollars_per_billion_tokens", "limit", "idle", "pipeline_bytes",
              "kept_over_1f1b")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A candidate that was compiled, or could not be."""

    estimate: Estimate
    outcome: Outcome

    @property
    def report(self) -> StepReport | None:
        """Report of the step, compared with its estimate; None if it could not be compiled."""
        report = self.outcome.report
        if report is None:
            return None
        above = memory_above_estimate(report, self.estimate.bytes_held)
        return dataclasses.replace(report, findings=(*above, *report.findings))

    def tables(self, others: Sequence[Column] = ()) -> list[Table]:
        """Returns figures with columns of others, collectives, kernels, and the prediction.

        For a step that needs too much memory, the result is a table of its estimated memory.
        """
        if self.report is None:
            return [self._memory_table()] if self.outcome.out_of_memory else []
        return [
            figures_table(self.report, others, self._summary(self.report)),
            collectives_table(self.report),
            *([waits_table(self.report)] if self.report.waits else []),
            kernels_table(self.report),
            self._prediction_table(self.report),
        ]

    def _summary(self, report: StepReport) -> list[str]:
        """Returns sentences about the memory, the cycles, and loops of unknown length."""
        accelerator = self.estimate.candidate.topology.accelerator
        free = (accelerator.hbm_bytes - report.figures["memory.peak"]) / _GIB
        fit = f"fits with {free:.2f} GiB free" if free >= 0 else f"lacks {-free:.2f} GiB"
        lines = [f"The step {fit} of {accelerator.hbm_bytes / _GIB:.2f} GiB per device."]
        if cycles := report.figures.get("cycles"):  # GPU compilers do not estimate cycles.
            clock = accelerator.cycles_per_second
            lines.append(
                f"{cycles / 1e6:.1f} Mcycles, by the compiler's estimate, are "
                f"{1e3 * cycles / clock:.1f} ms at {clock / 1e9:.2f} GHz."
            )
        if bound := _nearest_bound(report):
            lines.append(_distance(report, bound))
        if loops := report.loops_of_unknown_length:
            lines.append(f"Loops of unknown length, counted once: {', '.join(loops)}.")
        return lines

    def _prediction_table(self, report: StepReport) -> Table:
        figures = report.figures
        rows = [("peak memory", self.estimate.bytes_held, figures["memory.peak"], gib)]
        for kind in COLLECTIVES:
            size, key = self.estimate.collectives.get(kind, 0.0), f"{kind}.bytes"
            if size or key in figures:
                rows.append((kind, size, figures.get(key, 0), mib))
        cells = [
            (label, write(a), write(b), f"{100 * (a - b) / b:+.1f}%" if b else "-")
            for label, a, b, write in rows
        ]
        return Table("Estimate and compiled step", ("", "estimated>", "compiled>", "error>"), cells)

    def _memory_table(self) -> Table:
        estimate = self.estimate
        held = ((name, size) for name, size in estimate.memory.items() if size)
        sizes = sorted(held, key=lambda each: -each[1])
        rows = [(name, f"{size / _GIB:.2f}") for name, size in sizes]
        rows += [("total", f"{estimate.bytes_held / _GIB:.2f}")]
        rows += [("device", f"{estimate.capacity / _GIB:.2f}")]
        topology = estimate.candidate.topology.name
        return Table(f"Estimated memory per device of {topology}", ("", "GiB>"), rows)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimates of a config's step, best first, and compiled steps."""

    trainer_config: Any
    name: str
    rows: tuple[Estimate, ...]  # The best candidate of each mesh, in the order of `Sweep.rows`.
    num_candidates: int  # Number of estimated candidates.
    num_over_budget: int  # Meshes that exceed the budget, which `rows` excludes.
    refused: tuple[str, ...]  # Reason for each topology that can run nothing.
    tokens: float | None = None  # Tokens of the whole run.
    budget: float | None = None  # Dollars of the whole run.
    compiled: tuple[CompiledStep, ...] = ()

    def __repr__(self) -> str:
        best = "".join(f", best {row[1]} {row[2]}" for row in self.table(1).rows)
        return f"Plan({self.name}, {len(self.rows)} meshes{best})"

    def table(self, max_rows: int = 20) -> Table:
        """Returns the best rows as a table."""
        shown = self.rows[:max_rows]
        columns = ("#>", "topology", "mesh", "batch/device x micro-batches>", "remat", "GiB>")
        columns += ("s/step>", "tokens/s/device>", "MFU %>", "$/billion tokens>")
        columns += ("days>", "total $>") if self.tokens else ()
        title = f"{self.name}: {len(shown)} of {len(self.rows)} meshes, "
        title += f"{self.num_candidates:,} candidates"
        footnotes = [*_details(self.rows[0]), *_shared_sides(shown)]
        if getattr(self.trainer_config.input.klass, "reads_parameters", False):
            footnotes.append("The answers that the input draws from the model come on top.")
        if self.budget is not None:
            footnotes.append("!: within the budget at the low end of the range only.")
        if self.num_over_budget:
            footnotes.append(f"{self.num_over_budget} meshes over the budget are not shown.")
        rows = [(f"{i}", *self._cells(each)) for i, each in enumerate(shown, start=1)]
        return Table(title, (*columns, "limit, s at peak rates"), rows, footnotes)

    def _cells(self, estimate: Estimate) -> list[str]:
        candidate = estimate.candidate
        cells = [
            candidate.topology.name,
            f"{candidate.mesh}{_schedule(candidate)}",
            f"{candidate.batch_per_device:g} x {candidate.num_microbatches}",
            candidate.remat,
            f"{estimate.bytes_held / _GIB:.1f} of {estimate.capacity / _GIB:.1f}",
            _range(estimate.seconds),
            _range(estimate.tokens_per_second),
            _range([100 * share for share in estimate.mfu]),
            _range(estimate.dollars_per_billion_tokens),
        ]
        if self.tokens:
            days, dollars = estimate.whole_run(self.tokens)
            unsure = self.budget is not None and dollars[1] > self.budget
            cells += [_range(days), _range(dollars) + (" !" if unsure else "")]
        return [*cells, _limit(estimate)]

    def to_json(self, max_rows: int | None = None) -> dict[str, Any]:
        """Returns rows, reports and failures as JSON values."""
        steps = [(step, step.report) for step in self.compiled]
        return {
            "rows": [_row_as_json(each) for each in self.rows[:max_rows]],
            "compiled": [report.to_json() for _, report in steps if report is not None],
            "failures": [
                {**_mesh_as_json(step.estimate), "failure": step.outcome.failure}
                for step, report in steps
                if report is None
            ],
        }

    def compile_best(
        self, num: int, options: CompileOptions, *, show_progress: bool = False
    ) -> Iterator[CompiledStep]:
        """Yields the best candidates that fit, compiled; the nearest ones if none fits.

        Ctrl-C ends the step that is being compiled, and all others.
        """
        chosen = ([each for each in self.rows if each.fits] or list(self.rows))[:num]
        for number, estimate in enumerate(chosen, start=1):
            own, candidate = options, estimate.candidate
            if options.dump_dir is not None and len(chosen) > 1:
                folder = os.path.join(options.dump_dir, str(number))
                own = dataclasses.replace(options, dump_dir=folder)
            with Progress("compile", enabled=show_progress) as progress:
                progress.update(
                    text=f"{candidate.topology.name}, {candidate.mesh}{_schedule(candidate)}: may "
                    "take minutes"
                )
                outcome = compile_in_subprocess(
                    candidate.apply(self.trainer_config),
                    candidate.topology.name,
                    own,
                    name=self.name,
                    on_progress=lambda text, shown=progress: shown.update(text=text),
                )
            yield CompiledStep(estimate, outcome)
            if outcome.interrupted:
                return

    def mesh_findings(self) -> Iterator[tuple[str, Finding]]:
        """Yields (topology, finding) for compiled steps whose nearest bound is that of links.

        The finding names the mesh that sends least over the busiest links, among those that fit
        and are not slower by the estimate.
        """
        for step in self.compiled:
            report, own = step.report, step.estimate
            if report is None or _nearest_bound(report) != "links":
                continue
            name = own.candidate.topology.name
            others = [x for x in self.rows if x.candidate.topology.name == name]
            if len(others) < 2:  # The mesh was chosen by the user.
                others = list(sweep(self.trainer_config, [name]).rows)
            less = [
                other
                for other in others
                if other.fits
                and other.seconds[1] < own.seconds[1]
                and other.seconds_at_peak["links"] < _LESS * own.seconds_at_peak["links"]
            ]
            if less:
                yield name, _link_finding(report, own, min(less, key=lambda x: x.seconds[1]))

    def scaling_findings(self) -> Iterator[tuple[str, Finding]]:
        """Yields ("A to B", finding) for memory of compiled steps that more devices do not reduce.

        Only topologies of one accelerator are compared, and temporaries only if the remat and the
        number of micro-batches are equal.
        """
        steps = [(x.report, x.estimate.candidate) for x in self.compiled if x.report is not None]
        steps.sort(key=lambda each: each[1].topology.num_devices)
        for (few, one), (many, other) in itertools.combinations(steps, 2):
            shapes = one.topology, other.topology
            if shapes[0].accelerator != shapes[1].accelerator:
                continue
            if shapes[0].num_devices == shapes[1].num_devices:
                continue
            alike = (one.remat, one.num_microbatches) == (other.remat, other.num_microbatches)
            for finding in unscaled_memory(few, many):
                if alike or finding.instruction == "arguments":
                    yield f"{few.topology} to {many.topology}", finding


def plan(
    trainer_config: Any,
    topologies: str | Sequence[str],
    *,
    mesh: str | None = None,
    current_mesh: bool = False,
    tokens: float | None = None,
    budget: float | None = None,
    prices: Mapping[str, float] | None = None,
    num_compiled: int = 0,
    compile_options: CompileOptions | None = None,
    name: str = "config",
    show_progress: bool = False,
) -> Plan:
    """Returns estimates of a config's step on every legal mesh of topologies, best first.

    Nothing is allocated, and no accelerator is needed.

    Args:
        trainer_config: A `SpmdTrainer.Config`; its global batch size is kept.
        topologies: Names such as "v6e:2x2", "2*v5p:4x4x4" or "h100:2x8".
        mesh: Sizes of mesh axes such as "fsdp=2,expert=-1"; by default every legal mesh.
        current_mesh: Whether to plan the config's own mesh, micro-batches and remat only.
        tokens: Tokens of the whole run, for its days and dollars.
        budget: Dollars of the whole run; meshes that cost more at best are excluded.
        prices: Dollars per device-hour by accelerator, which replace public prices.
        num_compiled: Number of the best candidates to compile, which may take minutes each.
        compile_options: Settings for compiled steps.
        name: Name of the config in tables.
        show_progress: Whether to show progress on stderr.

    Raises:
        UserError: If an argument or the config is invalid, or no topology can run the config.
    """
    if not isinstance(trainer_config, ConfigBase):
        raise UserError(f"trainer_config is {trainer_config!r}; pass the config of a trainer.")
    for argument, value in (("tokens", tokens), ("budget", budget)):
        if value is not None and not (isinstance(value, numbers.Real) and 0 < value < math.inf):
            raise UserError(f"{argument}={value!r}: set it to a number above 0.")
    if budget is not None and tokens is None:
        raise UserError(f"budget={budget:g} is for a whole run: set tokens to its length.")
    if current_mesh and mesh is not None:
        raise UserError(
            f"mesh={mesh!r}: current_mesh takes the config's own mesh; set one of them."
        )
    names = [topologies] if isinstance(topologies, str) else topologies
    if not names:
        raise UserError("topologies is empty: name the hardware, such as v6e:2x2.")
    with Progress("plan", enabled=show_progress) as progress:
        found = sweep(
            trainer_config,
            names,
            mesh=mesh,
            current_mesh=current_mesh,
            prices=prices,
            on_progress=lambda text: progress.update(text=text),
        )
    rows = found.rows
    if budget is not None and tokens is not None:
        rows = tuple(each for each in found.rows if each.whole_run(tokens)[1][0] <= budget)
        if not rows:
            dollars = [each.whole_run(tokens)[1][0] for each in found.rows if each.fits]
            cheapest = (
                f"the cheapest that fits costs {_number(min(dollars))}" if dollars else "none fits"
            )
            raise UserError(
                f"budget={budget:g}: all {found.num_candidates} candidates exceed it; {cheapest}."
            )
    made = Plan(
        trainer_config=trainer_config,
        name=name,
        rows=rows,
        num_candidates=found.num_candidates,
        num_over_budget=len(found.rows) - len(rows),
        refused=found.refused,
        tokens=tokens,
        budget=budget,
    )
    options = compile_options or CompileOptions()
    steps = made.compile_best(num_compiled, options, show_progress=show_progress)
    return dataclasses.replace(made, compiled=tuple(steps))


_LESS = 0.8  # Share of the seconds of links, from which on another mesh sends less.


def _nearest_bound(report: StepReport) -> str:
    """Returns "links", "hbm" or "flops": the bound that is nearest to a played step; "" if none."""
    bounds = {name: report.figures.get(f"bound.{name}", 0.0) for name in ("links", "hbm", "flops")}
    return max(bounds, key=bounds.__getitem__) if any(bounds.values()) else ""


def _link_finding(report: StepReport, own: Estimate, other: Estimate) -> Finding:
    busiest, candidate = report.busy[0], other.candidate
    share = other.seconds_at_peak["links"] / own.seconds_at_peak["links"]
    return Finding(
        "link-bound mesh",
        "hint",
        f"{busiest['name']}: {1e3 * busiest['seconds']:.1f} ms",
        "mesh_shape",
        f"links are the nearest bound of the step; {candidate.mesh} with remat {candidate.remat} "
        f"and {candidate.batch_per_device:g} x {candidate.num_microbatches} sends {share:.2f} of "
        f"its bytes by time: {_range(other.seconds)} s by the estimate, for "
        f"{_range(own.seconds)} s.",
    )


def _distance(report: StepReport, nearest: str) -> str:
    """Returns a sentence about the played step, and the bound that is nearest to it."""
    figures = report.figures
    busiest = report.busy[0]["name"] if report.busy else "links"
    names = {"flops": "FLOPs", "hbm": "bytes in HBM", "links": f"bytes on the {busiest}"}
    played, bound = figures["played.seconds"], figures[f"bound.{nearest}"]
    waits = 100 * figures["played.waits"] / played
    return (
        f"Played in its order, the step takes {1e3 * played:.1f} ms, {waits:.0f}% of it waits for "
        f"collectives. The nearest bound, its {names[nearest]} at the peak rate, is "
        f"{1e3 * bound:.1f} ms: {played / bound:.2f} times."
    )


def _details(estimate: Estimate) -> list[str]:
    """Returns lines about the memory, FLOPs and traffic of the first row."""
    sizes = ((name, size) for name, size in estimate.memory.items() if size)
    held = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in sizes)
    flops = [_number(x / 1e12) for x in (estimate.model_flops, estimate.hardware_flops)]
    sent = [_number(x / _GIB) for x in (estimate.links_bytes, estimate.network_bytes)]
    lines = [
        f"#1, per step and device: {held} GiB;",
        f"{flops[0]} TFLOPs of the model, {flops[1]} with recomputation;",
        f"{sent[0]} GiB over links, {sent[1]} GiB over the network.",
    ]
    if estimate.candidate.schedule is None:
        return lines
    idle = _range([100 * share for share in estimate.idle])
    size = _number(estimate.pipeline_bytes / _GIB)
    lines.append(f"A rank of the pipeline idles {idle}% of the time, and sends {size} GiB.")
    if (times := estimate.kept_over_1f1b) > MOST_OVER_1F1B:
        lines.append(
            f"It defers gradients of weights, and keeps {times:.1f} times as many bytes between "
            "passes as with 1f1b."
        )
    return lines


def _schedule(candidate: Candidate) -> str:
    """Returns a candidate's pipeline schedule, to follow its mesh."""
    return "" if candidate.schedule is None else f"; {candidate.schedule.value}"


def _shared_sides(rows: Sequence[Estimate]) -> list[str]:
    """Returns a line on the meshes of which several axes share a side of the torus."""
    shared = [(i, each.candidate.shared_sides()) for i, each in enumerate(rows, start=1)]
    texts = [f"#{i} {', '.join(sides)}" for i, sides in shared if sides]
    return [f"Sides of the torus that axes share: {'; '.join(texts)}."] if texts else []


def _limit(estimate: Estimate) -> str:
    """Returns the seconds of each part, longest first; for a candidate too large, its memory."""
    if estimate.fits:
        parts = sorted(estimate.seconds_at_peak.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {_number(seconds)}" for name, seconds in parts if seconds)
    missing = (estimate.bytes_held - estimate.capacity) / _GIB
    if missing <= 0:
        return f"memory: {-missing:.1f} GiB left is within the estimate's error"
    largest = max(estimate.memory, key=estimate.memory.__getitem__)
    held = estimate.memory[largest] / _GIB
    return f"memory: lacks {missing:.1f} GiB; {largest} {held:.1f}"


def _range(values: Iterable[float]) -> str:
    low, high = map(_number, values)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mesh_as_json(estimate: Estimate) -> dict[str, Any]:
    mesh = estimate.candidate.mesh
    return {
        "topology": estimate.candidate.topology.name,
        "mesh": {"inside": mesh.inside, "across": mesh.across},
    }


def _row_as_json(estimate: Estimate) -> dict[str, Any]:
    """Returns a row as JSON values: bytes, seconds and dollars, a range as [low, high]."""
    return {
        **_mesh_as_json(estimate),
        "batch_per_device": estimate.candidate.batch_per_device,
        "num_microbatches": estimate.candidate.num_microbatches,
        "remat": estimate.candidate.remat,
        "pipeline_schedule": getattr(estimate.candidate.schedule, "value", None),
        **{name: getattr(estimate, name) for name in _ESTIMATED},
    }
