"""Facts of one start of a run, for its loop and its watchers."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from moelib.checkpoint.contents import CheckpointRecord
from moelib.checkpoint.restore import Restored


class Point(NamedTuple):
    """A point of a run, between two steps."""

    step: int  # Steps taken.
    position: int | None  # Position in the data of the next batch; None if the input has none.


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run, or its return to a checkpoint: the state that its first step takes."""

    step: int = 0  # Step of the state.
    input_state: dict[str, Any] | None = None  # Position in the data then; None at the beginning.
    restored: Restored | None = None  # Its checkpoint, without arrays; None for an initial state.
    # Position in the data of the newest durable checkpoint, if the state is that of a local one.
    durable_position: int | None = None
    skip_ranges: Sequence[Sequence[int]] = ()  # Ranges [first, stop) of batches to skip.
    # Time of the start, in seconds since 1970.
    began: float = dataclasses.field(default_factory=time.time)
    restore_seconds: float = 0.0  # Time of restoring or initializing the state.

    @property
    def record(self) -> CheckpointRecord | None:
        """The record of the checkpoint."""
        return None if self.restored is None else self.restored.record

    @property
    def point(self) -> Point:
        """The point before the first step."""
        state = {"step": 0} if self.input_state is None else self.input_state
        return Point(self.step, state.get("step"))
