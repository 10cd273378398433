"""The training loop: the order of what happens around each step.

Steps are dispatched asynchronously: while step k runs, the loop checks the metrics of step k - 1.
Only an evaluation, a checkpoint, the end of a trace and the end of the run wait for the current
step, so that no state is saved before its step has been checked.
"""

import collections
import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from moelib.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from moelib.checkpoint.restore import Restored
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError, first_line
from moelib.core.metrics import Scalars
from moelib.data.batches.input import BatchIterator, Input, changes
from moelib.data.batches.prefetch import Prefetcher, host_rows, put_batch
from moelib.data.batches.skip_batches import SKIPPED, SkippingBatches
from moelib.runs.folder import RunFolder
from moelib.runs.identity import check_inputs
from moelib.runs.summary_writer import SummaryWriter
from moelib.runtime.distributed import describe_processes
from moelib.runtime.processes import agreed, on_process_0
from moelib.runtime.progress import Progress
from moelib.runtime.table import Table, print_table
from moelib.train import report
from moelib.train.evaler import SpmdEvaler
from moelib.train.failures import non_finite_error
from moelib.train.metrics import NON_FINITE, PackedMetrics, language_metrics, unpack
from moelib.train.signals import StopRequest, ended_by_sigterm
from moelib.train.throughput import Throughput
from moelib.train.watcher import Activity, Watcher

logger = logging.getLogger(__name__)


# What to do about a loss that is not finite, for a run that stops at it.
_NON_FINITE_CURE = (
    "Lower the learning rate, set learner.skip to skip such steps, or add BadSteps to watchers to "
    "take them again"
)


class _WorkStopped(Exception):  # noqa: N818 (not an error)
    """Work between steps, such as an evaluation, was ended by a request to stop."""


class Trained(Protocol):
    """A trainer, as its loop sees it."""

    model: Any
    folder: RunFolder
    evalers: Mapping[str, Any]
    watchers: Mapping[str, Watcher]
    summary_writer: SummaryWriter
    saver: Checkpointer | None
    began: float  # Time of the start, in seconds since 1970.
    restore_seconds: float  # Time of restoring or initializing the state.
    restored: Restored | None  # The checkpoint of the state, without its arrays.
    step: int  # Step of the state.
    input_state: dict[str, Any] | None  # Position in the data then, None at the beginning.

    @property
    def config(self) -> Any:
        """The `SpmdTrainer.Config`."""

    @property
    def input(self) -> Input:
        """The training input, opened on first use."""

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of the arrays [B, S]."""

    @property
    def trainer_state(self) -> Any:
        """The current `TrainerState`."""

    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh."""

    def describe(self) -> str:
        """Returns what is printed before the first step."""

    def flops_per_token(self) -> float | None:
        """Returns the FLOPs per token of training; None if unknown."""

    def save_tokenizer(self) -> None:
        """Writes the input's tokenizer into the folder of the run."""

    def run_step(self, batch: Any, *, input_state: dict[str, Any] | None) -> PackedMetrics:
        """Dispatches a step."""

    def model_params_for_eval(self) -> Any:
        """Returns the parameters to evaluate."""

    def save_checkpoint(self, metrics: Scalars, *, local: bool) -> None:
        """Starts to save the state, with metrics."""


