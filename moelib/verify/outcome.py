"""What a check came to."""

import enum
from typing import NamedTuple


class FaultError(Exception):
    """Something that is wrong with the config; the message says what."""


class NotApplicableError(Exception):
    """A check that the config gives nothing to do; the message says why."""


class Status(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "-"


class Outcome(NamedTuple):
    """What one check came to.

    Attributes:
        mesh: Where: "1 device", or sizes of mesh axes.
        check: Its name.
        status: How it ended.
        said: What was found, or why it was skipped.
        seconds: How long it took.
    """

    mesh: str
    check: str
    status: Status
    said: str = ""
    seconds: float = 0.0
