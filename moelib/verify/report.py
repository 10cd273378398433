"""The report of a verification: tables of checks, for a terminal and as Markdown."""

import dataclasses
from collections.abc import Sequence

from moelib.runtime.table import Table, to_markdown
from moelib.verify.mesh_checks import MESH_CHECKS
from moelib.verify.outcome import COMPILED, ONE_DEVICE, Outcome, Status
from moelib.verify.shrink import Change

_CELLS = {Status.PASSED: "same", Status.FAILED: "DIFFERS", Status.SKIPPED: "-"}


@dataclasses.dataclass
class Report:
    """Outcomes of a config's checks."""

    name: str  # Name of the config.
    num_devices: int  # Devices of each mesh.
    changes: Sequence[Change]  # Fields that were changed to make the config small.
    meshes: Sequence[str]  # Meshes to check, in order.
    requested: bool = False  # Whether the meshes were named, so that each has to pass.
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)  # In order.
    seconds: float = 0.0  # Duration of all checks.

    def __repr__(self) -> str:
        return f"Report({self.name}, {self.status.value}: {self.lines()[-1]})"

    @property
    def status(self) -> Status:
        """FAILED if a check failed; SKIPPED if no mesh, or not every requested one, was checked."""
        if any(each.status is Status.FAILED for each in self.outcomes):
            return Status.FAILED
        wanted = set(self.meshes) - (set() if self.requested else self._impossible)
        return Status.PASSED if wanted and wanted <= self._completed else Status.SKIPPED

    @property
    def _completed(self) -> set[str]:
        """Meshes whose last check has run."""
        return {each.mesh for each in self.outcomes if each.check == [*MESH_CHECKS][-1]}

    @property
    def _impossible(self) -> set[str]:
        """Meshes that the config cannot be split over."""
        skipped = (each for each in self.outcomes if each.status is Status.SKIPPED)
        return {each.mesh for each in skipped if each.check == COMPILED}

    def tables(self) -> list[Table]:
        """Returns the checks on one device, and the meshes by check."""
        single = [each for each in self.outcomes if each.mesh == ONE_DEVICE]
        rows = [(o.check, o.status.value, o.detail, f"{o.seconds:.1f}") for o in single]
        return [
            Table(f"{self.name} on one device", ("check", "", "", "s>"), rows),
            Table(
                f"{self.name} on meshes of {self.num_devices} devices, compared with one device",
                ("mesh", *MESH_CHECKS, "s>"),
                [self._mesh_row(mesh) for mesh in self.meshes],
            ),
        ]

    def _mesh_row(self, mesh: str) -> list[str]:
        found = {each.check: each for each in self.outcomes if each.mesh == mesh}
        rounded = {o.check for o in found.values() if o.status is Status.PASSED and o.detail}
        cells = [_CELLS[found[name].status] if name in found else "" for name in MESH_CHECKS]
        cells = [
            "rounded" if name in rounded else cell
            for name, cell in zip(MESH_CHECKS, cells, strict=True)
        ]
        if (compiled := found.get(COMPILED)) and compiled.status is not Status.PASSED:
            cells = [_CELLS[compiled.status] for _ in MESH_CHECKS]
        return [mesh, *cells, f"{sum(each.seconds for each in found.values()):.1f}"]

    def lines(self) -> list[str]:
        """Returns skipped checks, rounded numbers, then failures, or the number of equal meshes."""
        of = lambda status: (each for each in self.outcomes if each.status is status)
        lines = [f"Not checked: {o.mesh}, {o.check}: {o.detail}" for o in of(Status.SKIPPED)]
        lines += [
            f"Rounded: {o.mesh}, {o.check}: {o.detail}"
            for o in of(Status.PASSED)
            if o.detail and o.mesh != ONE_DEVICE
        ]
        if self.requested:
            lines += [
                f"NOT CHECKED, although requested: {mesh}"
                for mesh in self.meshes
                if mesh in self._impossible
            ]
        failures = [f"FAILED: {o.mesh}, {o.check}: {o.detail}" for o in of(Status.FAILED)]
        if failures:
            return lines + failures
        completed = len(self._completed)
        result = "same numbers as on one device" if completed else "nothing was verified"
        if set(self.meshes) - self._completed - self._impossible:
            result += ", then stopped"
        total = f"{completed} of {len(self.meshes)} meshes"
        return [*lines, f"{total}: {result}, in {self.seconds:.0f} s."]

    def to_markdown(self) -> str:
        """Returns the tables, the lines, the changed fields, and tracebacks of errors."""
        parts = [f"# Verification of {self.name}"]
        for table in self.tables():
            parts += [f"## {table.title}", to_markdown(table)]
        parts.append("\n".join(f"- {line}" for line in self.lines()))
        changes = [(f"`{c.path}`", f"`{c.before!r}`", f"`{c.after!r}`") for c in self.changes]
        table = Table("Changes to make the config small", ("field", "config", "here"), changes)
        parts += [f"## {table.title}", to_markdown(table)]
        for o in self.outcomes:
            if o.traceback:
                parts += [f"## Traceback of {o.mesh}, {o.check}", f"```\n{o.traceback}```"]
        return "\n\n".join(parts) + "\n"
