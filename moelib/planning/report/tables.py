"""Tables of `moelib plan` about compiled steps: figures, collectives, kernels, findings."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError
from moelib.core.table import show

_GIB, _MIB = 2**30, 2**20


class Figure(NamedTuple):
    """A row of the table: its key in a file of figures, its label, and how a value is written."""

    key: str
    label: str
    write: Callable[[Any], str]


def _gib(value: float) -> str:
    return f"{value / _GIB:.3f} GiB"


def _mib(value: float) -> str:
    return f"{value / _MIB:,.1f} MiB"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _tera(value: float) -> str:
    return f"{value / 1e12:.3f} T"


_MEMORY = (
    Figure("memory.peak", "peak memory", _gib),
    Figure("memory.arguments", "  arguments", _gib),
    Figure("memory.outputs", "  outputs", _gib),
    Figure("memory.temporaries", "  temporaries", _gib),
    Figure("memory.aliased", "  outputs in place of arguments", _gib),
    Figure("memory.code", "  code", _mib),
    Figure("memory.host", "  beside it, on the host", _gib),
)
_WORK = (
    Figure("cycles", "Mcycles without kernels, collectives", lambda v: f"{v / 1e6:.1f}"),
    Figure("matmul_flops", "matmul FLOPs of XLA", _tera),
    Figure("kernel_flops", "FLOPs of kernels", _tera),
    Figure("kernel_bytes", "bytes of kernels", _gib),
    Figure("executed_over_model_flops", "FLOPs executed / model's", lambda v: f"{v:.2f}"),
    Figure("rows_computed_over_routed", "rows computed / routed", lambda v: f"{v:.2f}"),
    Figure("fusions", "fusions", _whole),
    Figure("fusion_executions", "  executed", _whole),
    Figure("instructions", "instructions", _whole),
    Figure("instructions_outside_fusions", "  outside fusions", _whole),
)
_SECONDS = (
    Figure("seconds.trace", "trace", lambda v: f"{v:.1f} s"),
    Figure("seconds.lower", "lower", lambda v: f"{v:.1f} s"),
    Figure("seconds.compile", "compile", lambda v: f"{v:.1f} s"),
    Figure("seconds.compile_cpu", "  CPU", lambda v: f"{v:.1f} s"),
)


def _collective_figures(kind: str) -> list[Figure]:
    return [
        Figure(f"{kind}.bytes", f"{kind}", _mib),
        Figure(f"{kind}.count", "  in the program", _whole),
        Figure(f"{kind}.asynchronous", "  of these asynchronous", _whole),
        Figure(f"{kind}.small", "  of at most 1 KiB", _whole),
        Figure(f"{kind}.executions", "  executed", _whole),
    ]


def figures(report: Any) -> dict[str, float]:
    """Returns a `StepReport`'s figures by the keys that a file of figures has."""
    import dataclasses

    from moelib.planning.report.step_report import COLLECTIVES, total

    found: dict[str, float] = {}
    for part in ("memory", "seconds"):
        values = dataclasses.asdict(getattr(report, part))
        found |= {f"{part}.{name}": value for name, value in values.items()}
    for figure in _WORK:
        if hasattr(report, figure.key) and getattr(report, figure.key) is not None:
            found[figure.key] = getattr(report, figure.key)
    if not report.cycles:  # Compilers for GPUs estimate none.
        del found["cycles"]
    found["kernel_flops"] = sum(kernel.flops for kernel in report.kernels)
    found["kernel_bytes"] = sum(kernel.bytes for kernel in report.kernels)
    for operation in report.operations:
        found[f"{operation.opcode}.count"] = operation.count
        found[f"{operation.opcode}.bytes"] = operation.bytes
    for kind in COLLECTIVES:
        if (row := total(report.collectives, kind)) is not None:
            for name in ("bytes", "count", "asynchronous", "small", "executions"):
                found[f"{kind}.{name}"] = getattr(row, name)
    return found


class Column(NamedTuple):
    """Figures beside ours; a value that is a text is shown as it is."""

    name: str
    figures: Mapping[str, Any]


