"""The training loop: the order of what happens around each step.

Steps are dispatched asynchronously: while step k runs, the loop checks the metrics of step k - 1.
Only an evaluation, a checkpoint, the end of a trace and the end of the run wait for the current
step, so that no state is saved before its step has been checked.
"""

import contextlib
import dataclasses
import logging
import math
import numbers
import os
import time
from collections.abc import Mapping
from typing import Any

import jax

from moelib.checkpoint.checkpointer import CheckpointSaveError
from moelib.checkpoint.restore import Restored
from moelib.core.errors import UserError, first_line
from moelib.core.metrics import Scalars
from moelib.core.precision import activation_dtype
from moelib.data.batches.prefetch import Prefetcher
from moelib.runs.phases import END_OF_PHASE, last_step, steps_text
from moelib.runtime.distributed import describe_processes
from moelib.runtime.processes import on_process_0
from moelib.runtime.progress import Progress
from moelib.runtime.table import Table, print_table
from moelib.train import report
from moelib.train.evaluations import Evaluations
from moelib.train.failures import non_finite_error
from moelib.train.interval import LogInterval
from moelib.train.metrics import NON_FINITE, PackedMetrics, unpack
from moelib.train.signals import StopRequest, ended_by_sigterm
from moelib.train.start import Point, Start
from moelib.train.throughput import Throughput
from moelib.train.trained import Trained
from moelib.train.watcher import Activity, GoBack, Run, Watcher, add_path, named_in_errors

logger = logging.getLogger(__name__)


class _WorkStopped(Exception):  # noqa: N818 (not an error)
    """Work between steps, such as an evaluation, was ended by a request to stop."""


