"""Calibration: what we predict of published runs, beside what was measured."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moelib.planning.estimate.activations import FULL
from moelib.planning.estimate.candidates import Candidate, Mesh, rules_of
from moelib.planning.estimate.estimate import BEST, POOR, Estimate, Estimator
from moelib.planning.estimate.workload import Workload, read_workload
from moelib.planning.hardware.topologies import describe


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run.

    Attributes:
        system: What trained.
        config: The named config of the model, after its module and a colon.
        topology: The devices.
        inside: Sizes of mesh axes in a slice.
        across: Sizes across slices.
        rows: Rows on a device at a time.
        num_microbatches: Parts of a step.
        seq_len: Tokens of a row.
        tokens_per_second: A device, the lowest and the highest published of like runs.
        source: Where it was published.
        remat: What is recomputed, a name of `Workload.kept`.
        note: What is not published, or not as it was.
    """

    system: str
    config: str
    topology: str
    inside: dict[str, int]
    rows: int
    seq_len: int
    tokens_per_second: tuple[float, float]
    source: str
    across: dict[str, int] = dataclasses.field(default_factory=dict)
    num_microbatches: int = 1
    remat: str = FULL
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A published run and our estimate of it."""

    run: PublishedRun
    estimate: Estimate

    @property
    def contained(self) -> bool:
        """Whether all that was measured is within the range."""
        low, high = self.estimate.tokens_per_second
        return low <= self.run.tokens_per_second[0] and self.run.tokens_per_second[1] <= high

    @property
    def width(self) -> float:
        """The highest of the range over the lowest."""
        low, high = self.estimate.tokens_per_second
        return high / low


def calibrate(
    runs: Iterable[PublishedRun],
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Calibrated]:
    """Returns our estimates of runs.

    Args:
        runs: What was published.
        on_progress: Called with what is estimated next.
    """
    found = []
    for run in runs:
        on_progress(f"{run.system}, {run.config.partition(':')[2]} on {run.topology}")
        cfg, work = _workload(run.config, run.seq_len)
        topology = describe(run.topology)
        mesh = Mesh(tuple(run.inside.items()), tuple(run.across.items()))
        rules = rules_of(cfg)
        rows = run.rows * run.num_microbatches * mesh.parts(rules["batch"])
        work = dataclasses.replace(work, global_batch_size=rows)
        candidate = Candidate(topology, mesh, run.rows, run.num_microbatches, run.remat)
        found.append(Calibrated(run, Estimator(work, rules, {})(candidate)))
    return found


@functools.cache
def _workload(name: str, seq_len: int) -> tuple[Any, Workload]:
    module, _, config = name.partition(":")
    cfg = importlib.import_module(module).named_trainer_configs()[config]()
    cfg.input.seq_len = seq_len
    return cfg, read_workload(cfg)


def as_markdown(found: Iterable[Calibrated], left_out: Mapping[str, str], command: str) -> str:
    """Returns a page that shows what was measured beside what we predict.

    Args:
        found: What `calibrate` returned.
        left_out: Runs that are not in it, and why.
        command: Which remakes the page.
    """
    found = list(found)
    hits = sum(each.contained for each in found)
    over = sum(each.estimate.bytes_held > each.estimate.capacity for each in found)
    staged = sum("pipeline" in each.run.note for each in found)
    widths = sorted(each.width for each in found)
    middle = widths[len(widths) // 2]
    text = f"""# How far the estimates of `moelib plan` can be trusted

Remade by `{command}`.

Each row is a published run, on the nearest mesh that moelib has. The predicted range contains what
was measured in {hits} of {len(found)} rows. Of these {over} would hold more than a device has, and
{staged} were run with a pipeline, which moelib lacks. The highest of a range is {widths[0]:.1f} to
{widths[-1]:.1f} times its lowest, {middle:.1f} times in the middle. Tokens a second are of one
device; a device of tpu7x is half a chip. GiB are what moelib would hold for such a step, dropless
and with parameters and moments in float32; others hold less where they drop tokens or store less.

The efficiencies below were chosen with these runs in view, so the table shows how well one set of
them serves all, and not how well an unknown run is foreseen.
"""
    head = "System,Model,Devices,Mesh,Rows at a time,Remat,Measured,Predicted,Width,Within,Limit"
    lines = [
        text,
        f"| {head.replace(',', ' | ')} | GiB held | Remarks |",
        f"|{' --- |' * 13}",
        *(_row(each) for each in found),
        "",
        "The same efficiencies serve every row; no row has its own:",
        "",
        "| | Compute | HBM | Links | Network | Start of an operation |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {e.compute:.0%} | {e.hbm:.0%} | {e.links:.0%} | {e.network:.0%} | "
            f"{e.seconds_an_operation * 1e6:.0f} µs |"
            for name, e in (("best", BEST), ("poor", POOR))
        ),
        "",
        "Sources:",
        "",
        *(f"- {source}." for source in dict.fromkeys(each.run.source for each in found)),
        "",
        "Left out:",
        "",
        *(f"- {run}: {why}." for run, why in left_out.items()),
        "",
    ]
    return "\n".join(lines)


def _row(each: Calibrated) -> str:
    run, estimate = each.run, each.estimate
    between = lambda low, high: f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    cells = (
        run.system,
        run.config.partition(":")[2],
        run.topology,
        str(estimate.candidate.mesh),
        f"{run.rows} of {run.seq_len:,}",
        run.remat,
        between(*run.tokens_per_second),
        between(*estimate.tokens_per_second),
        f"{each.width:.1f}",
        "yes" if each.contained else "**no**",
        max(estimate.parts, key=lambda part: estimate.parts[part]),
        f"{estimate.bytes_held / 2**30:.0f} of {estimate.capacity / 2**30:.0f}",
        run.note,
    )
    return f"| {' | '.join(cells)} |"
