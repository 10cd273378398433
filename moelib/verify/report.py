"""What `verify` found, as tables and as Markdown."""

import dataclasses
from collections.abc import Iterator, Sequence

from moelib.verify.mesh_checks import MESH_CHECKS
from moelib.verify.outcome import Outcome, Status
from moelib.verify.shrink import Change
from moelib.verify.verify import COMPILED, ONE_DEVICE

_SIGNS = {Status.PASSED: "same", Status.FAILED: "DIFFERS", Status.SKIPPED: "-"}


@dataclasses.dataclass
class Report:
    """Outcomes of a config's checks.

    Attributes:
        name: Of the config.
        num_devices: Of each mesh.
        changes: What was made small.
        meshes: Those that were to be tried, in order.
        asked: Whether they were named: then each has to pass.
        outcomes: What was found, in order.
        seconds: How long all of it took.
    """

    name: str
    num_devices: int
    changes: Sequence[Change]
    meshes: Sequence[str]
    asked: bool = False
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Takes up an outcome."""
        self.outcomes.append(outcome)

    @property
    def status(self) -> Status:
        """FAILED if a check failed, SKIPPED if no mesh, or not each asked for, was verified."""
        if any(each.status is Status.FAILED for each in self.outcomes):
            return Status.FAILED
        wanted = set(self.meshes) - (set() if self.asked else self._left_out)
        return Status.PASSED if wanted and wanted <= self._done else Status.SKIPPED

    @property
    def _done(self) -> set[str]:
        """The meshes on which the last check has been made."""
        return {each.mesh for each in self.outcomes if each.check == MESH_CHECKS[-1]}

    @property
    def _left_out(self) -> set[str]:
        """The meshes that the config cannot be split over."""
        skipped = (each for each in self.outcomes if each.status is Status.SKIPPED)
        return {each.mesh for each in skipped if each.check == COMPILED}

    def tables(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Yields (title, columns, rows): the checks on one device, then meshes by checks."""
        single = [each for each in self.outcomes if each.mesh == ONE_DEVICE]
        rows = [(o.check, o.status.value, o.said, f"{o.seconds:.1f}") for o in single]
        yield f"{self.name} on one device", ("check", "", "", "s"), rows
        title = f"{self.name} on meshes of {self.num_devices} devices, against one device"
        columns = ("mesh", *MESH_CHECKS, "s")
        yield title, columns, [self._mesh_row(mesh) for mesh in self.meshes]

    def _mesh_row(self, mesh: str) -> list[str]:
        found = {each.check: each for each in self.outcomes if each.mesh == mesh}
        signs = [_SIGNS[found[c].status] if c in found else "" for c in MESH_CHECKS]
        if (compiled := found.get(COMPILED)) and compiled.status is not Status.PASSED:
            signs = [_SIGNS[compiled.status] for _ in MESH_CHECKS]
        return [mesh, *signs, f"{sum(each.seconds for each in found.values()):.1f}"]

    def lines(self) -> list[str]:
        """Returns what was skipped and why, then what failed, or that nothing did."""
        skipped = [each for each in self.outcomes if each.status is Status.SKIPPED]
        failed = [each for each in self.outcomes if each.status is Status.FAILED]
        said = [f"Not checked: {each.mesh}, {each.check}: {each.said}" for each in skipped]
        said += [f"FAILED: {each.mesh}, {each.check}: {each.said}" for each in failed]
        if not failed:
            num, stopped = len(self._done), set(self.meshes) - self._done - self._left_out
            what = "nothing was verified" if num == 0 else "the same as on one device"
            what += ", then stopped" if stopped else ""
            said.append(f"{num} of {len(self.meshes)} meshes: {what}, in {self.seconds:.0f} s.")
        return said

    def to_markdown(self) -> str:
        """Returns the tables, the lines, and the changed fields."""
        parts = [f"# Verification of {self.name}", ""]
        for title, columns, rows in self.tables():
            parts += [f"## {title}", "", *_table(columns, rows), ""]
        parts += [f"- {line}" for line in self.lines()]
        changes = [(f"`{c.path}`", f"`{c.before!r}`", f"`{c.after!r}`") for c in self.changes]
        parts += ["", "## What was made small", "", *_table(("field", "config", "here"), changes)]
        return "\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    clean = lambda cell: cell.replace("|", r"\|").replace("\n", " ")
    lines = [f"| {' | '.join(map(clean, row))} |" for row in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]
