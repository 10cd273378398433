"""Tables of compiled steps, for a terminal and for report.md."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moelib.parallel.mesh import describe_mesh
from moelib.planning.hlo.source import PHASES
from moelib.planning.report.figures import figures_table
from moelib.planning.report.step_report import Finding, Row, StepReport
from moelib.runtime.table import Table, to_markdown

_GIB, _MIB = 2**30, 2**20
_MAX_SHAPE = 80  # Characters of the shape of a tuple.


# Columns of tables: the name, and the cell as a format string of a row or a function of it.
_Columns = Mapping[str, str | Callable[[Any], str]]

_COLLECTIVES: _Columns = {
    "kind": "{kind}",
    "axes (devices)": lambda row: f"{' '.join(row['axes']) or '-'} ({row['group_size']})",
    "in program>": "{count}",
    "async>": "{asynchronous}",
    "up to 1 KiB>": lambda row: (
        f"{row['small']}" + (f" ({row['small_asynchronous']} async)" if row["small"] else "")
    ),
    "executed>": "{executions:,}",
    "MiB>": lambda row: f"{row['bytes'] / _MIB:,.1f}",
}
_KERNELS: _Columns = {
    "kernel": "{name}",
    "kind": "{kind}",
    "library": "{library}",
    "in program>": "{count}",
    "executed>": "{executions:,}",
    "TFLOPs>": lambda row: f"{row['flops'] / 1e12:.4f}" if row["flops"] else "no estimate",
    "GiB>": lambda row: f"{row['bytes'] / _GIB:.3f}" if row["bytes"] else "-",
    "rows>": lambda row: _number(row["rows"]),
    "groups>": lambda row: _number(row["groups"]),
    "rows/block>": lambda row: _number(row["rows_at_once"]),
}
_STAGES: _Columns = {
    "stage": "{name}",
    "lines>": "{lines:,}",
    "instructions>": lambda row: _number(row["instructions"]),
    "fusions>": lambda row: _number(row["fusions"]),
}
_SOURCES: _Columns = {
    "Mcycles>": lambda row: f"{row['cycles'] / 1e6:.2f}",
    "instructions>": "{instructions:,}",
    "phase, file, function": "{name}",
}


_WAITS: _Columns = {
    "ms>": lambda row: f"{1e3 * row['seconds']:.2f}",
    "kind": lambda row: row["kind"] + ("" if row["asynchronous"] else ", synchronous"),
    "axes": lambda row: " ".join(row["axes"]) or "-",
    "phase": "{phase}",
    "source": "{source}",
}


def _table(title: str, rows: Iterable[Row], columns: _Columns) -> Table:
    cells = [
        [c.format(**row) if isinstance(c, str) else c(row) for c in columns.values()]
        for row in rows
    ]
    return Table(title, [*columns], cells)


def _number(value: int) -> str:
    return f"{value:,}" if value else "-"


def _times(executions: float) -> str:
    return f"{executions:,.2f}".removesuffix(".00")


def collectives_table(report: StepReport) -> Table:
    """Returns the collectives by mesh axes."""
    return _table(
        "Collectives by mesh axes", map(dataclasses.asdict, report.collectives), _COLLECTIVES
    )


def waits_table(report: StepReport, top: int = 8) -> Table:
    """Returns what the step waits for when it is played in its order, longest first."""
    shown = [row for row in report.waits if row["seconds"] >= 1e-5][:top]
    return _table("Waits for collectives, in the played step", shown, _WAITS)


def kernels_table(report: StepReport) -> Table:
    """Returns the kernels with their own estimates."""
    return _table("Kernels", map(dataclasses.asdict, report.kernels), _KERNELS)


def sources_table(report: StepReport, top: int) -> Table:
    """Returns the functions whose instructions cost most."""
    return _table("Cycles by function", report.sources[:top], _SOURCES)


def costliest_table(report: StepReport, top: int, cycles_per_second: float) -> Table:
    """Returns the costliest instructions, with the source lines that made them."""
    columns: _Columns = {
        "Mcycles>": _SOURCES["Mcycles>"],
        "ms>": lambda row: f"{1e3 * row['cycles'] / cycles_per_second:.2f}",
        "executed>": lambda row: _times(row["executions"]),
        "instruction and origin": lambda row: (
            f"{row['name']} {row['shape'][:_MAX_SHAPE]}\n  "
            + (" < ".join(row["locations"]) or row["op_name"])
        ),
    }
    return _table("Costliest instructions", report.costliest[:top], columns)


def finding_lines(finding: Finding) -> list[str]:
    """Returns a finding as lines: rule and config path, instruction, advice, source lines."""
    more = f" and {finding.count - 1} more" if finding.count > 1 else ""
    times = f", {_times(finding.executions)} times per step" if finding.executions else ""
    size = f": {finding.bytes / _MIB:,.1f} MiB{times}" if finding.bytes else ""
    lines = [
        f"{finding.severity}: {finding.rule}: {finding.config_path}",
        f"{finding.instruction}{more}{size}",
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
        ("Memory", [_image(plots, "memory"), _memory(report)]),
        ("Time", [_image(plots, "time"), *_cycles(report)]),
        ("Waits", [waits_table(report, 20)]),
        ("Fusions in the program", [_by_phase(report.fusions, "count", "{:,.0f}")]),
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


def memory_by_content(report: StepReport) -> dict[str, float]:
    """Returns the bytes that a device holds during a step, by content, without the host's."""
    held = {key.removeprefix("memory."): size for key, size in report.figures.items()}
    arguments = held["arguments"] - held["parameters"] - held["learner"]
    return {
        "parameters": held["parameters"],
        "learner's state": held["learner"],
        "other arguments": max(arguments, 0),
        "temporaries": held["temporaries"],
        "new outputs": max(held["outputs"] - held["aliased"], 0),
        "code": held["code"],
    }


def _memory(report: StepReport) -> Table:
    rows = [(name, f"{size / _GIB:.3f}") for name, size in memory_by_content(report).items()]
    return Table("", ("content", "GiB>"), rows)


def _cycles(report: StepReport) -> list[Table | str]:
    if not report.cycles:
        return ["This compiler does not estimate cycles."]
    return [
        "Mcycles by the compiler's estimate, without kernels and collectives.",
        _by_phase(report.cycles, "cycles", "{:.2f}", scale=1e6),
    ]


def _by_phase(rows: Sequence[Row], name: str, text: str, scale: float = 1) -> Table:
    """Returns the amounts of a name by kind and phase, the largest first, with sums."""
    sums = {kind: dict.fromkeys(PHASES, 0.0) for kind in ("all", *(row["kind"] for row in rows))}
    for row in rows:
        for kind in ("all", row["kind"]):
            sums[kind][row["phase"]] += row[name] / scale
    ordered = sorted(sums.items(), key=lambda each: (each[0] == "all", -sum(each[1].values())))
    cells = [
        (kind, *(text.format(x) for x in (*phases.values(), sum(phases.values()))))
        for kind, phases in ordered
    ]
    return Table("", ("kind", *(f"{phase}>" for phase in PHASES), "all>"), cells)
