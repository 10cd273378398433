"""Watchers: behaviors of a run besides its steps, evaluations and checkpoints."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import jax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.config import Configurable, config_class
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.runs.folder import RunFolder
from moelib.train.start import Start


class GoBack(Exception):  # noqa: N818 (not an error: the run goes on)
    """Raised by a watcher: the run continues from a checkpoint before the current step."""

    def __init__(self, reason: str, *, durable: bool) -> None:
        """Takes the reason, for the log of the run, and whether the checkpoint must be durable."""
        super().__init__(reason)
        self.reason, self.durable = reason, durable


@dataclasses.dataclass
class Activity:
    """What a run did last: for a watcher that it goes on."""

    step: int = 0
    since: float | None = None  # `time.monotonic` at the last sign of life; None: not timed.
    cause: str = ""  # Of a wait, if it is known, such as ", while the run restores".

    def beat(self, step: int) -> None:
        """Marks that a step, or other work after it, has ended."""
        self.step, self.since = step, time.monotonic()

    def pause(self) -> None:
        """Stops the clock until the next beat, for work that may take long."""
        self.since = None


class Run(Protocol):
    """A run, as a watcher sees it."""

    config: Any  # The `SpmdTrainer.Config`.
    folder: RunFolder  # Its files, and the log of its events.
    metrics_path: str  # File of the metrics, as JSON lines.
    model: Any
    mesh: jax.sharding.Mesh
    start: Start
    compile_seconds: float  # Time of the first step, most of it compilation; 0 before it.
    checkpointer: Checkpointer | None
    evaluations: dict[str, Scalars]  # Latest metrics of each evaler, by its name.
    activity: Activity
    last_step: int  # At which this start ends: of its phase, or of the run.
    stopped_by: str | None  # Signal, "end of input" or reason of `stop`; None before.
    error: BaseException | None  # Error that ended the run; None before, and without one.

    @property
    def step(self) -> int:
        """Steps dispatched, those of earlier starts included."""

    @property
    def position(self) -> int | None:
        """Position in the data of the last step's batch; None if the input has no positions."""

    @property
    def first_to_skip(self) -> int | None:
        """First position in the data that may be skipped; None if the input cannot skip."""

    def state(self) -> Any:
        """Returns the `TrainerState` after the steps dispatched."""

    def eval_params(self) -> Any:
        """Returns the parameters to evaluate."""

    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds of this start by `throughput.PARTS`, without the first step's."""

    def is_logged(self, step: int) -> bool:
        """Returns whether the metrics of a step are logged if nothing is wrong with it."""
        return step % self.config.log_every_n_steps == 0 or step == self.last_step

    def spent_on(self, part: str) -> AbstractContextManager[None]:
        """Counts the time of a block for one of `throughput.PARTS`."""

    def wait(self) -> None:
        """Waits for the steps dispatched, and checks their metrics."""

    def stop(self, reason: str) -> None:
        """Ends the run after the current step, with a checkpoint."""
        self.stopped_by = reason

    def note(self, event: str, **fields: Any) -> None:
        """Appends an event of JSON values to the run's log, `events.jsonl`."""
        self.folder.note(event, **fields)

    def print(self, line: str) -> None:
        """Prints a line above the progress bar, on process 0."""

    def on_batch(self, number: int) -> None:
        """To be called after each batch of long work between steps, with its number, from 0.

        Raises an exception, to be passed on, if the run is asked to stop.
        """


class Watcher(Configurable):
    """A behavior of a run: overrides the methods that it needs, which here do nothing.

    All processes call them, at the same steps. `run` is set before `started`. An exception ends the
    run.
    """

    @config_class
    class Config(Configurable.Config):
        def complete(self, trainer: Any) -> None:
            """Sets unset fields that follow from a `SpmdTrainer.Config`, here or there."""

    watches_experts: ClassVar[bool] = False  # Whether it needs a model with MoE layers.
    path: str = "watchers"  # Path of its config, for errors; set before `prepare`.
    run: Run

    def prepare(self, trainer: Any) -> None:
        """Called when the `SpmdTrainer` is built. Raises UserError if it lacks what is needed."""

    def started(self) -> None:
        """Called before the first step of a start, and after each `GoBack`."""

    def step_done(self, step: int, scalars: Scalars) -> Scalars:
        """Returns the metrics of a finished step, with those added; the next step is running."""
        return scalars

    def between_steps(self, step: int) -> None:
        """Called after `step` was dispatched, before evaluations; `run.wait` waits for it."""

    def evaluated(self, step: int, scalars: Scalars) -> None:
        """Called after evaluations at `step`, with their metrics "<evaler>/<metric>"."""

    def before_save(self, step: int) -> None:
        """Called before a durable checkpoint of `step`, which has finished."""

    def ended(self) -> None:
        """Called at the end of a start, with or without an error, when all files are closed."""

    def rows(self) -> Sequence[tuple[str, str]]:
        """Returns (title, text) of rows of the final table."""
        return ()


@contextlib.contextmanager
def named_in_errors(watcher: Watcher, *, can_go_back: bool = True) -> Iterator[None]:
    """Adds the watcher's path to an exception of the block, as `add_path` does.

    Raises:
        UserError: Instead of a `GoBack`, if there is no step left to go back to.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, GoBack) and not can_go_back:
            raise UserError(
                f"{watcher.path}: GoBack ({error.reason}) after the last step; raise it before "
                "`ended`, in step_done, between_steps, evaluated or before_save."
            ) from None
        add_path(error, watcher)
        raise


def add_path(error: Exception, watcher: Watcher) -> None:
    """Adds a note with the watcher's path to its exception, if the message lacks it."""
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not re.search(rf"{re.escape(watcher.path)}(?![\w.])", said):
        error.add_note(f"Raised by {watcher.path}, a {type(watcher).__qualname__}.")
