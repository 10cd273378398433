"""Outcomes of checks."""

import enum
from typing import NamedTuple

ONE_DEVICE = "1 device"  # The mesh of checks on one device.
COMPILED = "compiled"  # The check that the step compiles for a mesh.


class CheckFailedError(Exception):
    """A defect of the config; the message describes it."""


class CheckSkippedError(Exception):
    """A check that does not apply to the config; the message gives the reason."""


class Status(enum.Enum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "-"


class Outcome(NamedTuple):
    """The outcome of one check."""

    mesh: str  # `ONE_DEVICE`, or sizes of mesh axes.
    check: str
    status: Status
    detail: str = ""  # Defect found, reason for skipping, or extent of a passed check.
    seconds: float = 0.0
    traceback: str = ""  # Of an error that no check raises on purpose.
