"""A report as Markdown: tables of everything that was counted, and what lint found."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moelib.planning.report.step_report import PHASES, Finding, Share, StepReport

_GIB, _MIB = 2**30, 2**20


def report_text(report: StepReport, plots: Mapping[str, str]) -> str:
    """Returns report.md.

    Args:
        report: What it shows.
        plots: Files of plots beside it, by "memory" and "time".
    """
    axes = " x ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1)
    parts = [
        f"# {report.name} on {report.topology}",
        f"One training step, on one device of the mesh {axes or 'of one device'}.",
        *_section("Findings", [_findings(report.findings)]),
        *_section("Stages", [_stages(report)]),
        *_section("Memory", [_image(plots, "memory"), _memory(report)]),
        *_section("FLOPs", [_flops(report)]),
        *_section("Time", [_image(plots, "time"), _cycles(report)]),
        *_section("Fusions", _fusions(report)),
        *_section("Collectives by mesh axes", [_collectives(report)]),
        *_section("Collectives by groups of devices", [_groups(report)]),
        *_section("Kernels", [_kernels(report)]),
        *_section("Operations", [_operations(report)]),
        *_section("Costliest functions", [_sources(report)]),
        *_section("Compiling", [_seconds(report)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def finding_lines(finding: Finding) -> list[str]:
    """Returns a finding as lines: what it is and where to change it, then advice, then places."""
    more = f" and {finding.count - 1} more" if finding.count > 1 else ""
    times = f", {finding.executions} times a step" if finding.executions else ""
    lines = [
        f"{finding.severity}: {finding.rule}: {finding.config_path}",
        f"{finding.instruction}{more}: {finding.bytes / _MIB:,.1f} MiB{times}",
        finding.advice,
    ]
    if finding.places:
        lines.append("made at " + " < ".join(finding.places))
    return lines


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "None."
    items = []
    for finding in findings:
        head, *rest = finding_lines(finding)
        severity, rule, path = head.split(": ", 2)
        items.append("\n".join([f"- **{rule}** ({severity}): `{path}`", *(f"  {x}" for x in rest)]))
    return "\n".join(items)


def _section(title: str, parts: Iterable[str]) -> list[str]:
    return [f"## {title}", *parts]


def _image(plots: Mapping[str, str], name: str) -> str:
    return f"![{name}]({plots[name]})" if name in plots else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table, the first column to the left; "None." without rows."""
    lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    if not lines:
        return "None."
    marks = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join([f"| {' | '.join(heads)} |", f"| {' | '.join(marks)} |", *lines])