class TrainLoop:
    """One start of a trainer, from its current state to the end, inside `jax.set_mesh`.

    It is the `Run` of the trainer's watchers.
    """

    def __init__(
        self, trainer: Trained, skip_ranges: Sequence[Sequence[int]] = (), *, stop: StopRequest
    ) -> None:
        """Takes the trainer, the ranges of batches that are skipped, and the request to stop."""
        self._trainer, self._skip_ranges, self._stop = trainer, skip_ranges, stop
        self.config = cfg = trainer.config
        self.folder = trainer.folder
        self.model, self.mesh = trainer.model, trainer.mesh()
        self.description = "\n".join([*describe_processes(self.mesh), trainer.describe()])
        self.began, self.restore_seconds = trainer.began, trainer.restore_seconds
        self.compile_seconds = 0.0
        self.start_step = self.step = trainer.step
        self.restored = trainer.restored
        self.checkpointer, self._summary_writer = trainer.saver, trainer.summary_writer
        self.metrics_path = trainer.summary_writer.config.jsonl_path
        self._evalers = trainer.evalers
        self._watchers = list(trainer.watchers.values())
        self._is_language_model = self.model.is_language_model
        self._throughput = Throughput(
            trainer.flops_per_token(),
            list(self.mesh.devices.flat),
            cfg.train_dtype or "float32",
            "tokens" if self._is_language_model else "examples",
        )
        self._num_slots = cfg.input.global_batch_size * cfg.input.seq_len
        self._last: Scalars = {}  # Metrics of the last step that was checked.
        self._last_report: Scalars = {}
        # (number of tokens, loss, cross-entropy) of each step of a log interval.
        self._losses: collections.deque[tuple[float, float, float]] = collections.deque(
            maxlen=cfg.log_every_n_steps
        )
        self.evaluations: dict[str, Scalars] = {}
        for path, value in (self.restored.record.metrics if self.restored else {}).items():
            name, _, metric = path.partition("/")
            self.evaluations.setdefault(name, {})[metric] = value
        self._summaries: Scalars = {}  # Metrics of the evaluations after the current step.
        self.stopped_by: str | None = None
        self.error: BaseException | None = None
        self.activity = Activity()
        # Dispatched, not yet checked: step, metrics, position of its batch.
        self._pending: tuple[int, PackedMetrics, int | None] | None = None
        self.position: int | None = None
        self._next_position: int | None = (trainer.input_state or {"step": 0}).get("step")
        self._saved_position = self._next_position  # Position of the newest checkpoint.
        self._can_skip = False
        # Step of the newest durable checkpoint of this start.
        self._saved_step = self.start_step if self._is_saved() else None
        self._blocking_seconds = 0.0  # Time of the last save.
        self._skipped_save = False  # Whether the last checkpoint was not written: not finite.
        self._progress = Progress(
            "step", cfg.max_step, start=self.start_step, enabled=jax.process_index() == 0
        )
        for watcher in self._watchers:
            watcher.run = self

    # What watchers use.

    @property
    def first_to_skip(self) -> int | None:
        """First position in the data that may be skipped; None if the input cannot skip."""
        return self._saved_position if self._can_skip else None

    def state(self) -> Any:
        """Returns the state after the steps dispatched."""
        return self._trainer.trainer_state

    def eval_params(self) -> Any:
        """Returns the parameters to evaluate."""
        return self._trainer.model_params_for_eval()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of this start by `throughput.PARTS`, without the first step's."""
        return self._throughput.seconds()

    def is_logged(self, step: int) -> bool:
        """Returns whether the metrics of a step are logged if nothing is wrong with it."""
        return step % self.config.log_every_n_steps == 0 or step == self.config.max_step

    def spent_on(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Counts the time of a block for one of `throughput.PARTS`."""
        return self._throughput.spent_on(part)

    def stop(self, reason: str) -> None:
        """Ends the run after the current step, with a checkpoint."""
        self.stopped_by = reason

    def note(self, event: str, **fields: Any) -> None:
        """Appends an event to the run's log."""
        self.folder.note(event, **fields)

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
            self.print(self.description)
            for watcher in self._watchers:
                watching.callback(watcher.ended)
                with contextlib.suppress(_WorkStopped):
                    watcher.started()
            self._summary_writer.resume(self.step)
            self._summary_writer.write_text(self.step, "config", self.config.debug_string())
            if self.restored is not None:
                folder = os.path.dirname(self.restored.path)
                self.print(f"restored step {self.step} from {folder}")
                self._evaluate(done=self.restored.record.metrics)  # The stopped run had no time.
            if self._stop_requested():
                pass
            elif self.step < self.config.max_step:
                for name, evaler in self._evalers.items():  # Errors surface before the first step.
                    evaler.open_input(self.mesh)
                    self._warn_of_other_data(name, evaler)
                    evaler.try_out(self.eval_params(), self.mesh)
                self._take_steps(stack.enter_context(self._open_input()))
                self.wait()  # Before the input is closed: the last step may be bad too.
            else:
                self.print(f"max_step={self.config.max_step} is reached; no step is left")
            self._end()
        if jax.process_index() == 0:
            print_table(self._table(time.perf_counter() - begin))
        return {
            "loss": self._last.get("loss"),
            "aux": self._last,
            "evaler_summaries": self.evaluations,
            "step": self.step,
            "stopped_by": self.stopped_by,
        }

    def _is_saved(self) -> bool:
        """Returns whether the first state is that of a durable checkpoint."""
        saver, restored = self.checkpointer, self.restored
        return saver is not None and restored is not None and not saver.is_local(restored.path)

    def _keep_error(self, _: object, error: BaseException | None, __: object) -> None:
        self.error = error

    def _open_input(self) -> Prefetcher[Any]:
        """Returns the training batches, from the position of the state."""
        cfg, trainer, ranges = self.config, self._trainer, self._skip_ranges
        sharding, batch_size = trainer.batch_sharding, cfg.input.global_batch_size
        position = trainer.input_state

        def read() -> tuple[Input, BatchIterator]:
            opened = trainer.input
            check_inputs("input", opened)
            batches = opened.iterator(host_rows(sharding, batch_size))
            self._can_skip = batches.can_seek
            if ranges:
                batches = SkippingBatches(batches, ranges)
            if position is not None:
                batches.restore(position)
            return opened, batches

        opened, batches = agreed(read)
        if ranges != (position or {}).get(SKIPPED, ranges[:0]):
            self.note("skipped_ranges", step=self.step, ranges=ranges)
        on_process_0(trainer.save_tokenizer)
        return Prefetcher(
            batches,
            lambda batch: put_batch(batch, sharding, batch_size),
            num_batches=0 if opened.reads_parameters else 2,
            num_retries=cfg.input_retries,
        )

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
        while not self._after_step() and self.step < self.config.max_step:
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
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            packed = self._trainer.run_step(batch, input_state=feed.state())
        if self._pending is None:  # The first step, which is compiled: its collectives may hang.
            self.activity.beat(self.step)
        self.wait()
        self.step += 1
        # Of an input that skips, the position before a batch is not that after the one before.
        self._next_position = feed.state().get("step")
        position = None if self._next_position is None else self._next_position - 1
        self._pending, self._summaries = (self.step, packed, position), {}

    def wait(self) -> None:
        """Waits for the last dispatched step, if it has not been checked yet, and checks it."""
        if self._pending is None:
            return
        (step, packed, self.position), self._pending = self._pending, None
        scalars = self._last = unpack(packed)
        self.activity.beat(step)
        cfg, weight = self.config, scalars["num_tokens"]
        if math.isnan(weight):
            raise UserError(
                f"step {step}: a weight of the loss is negative or NaN; return (sum, weight) with "
                "weights of 0 or more."
            )
        counted = weight if self._is_language_model else self._num_slots
        self._throughput.step_done(counted, self._num_slots)
        cross_entropy = scalars.get("cross_entropy", scalars["loss"])
        self._losses.append((weight, scalars["loss"], cross_entropy))
        try:
            for watcher in self._watchers:
                scalars = watcher.step_done(step, scalars)
            if scalars[NON_FINITE] and cfg.stop_on_nan:
                raise non_finite_error(step, scalars, self.checkpointer, _NON_FINITE_CURE)
        except Exception:
            self._log(step, scalars)
            raise
        if self.is_logged(step):
            self._log(step, scalars)

    def _log(self, step: int, scalars: Scalars) -> None:
        self._last_report = self._throughput.report()
        logged = {name: value for name, value in scalars.items() if name != NON_FINITE}
        logged |= self._last_report
        if (saver := self.checkpointer) is not None:
            logged["checkpoint/blocking_seconds"] = self._blocking_seconds
            logged["checkpoint/steps_at_risk"] = step - saver.complete_step
        if self._is_language_model:
            logged |= language_metrics(scalars)
        mean_loss, mean_cross_entropy = self._mean_losses()
        if not any(weight for weight, *_ in self._losses):
            steps = len(self._losses)
            logger.warning("step %d: the weights of the loss are 0 in %d steps.", step, steps)
        self._summary_writer.write(step, logged | {"mean_loss": mean_loss})
        shown = logged | {"loss": mean_loss}
        if "cross_entropy" in shown:
            shown["cross_entropy"] = mean_cross_entropy
        self._progress.update(step, report.progress_text(shown, num_steps=len(self._losses)))

    def _mean_losses(self) -> tuple[float, float]:
        """Returns the loss and the cross-entropy over the tokens of the last log interval."""
        tokens = sum(tokens for tokens, *_ in self._losses) or 1.0
        loss = sum(tokens * loss for tokens, loss, _ in self._losses)
        return loss / tokens, sum(tokens * ce for tokens, _, ce in self._losses) / tokens

    # Between steps.

    def _after_step(self) -> bool:
        """Evaluates and saves if due; returns whether to stop.

        A request to stop is served before an evaluation, or between two of its batches; the resumed
        run then makes up for it.
        """
        with contextlib.suppress(_WorkStopped):
            for watcher in self._watchers:
                watcher.between_steps(self.step)
        if self._stop_requested():
            return True
        summaries = self._evaluate()
        saver = self.checkpointer
        if saver is not None and saver.should_save(step=self.step, summaries=summaries):
            self._save(summaries)
        elif saver is not None and saver.should_save_locally(step=self.step):
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
        step = self.step
        ran = {name.partition("/")[0] for name in done or {}}
        due = {
            name: evaler
            for name, evaler in self._evalers.items()
            if name not in ran and evaler.should_evaluate(step=step)
        }
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
                self._warn_of_other_weight(name, scalars)
                self.evaluations[name] = scalars
                self._summary_writer.write(step, scalars, group=name)
                found |= {f"{name}/{metric}": value for metric, value in scalars.items()}
                self.print(f"step {step}  {name}: {report.evaluation_text(scalars)}")
        self._summaries = found
        for watcher in self._watchers if found else ():
            watcher.evaluated(step, found)
        return found

    def _warn_of_other_data(self, name: str, evaler: SpmdEvaler) -> None:
        """Warns if an evaler's data are not those of the restored checkpoint."""
        before = self.restored.record.evaluated.get(name) if self.restored else None
        now = evaler.input_identity
        if before and now and (changed := changes(before, now)):
            logger.warning(
                "evalers.%s.input has changed: %.400s. Its metrics do not compare with earlier "
                "ones, and the best checkpoint is chosen among both; use a new run for other data.",
                *(name, changed),
            )

    def _warn_of_other_weight(self, name: str, scalars: Scalars) -> None:
        """Warns of evaluations on other data that an input's identity does not tell apart."""
        saver, size = self.checkpointer, "num_tokens" if self._is_language_model else "weight"
        before, now = self.evaluations.get(name, {}).get(size), scalars.get(size)
        best = (saver.config.best_metric or "" if saver else "").startswith(f"{name}/")
        if best and before and now and not math.isclose(before, now, rel_tol=1e-3):
            logger.warning(
                "%s: evaluated on a weight of %g, and of %g before this run; the best checkpoint "
                "is chosen among both. Start a new run for other data.",
                *(name, now, before),
            )

    def _save(self, summaries: Scalars, *, local: bool = False) -> None:
        """Starts to save the state, unless it is not finite."""
        self.wait()
        step = self.step
        if self._last.get(NON_FINITE):
            logger.error("NO CHECKPOINT of step %d: its state is not finite.", step)
            self._skipped_save = True
            return
        if not local:
            for watcher in self._watchers:
                watcher.before_save(step)
            self._check_best_metric(summaries)
        begin = time.perf_counter()
        with self._throughput.spent_on("checkpoint"):
            self._trainer.save_checkpoint(summaries, local=local)
        self._blocking_seconds = time.perf_counter() - begin
        if not local:
            self._saved_step, self._skipped_save = step, False
        self._saved_position = self._next_position

    def _check_best_metric(self, summaries: Scalars) -> None:
        """Raises UserError if the evaler of the best metric has run, and has no such metric."""
        metric = self.config.checkpointer.best_metric
        if metric is not None and summaries and metric not in summaries:
            evaler = metric.partition("/")[0]
            if any(name.startswith(f"{evaler}/") for name in summaries):
                raise UserError(
                    f"checkpointer.best_metric is {metric!r}; {did_you_mean(metric, summaries)}"
                )

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

    # After the run.

    def _table(self, wall_seconds: float) -> Table:
        """Returns the final table: progress, losses, speed, files, health of the experts."""
        steps = f"{self.step} of {self.config.max_step}"
        if self.start_step:
            steps += f", from {self.start_step}"
        if self.stopped_by:
            steps += f" ({self.stopped_by})"
        rows: list[tuple[str, ...]] = [("steps", steps)]
        if (num_steps := len(self._losses)) > 0:
            over = f" (mean of the last {num_steps} steps)" if num_steps > 1 else ""
            rows.append(("loss", f"{self._mean_losses()[0]:.4f}{over}"))
        rows += [(name, report.evaluation_text(x)) for name, x in self.evaluations.items()]
        memory = {k: x for k, x in self._last_report.items() if k == "device_memory_gb"}
        rows += report.rates(self._throughput.overall() | memory)
        for watcher in self._watchers:
            rows += watcher.rows()
        rows.append(("wall", report.wall_time(wall_seconds, self.seconds())))
        rows += self._files()
        if health := report.expert_health(self._last):
            rows += [(), *health]
        return Table(self.config.dir, ("", ""), rows)

    def _files(self) -> list[tuple[str, str]]:
        """Returns (kind, path) of everything that the run wrote."""
        writer = self._summary_writer.config
        files = [("config", self.folder.config_file)]
        if "json_lines" in writer.formats:
            files.append(("metrics", writer.jsonl_path))
        if "tensorboard" in writer.formats:
            files.append(("TensorBoard", writer.dir))
        saver = self.checkpointer
        if saver is not None and self._saved_step is not None:
            files.append(("checkpoint", f"step {self._saved_step} in {saver.config.dir}"))
        return files