def read_beside(path: str) -> list[Column]:
    """Returns the columns of a file: a report, or figures by key, with `name` and `aim`.

    Raises:
        UsageError: If the file cannot be read as either.
    """
    from moelib.planning.report.step_report import StepReport

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        values = json.loads(text)
        compiled = values.get("compiled") if isinstance(values, dict) else None
        if compiled:
            reports = [StepReport.from_json(json.dumps(each)) for each in compiled]
            return [Column(report.name, figures(report)) for report in reports]
        if isinstance(values, dict) and isinstance(values.get("collectives"), list):
            report = StepReport.from_json(text)
            return [Column(report.name, figures(report))]
        columns = [Column(values.pop("name", os.path.basename(path)), values)]
        if "aim" in values:
            columns.append(Column("aim", values.pop("aim")))
        _check_keys(key for column in columns for key in column.figures)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--beside {path}: {error}; give a file that --json wrote, or a JSON object of figures."
        ) from None
    return columns


def _check_keys(keys: Iterable[str]) -> None:
    """Raises ValueError at a key that no figure has."""
    known = [figure.key for section in all_figures() for figure in section]
    for key in keys:
        if key not in known:
            raise ValueError(f"there is no figure {key!r}; {did_you_mean(key, known)}")


# -- Tables --------------------------------------------------------------------------------------


def print_report(report: Any, accelerator: Any, beside: Sequence[Sequence[Column]] = ()) -> None:
    """Prints the figures, others beside them, then collectives by mesh axis, and kernels.

    Args:
        report: A `StepReport`.
        accelerator: For what a device has.
        beside: Columns of other reports.
    """
    from rich.table import Table

    from moelib.parallel.mesh import describe_mesh

    ours = figures(report)
    others = [column for columns in beside for column in columns]
    table = Table(title=f"{report.name} on {report.topology}, one step of one device")
    table.add_column(describe_mesh(report.mesh))
    for name in ("ours", *(column.name for column in others)):
        table.add_column(name, justify="right")
    for section in _sections(ours, [column.figures for column in others]):
        for figure in section:
            values = [ours, *(column.figures for column in others)]
            table.add_row(figure.label, *(_written(figure, each) for each in values))
        table.add_section()
    show(table)
    show(_collective_table(report))
    show(_kernel_table(report))
    show("\n".join(verdict(report, accelerator)))


def all_figures() -> list[list[Figure]]:
    """Returns every figure that a table can have, in sections."""
    from moelib.planning.report.count import OPERATIONS
    from moelib.planning.report.step_report import COLLECTIVES

    operations = [
        figure
        for opcode in OPERATIONS
        for figure in (
            Figure(f"{opcode}.count", f"{opcode}: in the program", _whole),
            Figure(f"{opcode}.bytes", "  bytes, outside fusions", _mib),
        )
    ]
    collectives = [_collective_figures(kind) for kind in COLLECTIVES]
    return [list(_MEMORY), *collectives, list(_WORK), operations, list(_SECONDS)]