def _cell(value: Any) -> str:
    """Returns a value as a cell has it; a bar in it would begin another cell."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "/")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}"


def _stages(report: StepReport) -> str:
    rows = [(s.name, s.lines, s.instructions or "-", s.fusions or "-") for s in report.stages]
    return _table(("stage", "lines", "instructions", "fusions"), rows)


def _memory(report: StepReport) -> str:
    memory = report.memory
    rows = [(share.category, f"{share.amount / _GIB:.3f}") for share in report.memory_shares]
    rows += [
        ("arguments in all", f"{memory.arguments / _GIB:.3f}"),
        ("outputs in place of arguments", f"{memory.aliased / _GIB:.3f}"),
        ("in the host's memory", f"{memory.host / _GIB:.3f}"),
        ("**most at any time, on the device**", f"{memory.peak / _GIB:.3f}"),
    ]
    return _table(("what", "GiB"), rows)


def _flops(report: StepReport) -> str:
    ratio = report.executed_over_model_flops
    rows = [
        ("matmuls of XLA and its libraries", f"{report.matmul_flops / 1e12:.4f}"),
        ("kernels, by their own estimate", f"{sum(k.flops for k in report.kernels) / 1e12:.4f}"),
        ("model, by its own count", f"{report.model_flops / 1e12:.4f}"),
        ("executed over model", "not known" if ratio is None else f"{ratio:.2f}"),
    ]
    if report.rows_computed_over_routed is not None:
        rows.append(("rows computed over routed", f"{report.rows_computed_over_routed:.2f}"))
    return _table(("what", "TFLOP"), rows)


def _cycles(report: StepReport) -> str:
    if not report.cycles:
        return "This compiler has no estimate of time."
    named = "Mcycles by the compiler's estimate, kernels and collectives left out."
    return named + "\n\n" + _by_phase(report.cycle_shares, 1e6)


def _by_phase(shares: Sequence[Share], scale: float) -> str:
    amounts = {(share.category, share.phase): share.amount for share in shares}
    rows = []
    for name in dict.fromkeys(share.category for share in shares):
        own = [amounts.get((name, part), 0) / scale for part in PHASES]
        rows.append((name, *(f"{value:.2f}" for value in own), f"{sum(own):.2f}"))
    rows.sort(key=lambda row: -float(row[-1]))
    totals = [sum(s.amount for s in shares if s.phase == part) / scale for part in PHASES]
    rows.append(("all", *(f"{value:.2f}" for value in totals), f"{sum(totals):.2f}"))
    return _table(("", *PHASES, "all"), rows)


def _fusions(report: StepReport) -> list[str]:
    before = next((s for s in report.stages if s.name == "HLO, before"), None)
    inside = sum(row.instructions for row in report.fusion_kinds)
    said = (
        f"{report.fusions:,} fusions, executed {report.fusion_executions:,} times, of {inside:,} "
        f"instructions; {report.instructions_outside_fusions:,} instructions are in none."
    )
    if before is not None:
        said += f" Before: {before.instructions:,} instructions, {before.fusions} fusions."
    kinds = dict.fromkeys(row.kind for row in report.fusion_kinds)
    count = {(row.kind, row.phase): row for row in report.fusion_kinds}
    rows = []
    for kind in kinds:
        found = [count.get((kind, part)) for part in PHASES]
        cells = [f"{row.count:,} ({row.executions:,})" if row else "-" for row in found]
        rows.append((kind, *cells, sum(row.count for row in found if row)))
    every = [[row for row in report.fusion_kinds if row.phase == part] for part in PHASES]
    cells = [f"{sum(r.count for r in p):,} ({sum(r.executions for r in p):,})" for p in every]
    rows.append(("all", *cells, report.fusions))
    deepest = [
        (f"`{f.name}`", f.kind, f.instructions, f.levels, f.executions, f"`{f.op_name}`")
        for f in report.deepest_fusions
    ]
    return [
        said,
        "In the program, and in parentheses executed:",
        _table(("kind", *PHASES, "all"), rows),
        "The deepest:",
        _table(("fusion", "kind", "instructions", "levels", "executed", "made by"), deepest),
    ]


def _collectives(report: StepReport) -> str:
    rows = [
        (
            row.kind,
            f"{' '.join(row.axes) or '-'} ({row.group_size})",
            row.count,
            row.asynchronous,
            row.small,
            row.executions,
            _mib(row.bytes),
        )
        for row in report.collectives
    ]
    heads = ("kind", "axes (devices)", "in the program", "beside other work", "of at most 1 KiB")
    return _table((*heads, "executed", "MiB"), rows)


def _groups(report: StepReport) -> str:
    rows = [
        (row.kind, row.groups.replace(" | ", "; "), row.link, row.count, row.executions)
        + (_mib(row.bytes),)
        for row in report.collective_groups
    ]
    return _table(("kind", "groups", "over", "in the program", "executed", "MiB"), rows)


def _kernels(report: StepReport) -> str:
    rows = [
        (
            row.name,
            row.kind,
            row.library,
            row.count,
            row.executions,
            f"{row.flops / 1e12:.4f}" if row.flops else "no estimate",
            _mib(row.bytes) if row.bytes else "-",
            row.rows or "-",
        )
        for row in report.kernels
    ]
    heads = ("kernel", "for", "of", "in the program", "executed", "TFLOP", "MiB", "rows")
    return _table(heads, rows)


def _operations(report: StepReport) -> str:
    rows = [(row.opcode, row.count, row.executions, _mib(row.bytes)) for row in report.operations]
    return _table(("operation", "in the program", "executed", "MiB outside fusions"), rows)


def _sources(report: StepReport) -> str:
    rows = [(s.name, f"{s.cycles / 1e6:.2f}", s.instructions) for s in report.sources[:20]]
    return _table(("part, file, function", "Mcycles", "instructions"), rows)


def _seconds(report: StepReport) -> str:
    took = report.seconds
    rows = [("trace", took.trace), ("lower", took.lower), ("compile", took.compile)]
    rows.append(("compile, over all cores", took.compile_cpu))
    return _table(("what", "seconds"), [(name, f"{value:.1f}") for name, value in rows if value])
