"""The table of a step's figures, next to those of other reports and other programs."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError
from moelib.parallel.mesh import describe_mesh
from moelib.planning.hlo.values import COLLECTIVES
from moelib.planning.report.count import OPERATIONS
from moelib.planning.report.step_report import StepReport
from moelib.runtime.storage import parse_json
from moelib.runtime.table import Table


class Figure(NamedTuple):
    """A row of the table of figures."""

    key: str  # Key in a report, and in a file of figures.
    label: str
    write: Callable[[Any], str]


class Column(NamedTuple):
    """A column of figures by key; values that are text are shown unchanged."""

    name: str
    figures: Mapping[str, Any]


def gib(value: float) -> str:
    """Returns bytes in GiB."""
    return f"{value / 2**30:.3f} GiB"


def mib(value: float) -> str:
    """Returns bytes in MiB."""
    return f"{value / 2**20:,.1f} MiB"


def _tera(value: float) -> str:
    return f"{value / 1e12:.3f} T"


def _ms(value: float) -> str:
    return f"{1e3 * value:,.1f} ms"


_count, _ratio, _seconds = "{:,.0f}".format, "{:.2f}".format, "{:.1f} s".format
SECTIONS = (
    (
        Figure("memory.peak", "peak memory", gib),
        Figure("memory.arguments", "  arguments", gib),
        Figure("memory.parameters", "    parameters", gib),
        Figure("memory.learner", "    learner's state", gib),
        Figure("memory.outputs", "  outputs", gib),
        Figure("memory.temporaries", "  temporaries", gib),
        Figure("memory.aliased", "  outputs aliased to arguments", gib),
        Figure("memory.code", "  code", mib),
        Figure("memory.host", "  in addition, on the host", gib),
    ),
    tuple(
        Figure(f"{kind}.{name}", label, write)
        for kind in COLLECTIVES
        for name, label, write in (
            ("bytes", kind, mib),
            ("count", "  in the program", _count),
            ("asynchronous", "  asynchronous", _count),
            ("small", "  up to 1 KiB", _count),
            ("executions", "  executed", _count),
        )
    ),
    (
        Figure("played.seconds", "the step, played in its order", _ms),
        Figure("played.compute", "  instructions of XLA", _ms),
        Figure("played.kernels", "  kernels", _ms),
        Figure("played.waits", "  waiting for collectives", _ms),
        Figure("bound.flops", "least time of its FLOPs", _ms),
        Figure("bound.hbm", "  of its bytes in HBM", _ms),
        Figure("bound.links", "  of its bytes on the busiest links", _ms),
    ),
    (
        Figure("cycles", "Mcycles without kernels and collectives", lambda v: f"{v / 1e6:.1f}"),
        Figure("matmul_flops", "matmul FLOPs of XLA", _tera),
        Figure("kernel_flops", "FLOPs of kernels", _tera),
        Figure("kernel_bytes", "bytes of kernels", gib),
        Figure("hbm_bytes", "bytes in HBM without kernels", gib),
        Figure("model_flops", "FLOPs of the model", _tera),
        Figure("executed_over_model_flops", "executed FLOPs / model FLOPs", _ratio),
        Figure("rows_computed_over_routed", "rows computed / routed", _ratio),
        Figure("fusions", "fusions", _count),
        Figure("fusion_executions", "  executed", _count),
        Figure("instructions", "instructions", _count),
        Figure("instructions_outside_fusions", "  outside fusions", _count),
    ),
    tuple(
        Figure(f"{opcode}.{name}", label, write)
        for opcode in OPERATIONS
        for name, label, write in (
            ("count", f"{opcode}: in the program", _count),
            ("bytes", "  bytes outside fusions", mib),
        )
    ),
    (
        Figure("seconds.trace", "trace", _seconds),
        Figure("seconds.lower", "lower", _seconds),
        Figure("seconds.compile", "compile", _seconds),
        Figure("seconds.compile_cpu", "  CPU", _seconds),
    ),
)


def read_columns(path: str) -> list[Column]:
    """Returns the columns of a file: reports, or figures by key with an optional name and aim.

    Args:
        path: A file of `moelib plan --json`, a report.json, or a JSON object of figures.

    Raises:
        UsageError: If the file holds none of these.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = parse_json(file.read())
        plans = {"": values} | {k: x for k, x in values.items() if isinstance(x, dict)}
        columns = [
            Column(", ".join(filter(None, (each["name"], phase))), each["figures"])
            for phase, plan in plans.items()
            for each in plan.get("compiled") or ([plan] if "figures" in plan else ())
        ]
        if not columns:
            columns = [Column(values.pop("name", os.path.basename(path)), values)]
            if "aim" in values:
                columns.append(Column("aim", values.pop("aim")))
        _check([item for column in columns for item in column.figures.items()])
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(
            f"--compare {path}: {error}; give a file of --json with a compiled step, or a JSON "
            "object of figures."
        ) from None
    return columns


def _check(figures: Iterable[tuple[str, Any]]) -> None:
    known = [figure.key for section in SECTIONS for figure in section]
    for key, value in figures:
        if key not in known:
            raise ValueError(f"unknown figure {key!r}; {did_you_mean(key, known)}")
        if not isinstance(value, int | float | str | None):
            raise ValueError(f"{key!r} is {value!r}, neither a number nor a text")


def figures_table(
    report: StepReport, others: Sequence[Column] = (), footnotes: Sequence[str] = ()
) -> Table:
    """Returns the figures of a report, with columns of others to compare."""
    columns = [Column("ours", report.figures), *others]
    rows: list[tuple[str, ...]] = []
    for section in SECTIONS:
        known = [each for each in section if any(each.key in c.figures for c in columns)]
        rows += [(each.label, *(_cell(each, c.figures) for c in columns)) for each in known]
        rows += [()] if known else []
    title = f"{report.name} on {report.topology}, per step and device"
    names = (describe_mesh(report.mesh), *(f"{column.name}>" for column in columns))
    return Table(title, names, rows, footnotes)


def _cell(figure: Figure, values: Mapping[str, Any]) -> str:
    value = values.get(figure.key)
    if value is None:
        return "-"
    return value if isinstance(value, str) else figure.write(value)
