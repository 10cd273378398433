"""The table of `moelib plan`'s sweep: a row for each mesh, what it costs, and what limits it."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from moelib.core.table import show

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole run.

    Attributes:
        tokens: How many it is over; None if nobody says.
        budget: Dollars that it may cost; None for any.
    """

    tokens: float | None = None
    budget: float | None = None

    def allows(self, estimate: Any) -> bool:
        """Returns whether a candidate may keep to the budget, at the low end of its range."""
        if self.tokens is None or self.budget is None:
            return True
        return estimate.whole_run(self.tokens)[1][0] <= self.budget

    def is_sure(self, estimate: Any) -> bool:
        """Returns whether a candidate keeps to the budget at the high end, too."""
        assert self.tokens is not None
        return self.budget is None or estimate.whole_run(self.tokens)[1][1] <= self.budget


def print_rows(estimates: Iterable[Any], whole: Whole, title: str) -> None:
    """Prints the table.

    Args:
        estimates: `moelib.planning.estimate.estimate.Estimate`s, in the order of the rows.
        whole: The run that they are for.
        title: Of the table.
    """
    from rich.table import Table

    table = Table(title=title)
    table.add_column("", justify="right")
    table.add_column("topology")
    table.add_column("mesh")
    table.add_column("rows x parts", justify="right")
    table.add_column("remat")
    for name in ("GiB", "s a step", "tokens/s a device", "MFU %", "$ a billion"):
        table.add_column(name, justify="right")
    for name in ("days", "$ in all") if whole.tokens else ():
        table.add_column(name, justify="right")
    table.add_column("limit")
    estimates = list(estimates)
    for i, each in enumerate(estimates, start=1):
        table.add_row(f"{i}", *_cells(each, whole))
    show(table)
    for line in _details(estimates[0]):
        print(line)
    if whole.budget is not None:
        print("!: within the budget at best, over it at worst.")


def _details(estimate: Any) -> list[str]:
    """Returns lines about what a device holds, computes and sends in a step of the first row."""
    held = (f"{name} {size / _GIB:.1f}" for name, size in estimate.memory.items())
    flops = (_number(x / 1e12) for x in (estimate.model_flops, estimate.hardware_flops))
    sent = (_number(x / _GIB) for x in (estimate.links_bytes, estimate.network_bytes))
    return [
        f"Row 1, each device: {', '.join(held)} GiB;",
        "{} TFLOPs of the model, {} with what is computed again; ".format(*flops)
        + "{} GiB sent over links, {} over the network.".format(*sent),
    ]


def _cells(estimate: Any, whole: Whole) -> list[str]:
    candidate = estimate.candidate
    cells = [
        candidate.topology.name,
        str(candidate.mesh),
        f"{candidate.rows:g} x {candidate.num_microbatches}",
        candidate.remat,
        f"{estimate.bytes_held / _GIB:.1f} of {estimate.capacity / _GIB:.1f}",
        _between(estimate.seconds),
        _between(estimate.tokens_per_second),
        _between([100 * share for share in estimate.mfu]),
        _between(estimate.dollars_per_billion),
    ]
    if whole.tokens:
        days, dollars = estimate.whole_run(whole.tokens)
        cells += [_between(days), _between(dollars)]
        cells[-1] += "" if whole.is_sure(estimate) else " !"
    return [*cells, limit(estimate)]


def print_memory(estimate: Any) -> None:
    """Prints the bytes that a device was estimated to hold, largest first, against what it has."""
    from rich.table import Table

    table = Table()
    table.add_column(f"{estimate.candidate.topology.name}: memory by our estimate")
    table.add_column("GiB", justify="right")
    for name, held in sorted(estimate.memory.items(), key=lambda each: -each[1]):
        table.add_row(name, f"{held / _GIB:.2f}")
    table.add_section()
    table.add_row("in all", f"{estimate.bytes_held / _GIB:.2f}")
    table.add_row("a device has", f"{estimate.capacity / _GIB:.2f}")
    show(table)


def limit(estimate: Any) -> str:
    """Returns what limits a candidate; of one that does not fit, by how much, and the most held."""
    if estimate.fits:
        return estimate.limit
    missing = (estimate.bytes_held - estimate.capacity) / _GIB
    if missing <= 0:
        return f"memory: {-missing:.1f} GiB left is within the estimate's error"
    largest = max(estimate.memory, key=estimate.memory.__getitem__)
    held = estimate.memory[largest] / _GIB
    return f"memory: {missing:.1f} GiB too much; {largest} {held:.1f}"


def _between(values: Iterable[float]) -> str:
    low, high = (_number(value) for value in values)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_json(estimate: Any, results: Mapping[str, float]) -> dict[str, Any]:
    """Returns a row as JSON: bytes, seconds and dollars, a range as [low, high]."""
    candidate = estimate.candidate
    return {
        "topology": candidate.topology.name,
        "mesh": {"inside": candidate.mesh.inside, "across": candidate.mesh.across},
        "rows": candidate.rows,
        "num_microbatches": candidate.num_microbatches,
        "remat": candidate.remat,
        "memory": dict(estimate.memory),
        "capacity": estimate.capacity,
        "fits": estimate.fits,
        "model_flops": estimate.model_flops,
        "hardware_flops": estimate.hardware_flops,
        "collectives": dict(results),
        "links_bytes": estimate.links_bytes,
        "network_bytes": estimate.network_bytes,
        "seconds": list(estimate.seconds),
        "seconds_at_peak": dict(estimate.parts),
        "tokens_per_second": list(estimate.tokens_per_second),
        "mfu": list(estimate.mfu),
        "dollars_per_billion_tokens": list(estimate.dollars_per_billion),
        "limit": estimate.limit,
    }
