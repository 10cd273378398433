"""Tables of compiled steps, for a terminal and for report.md."""

from collections.abc import Mapping, Sequence

from moelib.core.table import Table, to_markdown
from moelib.parallel.mesh import describe_mesh
from moelib.planning.hlo.source import PHASES
from moelib.planning.report.figures import figures_table
from moelib.planning.report.step_report import Finding, Fusions, Share, StepReport

_GIB, _MIB = 2**30, 2**20
_MAX_SHAPE = 80  # Characters of the shape of a tuple.


def collectives_table(report: StepReport) -> Table:
    """Returns the collectives by mesh axes."""
    rows = [
        (
            row.kind,
            f"{' '.join(row.axes) or '-'} ({row.group_size})",
            f"{row.count}",
            f"{row.asynchronous}",
            f"{row.small}" + (f" ({row.small_asynchronous} async)" if row.small else ""),
            f"{row.executions:,}",
            _mib(row.bytes),
        )
        for row in report.collectives
    ]
    columns = ("kind", "axes (devices)", "in program>", "async>", "up to 1 KiB>", "executed>")
    return Table("Collectives by mesh axes", (*columns, "MiB>"), rows)


def _groups_table(report: StepReport) -> Table:
    rows = [
        (
            row.kind,
            row.groups.replace(" | ", "; "),
            row.link,
            f"{row.count}",
            f"{row.executions:,}",
            _mib(row.bytes),
        )
        for row in report.collective_groups
    ]
    columns = ("kind", "groups", "link", "in program>", "executed>", "MiB>")
    return Table("Collectives by groups of devices", columns, rows)


def kernels_table(report: StepReport) -> Table:
    """Returns the kernels with their own estimates."""
    rows = [
        (
            row.name,
            row.kind,
            row.library,
            f"{row.count}",
            f"{row.executions:,}",
            f"{row.flops / 1e12:.4f}" if row.flops else "no estimate",
            f"{row.bytes / _GIB:.3f}" if row.bytes else "-",
            *(f"{size:,}" if size else "-" for size in (row.rows, row.groups, row.rows_at_once)),
        )
        for row in report.kernels
    ]
    columns = ("kernel", "kind", "library", "in program>", "executed>", "TFLOPs>", "GiB>")
    return Table("Kernels", (*columns, "rows>", "groups>", "rows/block>"), rows)


def sources_table(report: StepReport, top: int) -> Table:
    """Returns the functions whose instructions cost most."""
    rows = [
        (f"{source.cycles / 1e6:.2f}", f"{source.instructions:,}", source.name)
        for source in report.sources[:top]
    ]
    return Table("Cycles by function", ("Mcycles>", "instructions>", "phase, file, function"), rows)


def costliest_table(report: StepReport, top: int, cycles_per_second: float) -> Table:
    """Returns the costliest instructions, with the source lines that made them."""
    rows = [
        (
            f"{each.cycles / 1e6:.2f}",
            f"{1e3 * each.cycles / cycles_per_second:.2f}",
            f"{each.executions:,}",
            f"{each.name} {each.shape[:_MAX_SHAPE]}\n  "
            + (" < ".join(each.locations) or each.op_name),
        )
        for each in report.costliest[:top]
    ]
    columns = ("Mcycles>", "ms>", "executed>", "instruction and origin")
    return Table("Costliest instructions", columns, rows)


def finding_lines(finding: Finding) -> list[str]:
    """Returns a finding as lines: rule and config path, instruction, advice, source lines."""
    more = f" and {finding.count - 1} more" if finding.count > 1 else ""
    times = f", {finding.executions} times per step" if finding.executions else ""
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
    """Returns report.md.

    Args:
        report: The report.
        plots: Files of plots in the same folder, by "memory" and "time".
    """
    sections: list[tuple[str, list[Table | str]]] = [
        ("Findings", [_findings(report.findings)]),
        ("Figures", [figures_table(report)]),
        ("Stages", [_stages_table(report)]),
        ("Memory", [_image(plots, "memory"), _memory_table(report)]),
        ("Time", [_image(plots, "time"), *_cycles(report)]),
        ("Fusions", _fusions(report)),
        *((table.title, [table]) for table in (collectives_table(report), _groups_table(report))),
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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}"


def _stages_table(report: StepReport) -> Table:
    number = lambda value: f"{value:,}" if value else "-"
    rows = [
        (s.name, number(s.lines), number(s.instructions), number(s.fusions)) for s in report.stages
    ]
    return Table("", ("stage", "lines>", "instructions>", "fusions>"), rows)


def _memory_table(report: StepReport) -> Table:
    rows = [(share.category, f"{share.amount / _GIB:.3f}") for share in report.memory_shares]
    return Table("", ("content", "GiB>"), rows)


def _cycles(report: StepReport) -> list[Table | str]:
    if not report.cycles:
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
    text = (
        f"{report.fusions:,} fusions with {inside:,} instructions, executed "
        f"{report.fusion_executions:,} times; {report.instructions_outside_fusions:,} instructions "
        "are outside of fusions."
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
    deepest = [
        (f"`{f.name}`", f.kind, f"{f.instructions:,}", f"{f.levels}", f"{f.executions:,}")
        + (f"`{f.op_name}`",)
        for f in report.deepest_fusions
    ]
    columns = ("fusion", "kind", "instructions>", "levels>", "executed>", "op_name")
    return [
        text,
        "Fusions in the program, and executions in parentheses:",
        Table("", ("kind", *(f"{phase}>" for phase in PHASES), "all>"), rows),
        "Fusions with the most instructions:",
        Table("", columns, deepest),
    ]


def _fusion_row(kind: str, rows: Sequence[Fusions]) -> tuple[str, ...]:
    cells = []
    for phase in PHASES:
        own = [row for row in rows if row.phase == phase]
        count, executions = (sum(getattr(r, n) for r in own) for n in ("count", "executions"))
        cells.append(f"{count:,} ({executions:,})" if count else "-")
    return (kind, *cells, f"{sum(row.count for row in rows):,}")