class TrainLoop(Run):
    """One start of a trainer, from its current state to the end, inside `jax.set_mesh`."""

    def __init__(self, trainer: Trained, start: Start, *, stop: StopRequest) -> None:
        """Takes the trainer, the facts of its state, and the request to stop."""
        self._trainer, self.start, self._stop = trainer, start, stop
        self.config = cfg = trainer.config
        self.last_step = last_step(cfg)
        self.folder = trainer.folder
        self.model, self.mesh = model, mesh = trainer.model, trainer.mesh()
        self.checkpointer, self._summary_writer = trainer.saver, trainer.summary_writer
        self.metrics_path = trainer.summary_writer.config.jsonl_path
        self._watchers = list(trainer.watchers.values())
        self._progress = Progress(
            "step", cfg.max_step, start=start.step, enabled=jax.process_index() == 0
        )
        self._throughput = Throughput(
            trainer.flops_per_token(),
            list(mesh.devices.flat),
            activation_dtype(cfg),
            "tokens" if model.counts_tokens else "examples",
        )
        self._interval = LogInterval(
            self._throughput,
            self._progress,
            self._summary_writer,
            num_steps=cfg.log_every_n_steps,
            num_slots=cfg.input.global_batch_size * cfg.input.seq_len,
            num_examples=None if model.counts_tokens else cfg.input.global_batch_size,
            is_language_model=model.is_language_model,
        )
        self._evaluations = Evaluations(
            trainer.evalers,
            start.record,
            best_metric=None if trainer.saver is None else trainer.saver.config.best_metric,
            weight="num_tokens" if model.is_language_model else "weight",
        )
        self.evaluations = self._evaluations.latest
        self._summaries: Scalars = {}  # Metrics of the evaluations after the current step.
        self.stopped_by: str | None = None
        self.error: BaseException | None = None
        self.activity = Activity()
        self.compile_seconds = 0.0
        self._reached = start.point  # After the step that was dispatched last.
        self._pending: PackedMetrics | None = None  # Metrics of that step, until it is checked.
        # Position in the data of the newest durable checkpoint, or of the first state.
        durable = start.durable_position
        self._kept = start.point.position if durable is None else durable
        self._can_skip = False
        # Step of the newest durable checkpoint of this start.
        self._saved_step = start.step if self._is_saved() else None
        self._blocking_seconds = 0.0  # Time of the last save.
        self._skipped_save = False  # Whether the last checkpoint was not written: not finite.
        for watcher in self._watchers:
            watcher.run = self

    # What watchers use.

    @property
    def step(self) -> int:
        """Steps dispatched, those of earlier starts included."""
        return self._reached.step

    @property
    def position(self) -> int | None:
        """Position in the data of the last step's batch; None if the input has no positions."""
        # Of an input that skips, the position before a batch is not that after the one before.
        return None if self._reached.position is None else self._reached.position - 1

    @property
    def first_to_skip(self) -> int | None:
        """First position in the data that may be skipped; None if the input cannot skip."""
        return self._kept if self._can_skip else None

    def state(self) -> Any:
        """Returns the state after the steps dispatched."""
        return self._trainer.trainer_state

    def eval_params(self) -> Any:
        """Returns the parameters to evaluate."""
        return self._trainer.model_params_for_eval()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of this start by `throughput.PARTS`, without the first step's."""
        return self._throughput.seconds()

    def spent_on(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time of a block for one of `throughput.PARTS`."""
        return self._throughput.spent_on(part)

    def print(self, line: str) -> None:
        """Prints a line above the progress bar."""
        self._progress.log(line)

    def on_batch(self, number: int) -> None:
        """Ends long work between steps at a signal to stop; the resumed run begins it again."""
        del number
        self.activity.beat(self.step)
        if self._stop.requested():
            raise _WorkStopped

    # The run.

    def run(self) -> dict[str, Any]:
        """Takes the steps; see `SpmdTrainer.run`."""
        begin = time.perf_counter()
        with contextlib.ExitStack() as stack:
            watching = stack.enter_context(contextlib.ExitStack())
            stack.push(self._keep_error)
            stack.callback(self._summary_writer.close)
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            stack.enter_context(self._stop)
            stack.enter_context(self._progress)
            stack.callback(self._throughput.stop)  # Closing files is not the time of a step.
            for line in (*describe_processes(self.mesh), self._trainer.describe()):
                self.print(line)
            if self.config.phases:
                self.print(steps_text(self.config))
            for watcher in self._watchers:
                watching.callback(self._end_watcher, watcher)
                with contextlib.suppress(_WorkStopped), named_in_errors(watcher):
                    watcher.started()
            self._summary_writer.resume(self.step)
            self._summary_writer.write_text(self.step, "config", self.config.debug_string())
            if (restored := self.start.restored) is not None:
                self.print(f"restored step {self.step} from {os.path.dirname(restored.path)}")
                self._make_up_for_evaluations(restored)
            if self._stop_requested():
                pass
            elif self.step < self.last_step:
                self._evaluations.open(self)
                feed = stack.enter_context(self._trainer.open_input(self.start))
                self._can_skip = feed.can_seek
                self._take_steps(feed)
                self.wait()  # Before the input is closed: the last step may be bad too.
                if self.stopped_by is None and self.step < self.config.max_step:
                    self.stopped_by = END_OF_PHASE
            else:
                self.print(f"max_step={self.config.max_step} is reached; no step is left")
            self._end()
        if jax.process_index() == 0:
            print_table(self._table(time.perf_counter() - begin))
        return {
            "loss": self._interval.last.get("loss"),
            "aux": self._interval.last,
            "evaler_summaries": self.evaluations,
            "step": self.step,
            "stopped_by": self.stopped_by,
        }

    def _is_saved(self) -> bool:
        """Returns whether the first state is that of a durable checkpoint."""
        saver, restored = self.checkpointer, self.start.restored
        return saver is not None and restored is not None and not saver.is_local(restored.path)

    def _keep_error(self, _: object, error: BaseException | None, __: object) -> None:
        self.error = error

    def _take_steps(self, feed: Prefetcher[Any]) -> None:
        first = self._next_batch(feed)
        if first is None:
            return
        begin = time.perf_counter()
        with ended_by_sigterm("compiling"):
            self._take_step(first, feed)
        self.compile_seconds = time.perf_counter() - begin
        self.print(f"first step, compilation included: {self.compile_seconds:.1f} s")
        self._throughput.restart()  # Rates do not include the compilation.
        while not self._after_step() and self._reached.step < self.last_step:
            batch = self._next_batch(feed)
            if batch is None:
                return
            self._take_step(batch, feed)

    def _next_batch(self, feed: Prefetcher[Any]) -> Any:
        """Returns the next batch, or None at the end of the input."""
        self.activity.cause = ", as the input of this process has no batch"
        with self._throughput.spent_on("input"):
            batch = next(feed, None)
        self.activity.cause = ""
        if batch is None:
            self.stopped_by = "end of input"
        return batch

    def _take_step(self, batch: Any, feed: Prefetcher[Any]) -> None:
        """Dispatches a step, and checks the one before while it runs."""
        step = self._reached.step + 1
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            packed = self._trainer.run_step(batch, input_state=feed.state())
        if self._pending is None:  # The first step, which is compiled: its collectives may hang.
            self.activity.beat(step - 1)
        self.wait()
        self._reached = Point(step, feed.state().get("step"))
        self._pending, self._summaries = packed, {}

    def wait(self) -> None:
        """Waits for the last dispatched step, if it has not been checked yet, and checks it."""
        if self._pending is None:
            return
        packed, self._pending = self._pending, None
        step, scalars = self._reached.step, unpack(packed)
        self.activity.beat(step)
        if math.isnan(scalars["num_tokens"]):
            raise UserError(
                f"step {step}: a weight of the loss is negative or NaN; return (sum, weight) with "
                "weights of 0 or more."
            )
        self._interval.step_done(scalars)
        try:
            for watcher in self._watchers:
                try:  # As `named_in_errors`, without its calls in each step.
                    added = watcher.step_done(step, scalars)
                except Exception as error:
                    add_path(error, watcher)
                    raise
                if added is not scalars:
                    scalars = _checked(watcher, added, scalars)
            if scalars[NON_FINITE] and self.config.stop_on_nan:
                jax.block_until_ready(self.state())  # Else its collectives meet those of the error.
                raise non_finite_error(step, scalars, self.checkpointer)
        except Exception:
            self._log(step, scalars)
            raise
        if self.is_logged(step):
            self._log(step, scalars)

    def _log(self, step: int, scalars: Scalars) -> None:
        of_checkpoints: Scalars = {}
        if (saver := self.checkpointer) is not None:
            of_checkpoints["checkpoint/blocking_seconds"] = self._blocking_seconds
            of_checkpoints["checkpoint/steps_at_risk"] = step - max(
                saver.complete_step, self.start.step
            )
        self._interval.log(step, scalars, of_checkpoints)

    # Between steps.

    def _after_step(self) -> bool:
        """Evaluates and saves if due; returns whether to stop.

        A request to stop is served before an evaluation, or between two of its batches; the resumed
        run then makes up for it.
        """
        step = self._reached.step
        for watcher in self._watchers:
            try:
                watcher.between_steps(step)
            except _WorkStopped:
                continue
            except Exception as error:
                add_path(error, watcher)
                raise
        if self._stop_requested():
            return True
        summaries = self._evaluate()
        saver = self.checkpointer
        if saver is not None and saver.should_save(step=step, summaries=summaries):
            self._save(summaries)
        elif saver is not None and saver.should_save_locally(step=step):
            self._save(summaries, local=True)
        return self._stop_requested()

    def _stop_requested(self) -> bool:
        if self._stop.requested():
            self.stopped_by = self._stop.signal_name
        elif self.stopped_by is None:
            return False
        stopping = f"stopping after step {self.step}"
        if self.checkpointer is not None:
            stopping = f"saving and {stopping}; the same command resumes the run"
        self.print(f"{self.stopped_by}: {stopping}")
        return True

    def _evaluate(self, done: Scalars | None = None) -> Scalars:
        """Runs the evalers that are due; returns "<evaler>/<metric>" of all of them.

        `done` holds the metrics of the evalers that have run at this step already.
        """
        step = self._reached.step
        due = self._evaluations.due(step, done or {})
        if not due:
            return {}
        self.wait()
        found: Scalars = {}
        with self._throughput.spent_on("evaluation"):
            params = self.eval_params()
            for name, evaler in due.items():
                try:
                    scalars = evaler.evaluate(params, self.mesh, on_batch=self.on_batch)
                except _WorkStopped:
                    break
                self._evaluations.add(name, scalars)
                self._summary_writer.write(step, scalars, group=name)
                found |= {f"{name}/{metric}": value for metric, value in scalars.items()}
                self.print(f"step {step}  {name}: {report.evaluation_text(scalars)}")
        self._summaries = found
        for watcher in self._watchers if found else ():
            with contextlib.suppress(_WorkStopped), named_in_errors(watcher):
                watcher.evaluated(step, found)
        return found

    def _make_up_for_evaluations(self, restored: Restored) -> None:
        """Runs the evalers that the stopped run had no time for; its record gets their metrics."""
        record = restored.record
        found = self._evaluate(done=record.metrics)
        self._summaries = record.metrics | found
        if found and self._is_saved():
            record = dataclasses.replace(record, metrics=self._summaries)
            on_process_0(lambda: record.write(restored.path))

    def _save(self, summaries: Scalars, *, local: bool = False) -> None:
        """Starts to save the state, unless it is not finite."""
        self.wait()
        step = self.step
        if self._interval.last.get(NON_FINITE):
            logger.error("NO CHECKPOINT of step %d: its state is not finite.", step)
            self._skipped_save = True
            return
        if not local:
            for watcher in self._watchers:
                with contextlib.suppress(_WorkStopped), named_in_errors(watcher):
                    watcher.before_save(step)
        begin = time.perf_counter()
        with self._throughput.spent_on("checkpoint"):
            self._trainer.save_checkpoint(summaries, local=local)
        self._blocking_seconds = time.perf_counter() - begin
        if not local:
            self._saved_step, self._skipped_save = step, False
            self._kept = self._reached.position
            self._evaluations.check_best_metric(summaries)

    def _end(self) -> None:
        """Checks the last step, and makes sure that its state is saved."""
        self.wait()
        step, saver = self.step, self.checkpointer
        if saver is None:
            return
        if step != self._saved_step:
            self._save(self._summaries)
        self.activity.pause()
        with self._throughput.spent_on("checkpoint"):
            saver.wait()
        self._throughput.stop()
        error = saver.last_error
        if self._skipped_save or error is not None:
            reason = "its state is not finite"
            if error is not None and not self._skipped_save:
                reason = first_line(error)
            raise CheckpointSaveError(
                f"The last checkpoint, of step {step}, could not be written to {saver.dir}: "
                f"{reason}"
            ) from error

    def _end_watcher(self, watcher: Watcher) -> None:
        """Calls `ended`, whose error is that of the run, unless this has one."""
        try:
            with named_in_errors(watcher, can_go_back=False):
                watcher.ended()
        except Exception as error:
            if self.error is not None and not isinstance(self.error, GoBack):
                logger.exception("%s could not end; the run has ended before.", watcher.path)
                return
            self.error = error
            raise

    def _table(self, wall_seconds: float) -> Table:
        """Returns the final table: progress, losses, speed, files, health of the experts."""
        interval = self._interval
        rows: list[tuple[str, ...]] = [
            ("steps", report.steps_text(self)),
            *interval.rows(),
            *((name, report.evaluation_text(x)) for name, x in self.evaluations.items()),
            *report.rates(self._throughput.overall() | interval.memory),
        ]
        for watcher in self._watchers:
            with named_in_errors(watcher, can_go_back=False):
                rows += watcher.rows()
        rows.append(("wall", report.wall_time(wall_seconds, self.seconds())))
        rows += report.files(self, self._summary_writer.config, self._saved_step)
        if health := report.expert_health(interval.last):
            rows += [(), *health]
        return Table(self.config.dir, ("", ""), rows)


def _checked(watcher: Watcher, scalars: Any, before: Scalars) -> Scalars:
    """Returns the metrics that a watcher returned. Raises UserError if some are missing."""
    if not isinstance(scalars, Mapping) or not before.keys() <= scalars.keys():
        raise UserError(
            f"{watcher.path}: step_done of {type(watcher).__qualname__} must return all metrics "
            "that it is given, with its own added."
        )
    try:
        return {name: float(value) for name, value in scalars.items()}
    except (TypeError, ValueError):
        name, value = next(x for x in scalars.items() if not isinstance(x[1], numbers.Real))
        raise UserError(
            f"{watcher.path}: step_done of {type(watcher).__qualname__} returns {value!r:.80} as "
            f"{name!r}; return numbers."
        ) from None
