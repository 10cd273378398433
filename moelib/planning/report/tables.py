"""Tables of compiled steps, for a terminal and for report.md."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moelib.core.table import Table, to_markdown
from moelib.parallel.mesh import describe_mesh
from moelib.planning.hlo.source import PHASES
from moelib.planning.report.figures import figures_table
from moelib.planning.report.step_report import Finding, Fusions, Share, StepReport

_GIB, _MIB = 2**30, 2**20
_MAX_SHAPE = 80  # Characters of the shape of a tuple.


# Columns of tables: the name, and the cell as a format string of a row or a function of it.
_Columns = Mapping[str, str | Callable[[Any], str]]

_COLLECTIVES: _Columns = {
    "kind": "{0.kind}",
    "axes (devices)": lambda row: f"{' '.join(row.axes) or '-'} ({row.group_size})",
    "in program>": "{0.count}",
    "async>": "{0.asynchronous}",
    "up to 1 KiB>": lambda row: (
        f"{row.small}" + (f" ({row.small_asynchronous} async)" if row.small else "")
    ),
    "executed>": "{0.executions:,}",
    "MiB>": lambda row: f"{row.bytes / _MIB:,.1f}",
}
_KERNELS: _Columns = {
    "kernel": "{0.name}",
    "kind": "{0.kind}",
    "library": "{0.library}",
    "in program>": "{0.count}",
    "executed>": "{0.executions:,}",
    "TFLOPs>": lambda row: f"{row.flops / 1e12:.4f}" if row.flops else "no estimate",
    "GiB>": lambda row: f"{row.bytes / _GIB:.3f}" if row.bytes else "-",
    "rows>": lambda row: _number(row.rows),
    "groups>": lambda row: _number(row.groups),
    "rows/block>": lambda row: _number(row.rows_at_once),
}
_STAGES: _Columns = {
    "stage": "{0.name}",
    "lines>": lambda row: _number(row.lines),
    "instructions>": lambda row: _number(row.instructions),
    "fusions>": lambda row: _number(row.fusions),
}
_MEMORY: _Columns = {"content": "{0.category}", "GiB>": lambda row: f"{row.amount / _GIB:.3f}"}
_SOURCES: _Columns = {
    "Mcycles>": lambda row: f"{row.cycles / 1e6:.2f}",
    "instructions>": "{0.instructions:,}",
    "phase, file, function": "{0.name}",
}


def _table(title: str, rows: Iterable[Any], columns: _Columns) -> Table:
    cells = [
        [c.format(row) if isinstance(c, str) else c(row) for c in columns.values()] for row in rows
    ]
    return Table(title, [*columns], cells)


def _number(value: int) -> str:
    return f"{value:,}" if value else "-"


def _times(executions: float) -> str:
    return f"{executions:,.2f}".removesuffix(".00")


def collectives_table(report: StepReport) -> Table:
    """Returns the collectives by mesh axes."""
    return _table("Collectives by mesh axes", report.collectives, _COLLECTIVES)


def kernels_table(report: StepReport) -> Table:
    """Returns the kernels with their own estimates."""
    return _table("Kernels", report.kernels, _KERNELS)


def sources_table(report: StepReport, top: int) -> Table:
    """Returns the functions whose instructions cost most."""
    return _table("Cycles by function", report.sources[:top], _SOURCES)


def costliest_table(report: StepReport, top: int, cycles_per_second: float) -> Table:
    """Returns the costliest instructions, with the source lines that made them."""
    columns: _Columns = {
        "Mcycles>": _SOURCES["Mcycles>"],
        "ms>": lambda row: f"{1e3 * row.cycles / cycles_per_second:.2f}",
        "executed>": lambda row: _times(row.executions),
        "instruction and origin": lambda row: (
            f"{row.name} {row.shape[:_MAX_SHAPE]}\n  " + (" < ".join(row.locations) or row.op_name)
        ),
    }
    return _table("Costliest instructions", report.costliest[:top], columns)


def finding_lines(finding: Finding) -> list[str]:
    """Returns a finding as lines: rule and config path, instruction, advice, source lines."""
    more = f" and {finding.count - 1} more" if finding.count > 1 else ""
    times = f", {_times(finding.executions)} times per step" if finding.executions else ""
    lines = [
        f"{finding.severity}: {finding.rule}: {finding.config_path}",
        f"{finding.instruction}{more}: {finding.bytes / _MIB:,.1f} MiB{times}",
        finding.advice,
    ]
    if finding.locations:
        lines.append("made at " + " < ".join(finding.locations))
    return lines


# -- report.md -----------------------------------------------------------------------------------


def report_text(report: StepReport, plots: Mapping[str, str]) -> str:
    """Returns report.md, with plots: files in the same folder by "memory" and "time"."""
    sections: list[tuple[str, list[Table | str]]] = [
        ("Findings", [_findings(report.findings)]),
        ("Figures", [figures_table(report)]),
        ("Stages", [_table("", report.stages, _STAGES)]),
        ("Memory", [_image(plots, "memory"), _table("", report.memory_shares, _MEMORY)]),
        ("Time", [_image(plots, "time"), *_cycles(report)]),
        ("Fusions", _fusions(report)),
        ("Collectives by mesh axes", [collectives_table(report)]),
        ("Kernels", [kernels_table(report)]),
        ("Costliest functions", [sources_table(report, 20)]),
    ]
    parts = [
        f"# {report.name} on {report.topology}",
        f"One training step, on one device of the mesh {describe_mesh(report.mesh)}.",
    ]
    for title, contents in sections:
        texts = (to_markdown(each) if isinstance(each, Table) else each for each in contents)
        parts += [f"## {title}", *filter(None, texts)]
    return "\n\n".join(parts) + "\n"


def _image(plots: Mapping[str, str], name: str) -> str:
    return f"![{name}]({plots[name]})" if name in plots else ""


def _findings(findings: Sequence[Finding]) -> str:
    items = []
    for finding in findings:
        head, *rest = finding_lines(finding)
        severity, rule, path = head.split(": ", 2)
        items.append("\n".join([f"- **{rule}** ({severity}): `{path}`", *(f"  {x}" for x in rest)]))
    return "\n".join(items) or "None."


def _cycles(report: StepReport) -> list[Table | str]:
    if "cycles" not in report.numbers:
        return ["This compiler does not estimate cycles."]
    return [
        "Mcycles by the compiler's estimate, without kernels and collectives.",
        _by_phase(report.cycle_shares, 1e6),
    ]


def _by_phase(shares: Sequence[Share], scale: float) -> Table:
    amounts = {(share.category, share.phase): share.amount / scale for share in shares}
    rows = []
    for name in dict.fromkeys(share.category for share in shares):
        own = [amounts.get((name, phase), 0.0) for phase in PHASES]
        rows.append((name, *(f"{value:.2f}" for value in own), f"{sum(own):.2f}"))
    rows.sort(key=lambda row: -float(row[-1]))
    totals = [sum(s.amount for s in shares if s.phase == phase) / scale for phase in PHASES]
    rows.append(("all", *(f"{value:.2f}" for value in totals), f"{sum(totals):.2f}"))
    return Table("", ("", *(f"{phase}>" for phase in PHASES), "all>"), rows)


def _fusions(report: StepReport) -> list[Table | str]:
    inside = sum(row.instructions for row in report.fusion_kinds)
    numbers = report.numbers
    text = (
        f"{numbers['fusions']:,} fusions with {inside:,} instructions, executed "
        f"{numbers['fusion_executions']:,} times; {numbers['instructions_outside_fusions']:,} "
        "instructions are outside of fusions."
    )
    before = next((s for s in report.stages if s.name == "HLO, before"), None)
    if before is not None:
        text += f" Before optimization: {before.instructions:,} instructions, "
        text += f"{before.fusions} fusions."
    kinds = dict.fromkeys(row.kind for row in report.fusion_kinds)
    rows = [
        _fusion_row(kind, [row for row in report.fusion_kinds if row.kind == kind])
        for kind in kinds
    ]
    rows.append(_fusion_row("all", report.fusion_kinds))
    return [
        text,
        "Fusions in the program, and executions in parentheses:",
        Table("", ("kind", *(f"{phase}>" for phase in PHASES), "all>"), rows),
    ]


def _fusion_row(kind: str, rows: Sequence[Fusions]) -> tuple[str, ...]:
    cells = []
    for phase in PHASES:
        own = [row for row in rows if row.phase == phase]
        count, executions = (sum(getattr(r, n) for r in own) for n in ("count", "executions"))
        cells.append(f"{count:,} ({executions:,})" if count else "-")
    return (kind, *cells, f"{sum(row.count for row in rows):,}")
