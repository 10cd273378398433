"""Calibration of `moelib plan`: its estimates of published runs, compared with the measurements.

python -m benchmarks.calibration docs/calibration.md
"""

import dataclasses
import functools
import importlib
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.published_runs import EXCLUDED, PUBLISHED_RUNS, PublishedRun
from moelib.layers.quantization import Quantization
from moelib.planning.estimate.activations import OWN
from moelib.planning.estimate.candidates import Candidate, Mesh, rules_of
from moelib.planning.estimate.estimate import BEST, POOR, Estimate, Estimator
from moelib.planning.estimate.workload import Workload, read_workload
from moelib.planning.hardware.topologies import describe
from moelib.runtime.progress import Progress
from moelib.runtime.table import Table, to_markdown


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A published run and its estimate."""

    run: PublishedRun
    estimate: Estimate  # Of the run: attention in a kernel, and no rows that no token fills.
    bytes_held: float  # By moelib, for such a step.

    @property
    def middle(self) -> float:
        """Geometric mean of the range of tokens per second."""
        return math.sqrt(math.prod(self.estimate.tokens_per_second))

    @property
    def ratio(self) -> float:
        """Measured tokens per second, as a multiple of the middle of the range."""
        return math.sqrt(math.prod(self.run.tokens_per_second)) / self.middle

    @property
    def contained(self) -> bool:
        """True if all measurements are within the range."""
        low, high = self.estimate.tokens_per_second
        return low <= self.run.tokens_per_second[0] and self.run.tokens_per_second[1] <= high

    @property
    def width(self) -> float:
        """Upper end of the range, as a multiple of its lower end."""
        low, high = self.estimate.tokens_per_second
        return high / low


def calibrate(runs: Iterable[PublishedRun], *, show_progress: bool = False) -> list[Calibrated]:
    """Returns the estimates of runs."""
    runs, found = list(runs), []
    with Progress("calibrate", total=len(runs), enabled=show_progress) as progress:
        for i, run in enumerate(runs):
            progress.update(i, f"{run.system}, {run.config.partition(':')[2]} on {run.topology}")
            found.append(_calibrated(run))
    return found


def _calibrated(run: PublishedRun) -> Calibrated:
    cfg, work = _workload(run.config, run.seq_len, run.quantization)
    mesh = Mesh(tuple(run.inside.items()), tuple(run.across.items()))
    rules = rules_of(cfg)
    per_step = run.batch_per_device * run.num_microbatches * mesh.parts(rules["batch"])
    work = dataclasses.replace(work, global_batch_size=per_step)
    theirs = dataclasses.replace(work, attention_backend="cudnn")
    if work.moe is not None:
        theirs = dataclasses.replace(theirs, moe=dataclasses.replace(work.moe, round_factor=1.0))
    candidate = Candidate(
        describe(run.topology),
        mesh,
        run.batch_per_device,
        run.num_microbatches,
        run.remat,
        run.schedule,
    )
    as_ours = dataclasses.replace(candidate, remat=OWN) if run.schedule else candidate
    ours = Estimator(work, rules, {})(as_ours)
    estimate = _without_lockstep(Estimator(theirs, rules, {})(candidate))
    return Calibrated(run, estimate, ours.bytes_held)


def _without_lockstep(estimate: Estimate) -> Estimate:
    """Returns an estimate whose ranks wait for their inputs only, unlike those of moelib."""
    idle, _ = estimate.idle
    pipeline = dataclasses.replace(estimate.pipeline, idle=(idle, idle))
    return dataclasses.replace(estimate, pipeline=pipeline)


def range_of_others(found: Sequence[Calibrated], left_out: int) -> tuple[float, float]:
    """Returns the tokens per second of a run that the other runs imply: lowest and highest.

    These are the middle of its own range times the others' ratios of measured to middle.
    """
    ratios = [each.ratio for i, each in enumerate(found) if i != left_out]
    return found[left_out].middle * min(ratios), found[left_out].middle * max(ratios)


@functools.cache
def _workload(name: str, seq_len: int, quantization: Quantization | None) -> tuple[Any, Workload]:
    module, _, config = name.partition(":")
    cfg = importlib.import_module(module).named_trainer_configs()[config]()
    cfg.input.seq_len, cfg.model.quantization = seq_len, quantization
    return cfg, read_workload(cfg)


def as_markdown(found: Iterable[Calibrated], excluded: Mapping[str, str]) -> str:
    """Returns the page of docs/calibration.md.

    Args:
        found: Result of `calibrate`.
        excluded: Runs that are not in it, with the reason.
    """
    found = list(found)
    hits = sum(each.contained for each in found)
    too_large = sum(each.bytes_held > each.estimate.capacity for each in found)
    errors = sorted(abs(1 / each.ratio - 1) for each in found)
    ratios = sorted(each.ratio for each in found)
    pipelines = sum(each.run.schedule is not None for each in found)
    widths = sorted(each.width for each in found)
    median = widths[len(widths) // 2]
    text = f"""# Accuracy of the estimates of `moelib plan`