def _sections(ours: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[list[Figure]]:
    """Returns the rows for which somebody has a value, in sections."""
    known = set(ours).union(*others)
    kept = [[figure for figure in section if figure.key in known] for section in all_figures()]
    return [section for section in kept if section]


def _written(figure: Figure, values: Mapping[str, Any]) -> str:
    value = values.get(figure.key)
    if value is None:
        return "-"
    return value if isinstance(value, str) else figure.write(value)


def _collective_table(report: Any) -> Any:
    from rich.table import Table

    table = Table(title="collectives by mesh axes")
    table.add_column("kind")
    table.add_column("axes (devices)")
    for name in ("in program", "async", "of at most 1 KiB", "executed", "MiB"):
        table.add_column(name, justify="right")
    for row in report.collectives:
        axes = f"{' '.join(row.axes) or '-'} ({row.group_size})"
        small = f"{row.small}" + (f" ({row.small_asynchronous} async)" if row.small else "")
        counts = (f"{row.count}", f"{row.asynchronous}", small, _whole(row.executions))
        table.add_row(row.kind, axes, *counts, f"{row.bytes / _MIB:,.1f}")
    return table


def _kernel_table(report: Any) -> Any:
    from rich.table import Table

    table = Table(title="Kernels")
    table.add_column("kernel")
    for name in ("in program", "executed", "FLOPs", "bytes", "rows", "groups", "rows at once"):
        table.add_column(name, justify="right")
    for kernel in report.kernels:
        told = kernel.without_estimate == 0
        work = (_tera(kernel.flops), _gib(kernel.bytes)) if told else ("no estimate", "-")
        sizes = (kernel.rows, kernel.groups, kernel.rows_at_once)
        counts = (f"{kernel.count}", _whole(kernel.executions))
        table.add_row(kernel.name, *counts, *work, *(f"{size}" if size else "-" for size in sizes))
    return table


def verdict(report: Any, accelerator: Any) -> list[str]:
    """Returns lines that say whether the step fits, and what the figures leave out."""
    room = accelerator.hbm_bytes - report.memory.peak
    fits = f"fits with {room / _GIB:.2f}" if room >= 0 else f"does not fit by {-room / _GIB:.2f}"
    lines = [f"It {fits} GiB of the {accelerator.hbm_bytes / _GIB:.2f} GiB that a device has."]
    if report.cycles:  # Compilers for GPUs estimate none.
        ms = 1e3 * report.cycles / accelerator.cycles_per_second
        said = f"{ms:.1f} ms at {accelerator.cycles_per_second / 1e9:.2f} GHz"
        lines.append(f"{report.cycles / 1e6:.1f} Mcycles of the compiler's estimate are {said}.")
    if report.loops_of_unknown_length:
        loops = report.loops_of_unknown_length
        lines.append(f"Counted once, for their length is not known: {', '.join(loops)}.")
    return lines


def print_costliest(report: Any, top: int, cycles_per_second: float) -> None:
    """Prints where the cycles are: places of the program, then single instructions."""
    from rich.table import Table

    if not report.costliest:
        print("--top: this compiler estimates no cycles, so that none can be listed.")
        return
    places = Table(title="cycles by function")
    for name, justify in (
        ("Mcycles", "right"),
        ("instructions", "right"),
        ("pass, file, function", "left"),
    ):
        places.add_column(name, justify=justify, overflow="fold")
    for source in report.sources[:top]:
        places.add_row(f"{source.cycles / 1e6:.2f}", f"{source.instructions}", source.name)
    show(places)
    table = Table(title="costliest instructions")
    for name in ("Mcycles", "ms", "executed"):
        table.add_column(name, justify="right")
    table.add_column("instruction and where it was made", overflow="fold")
    for each in report.costliest[:top]:
        ms = 1e3 * each.cycles / cycles_per_second
        at = " < ".join(each.places) or each.op_name
        where = f"{each.name} {each.shape}\n  {at}"
        table.add_row(f"{each.cycles / 1e6:.2f}", f"{ms:.2f}", _whole(each.executions), where)
    show(table)


def print_prediction(report: Any, memory: float, results: Mapping[str, float]) -> None:
    """Prints what was predicted of a step beside what the compiled one has.

    Args:
        report: A `StepReport`.
        memory: Bytes that a device was predicted to hold.
        results: Predicted bytes of the results of collectives, by kind.
    """
    from rich.table import Table

    from moelib.planning.report.step_report import total

    table = Table(title="predicted beside compiled")
    table.add_column("")
    for name in ("predicted", "compiled", "off by"):
        table.add_column(name, justify="right")
    rows = [("peak memory", memory, report.memory.peak, _gib)]
    for kind, size in results.items():
        found = total(report.collectives, kind)
        rows.append((kind, size, 0 if found is None else found.bytes, _mib))
    for label, ours, compiled, write in rows:
        off = f"{100 * (ours - compiled) / compiled:+.1f}%" if compiled else "-"
        table.add_row(label, write(ours), write(compiled), off)
    show(table)


def print_findings(report: Any) -> None:
    """Prints what lint found in the compiled step."""
    from moelib.planning.report.markdown import finding_lines

    if not report.findings:
        print("Lint found nothing in the compiled step.")
    for finding in report.findings:
        head, *rest = finding_lines(finding)
        print("\n  ".join((head, *rest)))
