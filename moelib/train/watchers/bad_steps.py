"""Policy for bad steps: losses or parameters that are not finite, and spikes of the loss.

A bad step is taken again, from the newest checkpoint and on the same data. If it is good then, the
hardware was wrong; if it is bad again, the data are skipped. The log of the run is the memory of
the policy: a run that starts again continues where it was.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax

from moelib.core.config import config_class, config_for_function
from moelib.core.config_types import Limit, NonNegativeInt
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.learner.transforms import skip_bad_steps
from moelib.runs.course import course_of
from moelib.runtime.distributed import describe_processes
from moelib.runtime.processes import on_process_0
from moelib.train.failures import BadStepError, last_good, non_finite_error
from moelib.train.metrics import NON_FINITE
from moelib.train.watcher import GoBack, Watcher

BAD_STEP, SKIPPED_STEP = "bad_step", "skipped_step"
SUSPECTED = "silent_data_corruption_suspected"
# Events after which a step that is taken again need not have its former result.
_CHANGES = ("changed", "rewind_to", SUSPECTED)

_ROWS = {  # What an event or the action of a bad step is called in the final table.
    "stop": "stopped",
    "rewind": "taken again",
    "skip_batches": "on data that are skipped",
    SKIPPED_STEP: "skipped by learner.skip",
    SUSPECTED: "of suspected data corruption",
}


class BadSteps(Watcher):
    """Decides what to do after each step, equally on all processes."""

    @config_class
    class Config(Watcher.Config):
        # Action at a loss, or parameters, that are not finite. "skip" leaves it to learner.skip,
        # which is set to transforms.skip_bad_steps if it is unset.
        non_finite: Literal["stop", "skip", "rewind"] = "rewind"
        # Action at a loss far above the ones before; None accepts it.
        spike: Literal["stop", "rewind"] | None = None
        # Standard deviations above the mean loss beyond which a loss is a spike.
        spike_sigmas: Annotated[float, Limit(">=", 0)] = 6.0
        # Steps of the mean and the deviation, 2 or more; a start takes as many without judging.
        spike_window: Annotated[int, Limit(">=", 2)] = 100
        # Batches before a bad one that are skipped with it, as far as the checkpoint is before
        # them. A spike may be due to the update before it.
        skip_before: NonNegativeInt = 0
        # Rewinds of a run, over all its starts; the next bad step stops it.
        max_rewinds: NonNegativeInt = 10

        def complete(self, trainer: Any) -> None:
            """Lets the learner skip bad steps, if this policy leaves it to the learner."""
            if self.non_finite == "skip" and trainer.learner.skip is None:
                trainer.learner.skip = config_for_function(skip_bad_steps)

    def __init__(self, cfg: Config) -> None:
        """Starts without a history of losses."""
        super().__init__(cfg)
        cfg = self.config
        self._losses: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=cfg.spike_window
        )
        self._num_rewinds = 0
        self._again: Mapping[str, Any] = {}  # The event of the step to take again.

    def prepare(self, trainer: Any) -> None:
        """Raises UserError if there are no checkpoints to go back to."""
        rewinds = "rewind" in (self.config.non_finite, self.config.spike)
        if trainer.config.checkpointer is None and rewinds:
            raise UserError(
                f"{self.path} goes back to checkpoints, but checkpointer is None; set it, or "
                "remove this watcher."
            )

    def started(self) -> None:
        """Continues with the log of the run."""
        mesh = self.run.mesh
        self._devices = describe_processes(mesh) or [str(device) for device in mesh.devices.flat]
        self.resume(self.run.step, course_of(self.run.folder))

    def step_done(self, step: int, scalars: Scalars) -> Scalars:
        """Logs what the policy decides. Raises GoBack or BadStepError at a bad step."""
        run = self.run
        event = self.judge(step, run.position, scalars, first=run.first_to_skip)
        if event is None:
            return scalars
        if event["event"] == SUSPECTED:
            event["devices"] = self._devices  # No collective here, as the next step is running.
        if event["event"] != BAD_STEP:
            run.note(**event)
            run.print(describe(event))
            return scalars
        # Later decisions depend on the event.
        jax.block_until_ready(run.state())  # Else its collectives meet those of the next step.
        on_process_0(lambda: run.folder.log(**event))
        run.print(describe(event))
        if event["action"] != "stop":
            raise GoBack("bad step", durable=event["action"] == "skip_batches")
        if scalars[NON_FINITE]:
            cure = f"Raise {self.path}.max_rewinds={self.config.max_rewinds}, or lower"
            raise non_finite_error(step, scalars, run.checkpointer, f"{cure} the learning rate")
        raise BadStepError(f"{describe(event)}. {last_good(run.checkpointer)}")

    def rows(self) -> Sequence[tuple[str, str]]:
        """Returns the row with the number of bad steps of each kind, if there are some."""
        text = counts(self.run.folder.events())
        return [("bad steps", text)] if text else []

    def resume(self, step: int, events: Iterable[Mapping[str, Any]]) -> None:
        """Continues after `step` with the events of the run so far."""
        self._losses = collections.deque(
            (each for each in self._losses if each[0] <= step), maxlen=self.config.spike_window
        )
        self._num_rewinds, self._again = 0, {}
        for event in events:
            self._note(event)

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["event"] == BAD_STEP and event["action"] != "stop":
            self._num_rewinds += 1
            self._again = event if event["action"] == "rewind" else {}
        elif event["event"] in _CHANGES:
            self._again = {}

    def judge(
        self, step: int, position: int | None, scalars: Scalars, *, first: int | None
    ) -> dict[str, Any] | None:
        """Returns the event of a step; None if there is nothing to report.

        The event "bad_step" has an `action`: "stop", or "rewind" to the newest checkpoint, or
        "skip_batches" from `first` to before `stop` after doing so.

        Args:
            step: The step.
            position: Position of its batch; None if the input has no positions.
            scalars: Its metrics.
            first: First position that may be skipped; None if the input cannot skip.
        """
        cfg, loss = self.config, scalars["objective"]
        again = self._again if self._again.get("step") == step else {}
        about = {"step": step, "position": position, "loss": repr(loss)}  # Not finite in JSON.
        about["gradient_norm"] = repr(scalars.get("gradient_norm", math.nan))
        limit = float(again["limit"]) if again else self._limit()
        if scalars[NON_FINITE]:
            action, reason = cfg.non_finite, "its loss or the parameters after it are not finite"
        elif cfg.spike is not None and loss > limit:
            action, reason = cfg.spike, f"its loss is above {limit:.4f}, a spike"
        else:
            event = {"event": SUSPECTED, **about, "loss_before": again["loss"]} if again else None
            if scalars.get("skipped"):
                return {"event": SKIPPED_STEP, **about}
            self._losses.append((step, loss))
            self._note(event or {"event": None})
            return event
        event = {"event": BAD_STEP, **about, "reason": reason, "limit": repr(limit)}
        event["action"] = "stop" if action == "skip" else action  # The learner let it pass.
        if again:
            same = all(again[name] == about[name] for name in ("loss", "gradient_norm"))
            event |= {"loss_before": again["loss"], "same_bits": same}
        return event | self._rewind(event, first) if action == "rewind" else event

    def _rewind(self, event: dict[str, Any], first: int | None) -> dict[str, Any]:
        """Returns the values of the event of a step to rewind to that differ for another action."""
        if self._num_rewinds >= self.config.max_rewinds:
            more = f"the run was rewound {self._num_rewinds} times, as max_rewinds allows"
            return {"action": "stop", "reason": f"{event['reason']}, and {more}"}
        if "loss_before" not in event:
            return {}
        if event["position"] is None or first is None:
            return {"action": "stop", "reason": f"{event['reason']}; the input cannot skip it"}
        position = event["position"]
        begin = min(max(position - self.config.skip_before, first), position)
        return {"action": "skip_batches", "first": begin, "stop": position + 1}

    def _limit(self) -> float:
        """Returns the loss above which a step is a spike; infinity before the window is full."""
        losses = [loss for _, loss in self._losses]
        if len(losses) < self.config.spike_window:
            return math.inf
        mean = statistics.fmean(losses)
        return mean + self.config.spike_sigmas * statistics.pstdev(losses, mean)


def describe(event: Mapping[str, Any]) -> str:
    """Returns an event of `BadSteps.judge` as one line."""
    text = f"step {event['step']} (batch {event['position']}, loss {event['loss']})"
    if event["event"] == SKIPPED_STEP:
        return f"{text} is skipped by learner.skip"
    if event["event"] == SUSPECTED:
        before = event["loss_before"]
        return f"SILENT DATA CORRUPTION SUSPECTED: {text} is good now; its loss was {before} before"
    action = {
        "stop": "the run stops",
        "rewind": "it is taken again from the newest checkpoint",
        "skip_batches": "batches {first} to before {stop} are skipped from the newest checkpoint",
    }[event["action"]].format_map(event)
    again = {None: "", True: " with the same bits as before", False: " with other bits than before"}
    return f"{text} is bad{again[event.get('same_bits')]}: {event['reason']}; {action}"


def counts(events: Iterable[Mapping[str, Any]]) -> str:
    """Returns the number of bad steps of each kind in a run's log; "" if there are none."""
    kinds = [event.get("action") or event["event"] for event in events]
    found = {text: n for kind, text in _ROWS.items() if (n := kinds.count(kind))}
    return ", ".join(f"{number} {text}" for text, number in found.items())