This page is written by `python -m benchmarks.calibration docs/calibration.md`.

Each row is a published run, estimated on its own mesh; {pipelines} used a pipeline. The predicted
range contains all measurements in {hits} of {len(found)} rows. By the estimate, {too_large} of the
runs hold more than a device has. The upper end of a
range is {widths[0]:.1f} to {widths[-1]:.1f} times its lower end, with a median of {median:.1f}.
The middle of a range, its geometric mean, is off by {errors[len(errors) // 2]:.0%} in the median
and by {errors[-1]:.0%} at most: measured rates are {ratios[0]:.2f} to {ratios[-1]:.2f} times the
middle. "From others" is the range that the other runs imply: the middle of the row times the lowest
and the highest of their ratios of measured to middle. Only the runs with the two extreme ratios can
lie outside.
Rates are in tokens per second per device; a device of tpu7x is half a chip. GiB are those that
moelib would hold for such a step, dropless and with parameters and moments in float32; other
systems hold less where they drop tokens or store lower precision. Rates are of systems with kernels
for attention, without empty rows in the buffers of experts and with pipelines whose ranks wait for
their inputs only: moelib's own plans count what its attention in plain XLA on A100 and B200, its
buffers for any routing and its ticks in lockstep add.

The efficiencies below were chosen with these runs in view, before pipelines were estimated as such.
The table therefore shows how well one set of them fits all runs, not how well an unknown run is
predicted. Nothing was fitted to the rows with a pipeline."""
    columns = (
        "System", "Model", "Devices", "Mesh", "Batch/device", "Remat", "Measured>", "Predicted>",
        "Width>", "Within", "Middle off by>", "From others>", "Limit", "GiB held>", "Remarks",
    )  # fmt: skip
    efficiencies = Table(
        "",
        ("", "Compute>", "HBM>", "Links>", "Network>", "Start of an operation>"),
        [
            (name, f"{e.compute:.0%}", f"{e.hbm:.0%}", f"{e.links:.0%}", f"{e.network:.0%}")
            + (f"{e.seconds_per_operation * 1e6:.0f} µs",)
            for name, e in (("best", BEST), ("poor", POOR))
        ],
    )
    parts = [
        text,
        to_markdown(Table("", columns, [_row(found, i) for i in range(len(found))])),
        "Every row is estimated with the same efficiencies:",
        to_markdown(efficiencies),
        "Sources:",
        "\n".join(f"- {each}." for each in dict.fromkeys(each.run.source for each in found)),
        "Excluded runs:",
        "\n".join(_wrapped(f"- {run}: {reason}.") for run, reason in excluded.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _wrapped(item: str) -> str:
    """Returns an item of a list on lines of at most 120 characters."""
    return textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False)


def _row(found: Sequence[Calibrated], i: int) -> tuple[str, ...]:
    run, estimate, each = found[i].run, found[i].estimate, found[i]
    between = lambda low, high: f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return (
        run.system,
        run.config.partition(":")[2],
        run.topology,
        str(estimate.candidate.mesh) + (f"; {run.schedule.value}" if run.schedule else ""),
        f"{run.batch_per_device} x {run.seq_len:,}",
        run.remat,
        between(*run.tokens_per_second),
        between(*estimate.tokens_per_second),
        f"{each.width:.1f}",
        "yes" if each.contained else "**no**",
        f"{1 / each.ratio - 1:+.0%}",
        between(*range_of_others(found, i)) if len(found) > 1 else "-",
        max(estimate.seconds_at_peak, key=estimate.seconds_at_peak.__getitem__),
        f"{each.bytes_held / 2**30:.0f} of {estimate.capacity / 2**30:.0f}",
        run.note,
    )


def main(path: str) -> None:
    """Writes the page."""
    found = calibrate(PUBLISHED_RUNS, show_progress=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(as_markdown(found, EXCLUDED))
    within = sum(each.contained for each in found)
    print(f"{within} of {len(found)} runs are within the predicted range; written to {path}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
