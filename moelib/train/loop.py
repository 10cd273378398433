"""The training loop: the order of what happens around each step.

Steps are dispatched asynchronously: while step k runs, the loop checks the metrics of step k - 1.
Only an evaluation, a checkpoint, the end of a trace and the end of the run wait for the current
step, so that no state is saved before its step has been checked.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from moelib.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from moelib.checkpoint.restore import Restored, first_line
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.processes import agreed, on_process_0
from moelib.core.progress import Progress
from moelib.core.table import Table, print_table
from moelib.data.input import BatchIterator, Input, changes
from moelib.data.prefetch import Prefetcher, host_rows, put_batch
from moelib.data.skip_batches import SKIPPED, SkippingBatches
from moelib.train import report
from moelib.train.bad_steps import (
    BAD_STEP,
    SUSPECTED,
    BadStepError,
    BadSteps,
    TakeAgain,
    counts,
    describe,
)
from moelib.train.device_check import DeviceCheck
from moelib.train.evaler import SpmdEvaler
from moelib.train.goodput import TimeAccount
from moelib.train.gradient_noise import NoiseScale
from moelib.train.identity import check_inputs
from moelib.train.metrics import PackedMetrics, language_metrics, unpack
from moelib.train.profiler import ProfilerWindow
from moelib.train.routing_log import RoutingEvaler, RoutingLogError, discard_after
from moelib.train.run_log import CONFIG_FILE, log_event, read_events
from moelib.train.signals import StopRequest, ended_by_sigterm
from moelib.train.step import NON_FINITE
from moelib.train.summary_writer import SummaryWriter
from moelib.train.throughput import Throughput
from moelib.train.watchdog import Watchdog

logger = logging.getLogger(__name__)


class NonFiniteError(BadStepError, FloatingPointError):
    """A step whose loss or parameters are not finite."""


class _EvaluationStopped(Exception):  # noqa: N818 (no error)
    """An evaluation was ended by a request to stop."""


@dataclasses.dataclass(kw_only=True, eq=False)
class TrainLoop:
    """One run of a trainer, from its current state to the end, inside `jax.set_mesh`."""

    config: Any  # A `SpmdTrainer.Config`.
    mesh: jax.sharding.Mesh
    batch_sharding: jax.sharding.NamedSharding  # Sharding of the arrays [B, S].
    flops_per_token: float | None  # FLOPs per token of training; None if unknown.
    is_language_model: bool  # Whether the loss is one of nats per token.
    description: str  # Shown before the first step.
    open_input: Callable[[], Input]  # Opens the training input.
    save_tokenizer: Callable[[], None]  # Writes the input's tokenizer into the folder of the run.
    evalers: Mapping[str, SpmdEvaler]
    routing_log: RoutingEvaler | None
    checkpointer: Checkpointer | None
    summary_writer: SummaryWriter
    account: TimeAccount
    device_check: DeviceCheck | None
    state: Callable[[], Any]  # Returns the current state.
    run_step: Callable[..., PackedMetrics]  # (batch, input_state=) -> metrics; dispatches a step.
    eval_params: Callable[[], Any]  # Returns the parameters to evaluate.
    save: Callable[..., None]  # (metrics, local=) Starts to save the state, with metrics.
    start_step: int  # Step of the current state.
    restored: Restored | None  # The checkpoint of that state, without its arrays.
    input_state: dict[str, Any] | None  # Position in the data then, None at the beginning.
    skip_ranges: Sequence[Sequence[int]]  # Ranges of batches that are skipped.
    bad_steps: BadSteps | None
    stop: StopRequest

    def __post_init__(self) -> None:
        cfg = self.config
        self._step = self.start_step
        self._throughput = Throughput(
            self.flops_per_token,
            list(self.mesh.devices.flat),
            cfg.train_dtype or "float32",
            "tokens" if self.is_language_model else "examples",
        )
        self._last: Scalars = {}  # Metrics of the last step that was checked.
        self._last_report: Scalars = {}
        # (number of tokens, loss, cross-entropy) of each step of a log interval.
        self._losses: collections.deque[tuple[float, float, float]] = collections.deque(
            maxlen=cfg.log_every_n_steps
        )
        self._noise_scale = NoiseScale()
        self._evaluations: dict[str, Scalars] = {}  # Latest metrics of each evaler.
        for path, value in (self.restored.record.metrics if self.restored else {}).items():
            name, _, metric = path.partition("/")
            self._evaluations.setdefault(name, {})[metric] = value
        self._stopped_by: str | None = None
        # Dispatched, not yet checked: step, metrics, position of its batch.
        self._pending: tuple[int, PackedMetrics, int | None] | None = None
        self._next_position: int | None = (self.input_state or {"step": 0}).get("step")
        self._saved_position = self._next_position  # That of the newest checkpoint.
        self._can_skip = False
        self._summaries: Scalars = {}  # Metrics of the evaluations after the current step.
        # Of the newest durable checkpoint in this start.
        self._saved_step = self.start_step if self._is_saved() else None
        self._blocking_seconds = 0.0  # Of the last save.
        self._checked_step: int | None = None  # Whose state was compared between devices.
        self._good_step = self.start_step  # The last one without a difference.
        self._skipped_save = False  # Whether the last checkpoint was not written: not finite.
        self._num_slots = cfg.input.global_batch_size * cfg.input.seq_len
        self._stop = self.stop
        self._profiler = ProfilerWindow(
            cfg.dir, cfg.start_trace_steps, cfg.num_trace_steps, max_step=cfg.max_step
        )
        self._watchdog = Watchdog(
            cfg.watchdog_timeout_seconds, crash_timeout_seconds=cfg.crash_on_hang_timeout_seconds
        )
        self._is_main = jax.process_index() == 0
        self._progress = Progress(
            "step", cfg.max_step, start=self.start_step, enabled=self._is_main
        )

    def run(self) -> dict[str, Any]:
        """Takes the steps; see `SpmdTrainer.run`."""
        begin = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.push(self._log_end)
            stack.callback(self.summary_writer.close)
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
            stack.callback(self._profiler.stop)
            stack.enter_context(self._stop)
            stack.enter_context(self._progress)
            stack.enter_context(self._watchdog)
            stack.callback(self._stop_clock)
            self._progress.log(self.description)
            discard_after(self.config.dir, self._step)
            if self.restored is not None:
                folder = os.path.dirname(self.restored.path)
                self._progress.log(f"restored step {self._step} from {folder}")
                # The stopped run had no time for these.
                self._evaluate(done=self.restored.record.metrics)
                self._log_routing(unless_complete=True)
            if self._stop_requested():
                pass
            elif self._step < self.config.max_step:
                for name, evaler in self.evalers.items():  # Errors surface before the first step.
                    evaler.open_input(self.mesh)
                    self._warn_of_other_data(name, evaler)
                    evaler.try_out(self.eval_params(), self.mesh)
                if self.routing_log is not None:
                    self.routing_log.open_input()
                self._take_steps(stack.enter_context(self._open_input()))
                self._check_pending()  # Before the input is closed: the last step may be bad too.
            else:
                self._progress.log(f"max_step={self.config.max_step} is reached; no step is left")
            self._end()
        if self._is_main:
            print_table(self._table(time.perf_counter() - begin))
        return {
            "loss": self._last.get("loss"),
            "aux": self._last,
            "evaler_summaries": self._evaluations,
            "step": self._step,
            "stopped_by": self._stopped_by,
        }

    def _is_saved(self) -> bool:
        """Returns whether the first state is that of a durable checkpoint."""
        saver, restored = self.checkpointer, self.restored
        return saver is not None and restored is not None and not saver.is_local(restored.path)

    def _open_input(self) -> Prefetcher[Any]:
        """Returns the training batches, from the position of the state."""
        cfg = self.config
        sharding, batch_size = self.batch_sharding, cfg.input.global_batch_size

        def read() -> tuple[Input, BatchIterator]:
            opened = self.open_input()
            check_inputs("input", opened)
            batches = opened.iterator(*host_rows(sharding, batch_size))
            self._can_skip = batches.can_seek
            if self.skip_ranges:
                batches = SkippingBatches(batches, self.skip_ranges)
            if self.input_state is not None:
                batches.restore(self.input_state)
            return opened, batches

        opened, batches = agreed(read)
        if self.skip_ranges != (self.input_state or {}).get(SKIPPED, self.skip_ranges[:0]):
            self.account.note("skipped_ranges", step=self._step, ranges=self.skip_ranges)
        on_process_0(self.save_tokenizer)
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
        seconds = time.perf_counter() - begin
        self.account.compiled(self._step, seconds)
        self._progress.log(f"first step, compilation included: {seconds:.1f} s")
        self._throughput.restart()  # Rates do not include the compilation.
        while not self._after_step() and self._step < self.config.max_step:
            batch = self._next_batch(feed)
            if batch is None:
                return
            self._take_step(batch, feed)

    def _next_batch(self, feed: Prefetcher[Any]) -> Any:
        """Returns the next batch, or None at the end of the input."""
        self._watchdog.cause = ", as the input of this process has no batch"
        with self._throughput.spent_on("input"):
            batch = next(feed, None)
        self._watchdog.cause = ""
        if batch is None:
            self._stopped_by = "end of input"
        return batch

    def _take_step(self, batch: Any, feed: Prefetcher[Any]) -> None:
        """Dispatches a step, and checks the one before while it runs."""
        self._profiler.before_step(self._step + 1)
        with jax.profiler.StepTraceAnnotation("train", step_num=self._step + 1):
            packed = self.run_step(batch, input_state=feed.state())
        if self._pending is None:  # The first step, which is compiled: its collectives may hang.
            self._watchdog.beat(self._step)
        self._check_pending()
        self._step += 1
        # Of an input that skips, the position before a batch is not that after the one before.
        self._next_position = feed.state().get("step")
        position = None if self._next_position is None else self._next_position - 1
        self._pending, self._summaries = (self._step, packed, position), {}

    def _check_pending(self) -> None:
        """Waits for the last dispatched step, if it has not been checked yet, and checks it."""
        if self._pending is None:
            return
        (step, packed, position), self._pending = self._pending, None
        scalars = unpack(packed)
        scalars |= self._noise_scale.after(scalars)
        self._watchdog.beat(step)
        self._last, cfg, weight = scalars, self.config, scalars["num_tokens"]
        if math.isnan(weight):
            raise UserError(
                f"step {step}: a weight of the loss is negative or NaN; return (sum, weight) with "
                "weights of 0 or more."
            )
        counted = weight if self.is_language_model else self._num_slots
        self._throughput.step_done(counted, self._num_slots)
        cross_entropy = scalars.get("cross_entropy", scalars["loss"])
        self._losses.append((weight, scalars["loss"], cross_entropy))
        if self.bad_steps is not None:
            self._judge(self.bad_steps, step, position, scalars)
        elif scalars[NON_FINITE] and cfg.stop_on_nan:
            self._log(step, scalars)
            raise self._non_finite(step, scalars)
        if step % cfg.log_every_n_steps == 0 or step == cfg.max_step:
            self._log(step, scalars)

    def _judge(self, policy: BadSteps, step: int, position: int | None, scalars: Scalars) -> None:
        """Logs what the policy says of a step. Raises TakeAgain or BadStepError at a bad one."""
        first = self._saved_position if self._can_skip else None
        event = policy.judge(step, position, scalars, first=first)
        if event is None:
            return
        if event["event"] == SUSPECTED:
            devices = [str(device) for device in self.mesh.devices.flat]
            # No collective of its own, as the next step is running.
            event["devices"] = self.description.splitlines()[:-1] or devices
        if event["event"] != BAD_STEP:
            self.account.note(**event)
        else:  # Later decisions depend on it.
            jax.block_until_ready(self.state())  # Else its collectives meet those of the next step.
            on_process_0(lambda: log_event(self.config.dir, **event))
        self._progress.log(describe(event))
        if event["event"] != BAD_STEP:
            return
        self._log(step, scalars)
        if event["action"] != "stop":
            raise TakeAgain(skips_data=event["action"] == "skip_batches")
        if scalars[NON_FINITE]:
            raise self._non_finite(step, scalars)
        raise BadStepError(f"{describe(event)}. {self._last_good()}")

    def _log(self, step: int, scalars: Scalars) -> None:
        self._last_report = self._throughput.report()
        logged = {name: value for name, value in scalars.items() if name != NON_FINITE}
        logged |= self._last_report | self.account.metrics(self._throughput.total_seconds)
        if (saver := self.checkpointer) is not None:
            logged["checkpoint/blocking_seconds"] = self._blocking_seconds
            logged["checkpoint/steps_at_risk"] = step - saver.complete_step
        if self.is_language_model:
            logged |= language_metrics(scalars)
        mean_loss, mean_cross_entropy = self._mean_losses()
        if not any(weight for weight, *_ in self._losses):
            steps = len(self._losses)
            logger.warning("step %d: the weights of the loss are 0 in %d steps.", step, steps)
        self.summary_writer.write(step, logged | {"mean_loss": mean_loss})
        shown = logged | {"loss": mean_loss}
        if "cross_entropy" in shown:
            shown["cross_entropy"] = mean_cross_entropy
        self._progress.update(step, report.progress_text(shown, num_steps=len(self._losses)))

    def _mean_losses(self) -> tuple[float, float]:
        """Returns the loss and the cross-entropy over the tokens of the last log interval."""
        tokens = sum(tokens for tokens, *_ in self._losses) or 1.0
        loss = sum(tokens * loss for tokens, loss, _ in self._losses)
        return loss / tokens, sum(tokens * ce for tokens, _, ce in self._losses) / tokens

    def _non_finite(self, step: int, scalars: Scalars) -> NonFiniteError:
        """Returns the error that names the step and the checkpoint to go back to."""
        what = f"the loss is {scalars['objective']}"
        if math.isfinite(scalars["objective"]):
            what = f"the loss is {scalars['objective']:.4f}, but parameters after it are not finite"
        cure = "Lower the learning rate, set learner.skip to skip such steps"
        cure += ", or set bad_steps to take them again"
        if (policy := self.config.bad_steps) is not None:
            cure = f"Raise bad_steps.max_rewinds={policy.max_rewinds}, or lower the learning rate"
        return NonFiniteError(
            f"step {step}: {what} (gradient norm {scalars.get('gradient_norm', math.nan):.4g}). "
            f"{self._last_good()} {cure}, and start the run again."
        )

    def _last_good(self) -> str:
        saver = self.checkpointer
        if saver is not None:
            saver.wait()
            if (good := saver.latest_step()) is not None:
                return f"The last good checkpoint is of step {good}, in {saver.dir}."
        return "There is no checkpoint before it."

    # Between steps.

    def _after_step(self) -> bool:
        """Evaluates and saves if due; returns whether to stop.

        A request to stop is served before an evaluation, or between two of its batches; the resumed
        run then makes up for it.
        """
        if self._profiler.ends_after(self._step):
            self._check_pending()
            self._profiler.stop()
        if self.device_check is not None and self.device_check.is_due(self._step):
            self._check_devices()
        if self._stop_requested():
            return True
        summaries = self._evaluate()
        self._log_routing()
        saver = self.checkpointer
        if saver is not None and saver.should_save(step=self._step, summaries=summaries):
            self._save(summaries)
        elif saver is not None and saver.should_save_locally(step=self._step):
            self._save(summaries, local=True)
        return self._stop_requested()

    def _check_devices(self) -> None:
        """Compares the devices, once per step."""
        if self.device_check is None or self._checked_step == self._step:
            return
        self._check_pending()
        self._checked_step = self._step
        if found := self.device_check.check(self.state()):
            if self.checkpointer is not None and self.checkpointer.local is not None:
                self.checkpointer.local.delete_after(self._good_step)  # Later ones: not checked.
            parts = self._throughput.total_seconds
            self.account.log("device_difference", self._step, parts, differences=found)
            raise self.device_check.error(self._step, found)
        self._good_step = self._step

    def _stop_requested(self) -> bool:
        if not self._stop.requested():
            return False
        self._stopped_by = self._stop.signal_name
        stopping = f"stopping after step {self._step}"
        if self.checkpointer is not None:
            stopping = f"saving and {stopping}; the same command resumes the run"
        self._progress.log(f"{self._stopped_by}: {stopping}")
        return True

    def _evaluate(self, done: Scalars | None = None) -> Scalars:
        """Runs the evalers that are due; returns "<evaler>/<metric>" of all of them.

        `done` holds the metrics of the evalers that have run at this step already.
        """
        step = self._step
        ran = {name.partition("/")[0] for name in done or {}}
        due = {
            name: evaler
            for name, evaler in self.evalers.items()
            if name not in ran and evaler.should_evaluate(step=step)
        }
        if not due:
            return {}
        self._check_pending()
        found: Scalars = {}
        with self._throughput.spent_on("evaluation"):
            params = self.eval_params()
            for name, evaler in due.items():
                try:
                    scalars = evaler.evaluate(params, self.mesh, on_batch=self._after_batch)
                except _EvaluationStopped:
                    break
                self._warn_of_other_weight(name, scalars)
                self._evaluations[name] = scalars
                self.summary_writer.write(step, scalars, group=name)
                found |= {f"{name}/{metric}": value for metric, value in scalars.items()}
                self._progress.log(f"step {step}  {name}: {report.evaluation_text(scalars)}")
        self._summaries = found
        return found

    def _log_routing(self, *, unless_complete: bool = False) -> None:
        """Writes the routing log if it is due; a failure is logged, and training continues."""
        log, step = self.routing_log, self._step
        if log is None or not log.should_log(step=step, unless_complete=unless_complete):
            return
        self._check_pending()
        with self._throughput.spent_on("evaluation"), contextlib.suppress(_EvaluationStopped):
            try:
                log.write(self.eval_params(), self.mesh, step=step, on_batch=self._after_batch)
            except RoutingLogError as error:
                logger.error("NO ROUTING LOG of step %d: %s", step, error)
                self.account.note("no_routing_log", step=step, error=first_line(error))

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
        saver, size = self.checkpointer, "num_tokens" if self.is_language_model else "weight"
        before, now = self._evaluations.get(name, {}).get(size), scalars.get(size)
        best = (saver.config.best_metric or "" if saver else "").startswith(f"{name}/")
        if best and before and now and not math.isclose(before, now, rel_tol=1e-3):
            logger.warning(
                "%s: evaluated on a weight of %g, and of %g before this run; the best checkpoint "
                "is chosen among both. Start a new run for other data.",
                *(name, now, before),
            )

    def _after_batch(self, number: int) -> None:
        """Ends an evaluation at a request to stop; the resumed run begins it again."""
        del number
        self._watchdog.beat(self._step)
        if self._stop.requested():
            raise _EvaluationStopped

    def _save(self, summaries: Scalars, *, local: bool = False) -> None:
        """Starts to save the state, unless it is not finite."""
        self._check_pending()
        step = self._step
        if self._last.get(NON_FINITE):
            logger.error("NO CHECKPOINT of step %d: its state is not finite.", step)
            self._skipped_save = True
            return
        if not local:
            self._check_devices()
            self._check_best_metric(summaries)
        begin = time.perf_counter()
        with self._throughput.spent_on("checkpoint"):
            self.save(summaries, local=local)
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
        self._check_pending()
        step, saver = self._step, self.checkpointer
        if saver is None:
            return
        if step != self._saved_step:
            self._save(self._summaries)
        self._watchdog.pause()
        with self._throughput.spent_on("checkpoint"):
            saver.wait()
        self._throughput.report()
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

    def _stop_clock(self) -> None:
        """Counts the time until now; closing files and waiting for saves is no step."""
        if self._losses:  # Else all time is start-up.
            self._throughput.report()

    def _log_end(self, _: object, error: BaseException | None, __: object) -> None:
        """Logs the end of this start, and its error if there is one."""
        ended = {"stopped_by": self._stopped_by} if self._stopped_by else {}
        if isinstance(error, TakeAgain):
            ended = {"stopped_by": "bad step"}
        elif error is not None:
            ended = {"error": first_line(error)}
        self.account.log("end", self._step, self._throughput.total_seconds, **ended)

    def _table(self, wall_seconds: float) -> Table:
        """Returns the final table: progress, losses, speed, files, health of the experts."""
        steps = f"{self._step} of {self.config.max_step}"
        if self.start_step:
            steps += f", from {self.start_step}"
        if self._stopped_by:
            steps += f" ({self._stopped_by})"
        rows: list[tuple[str, ...]] = [("steps", steps)]
        if (num_steps := len(self._losses)) > 0:
            over = f" (mean of the last {num_steps} steps)" if num_steps > 1 else ""
            rows.append(("loss", f"{self._mean_losses()[0]:.4f}{over}"))
        rows += [(name, report.evaluation_text(x)) for name, x in self._evaluations.items()]
        if self.bad_steps and (text := counts(read_events(self.config.dir))):
            rows.append(("bad steps", text))
        memory = {k: x for k, x in self._last_report.items() if k == "device_memory_gb"}
        rows += report.rates(self._throughput.overall() | memory)
        total_seconds = self._throughput.total_seconds
        rows.append(("goodput", report.goodput_text(self.account.metrics(total_seconds))))
        rows.append(("wall", report.wall_time(wall_seconds, total_seconds)))
        rows += self._files()
        if health := report.expert_health(self._last):
            rows += [(), *health]
        return Table(self.config.dir, ("", ""), rows)

    def _files(self) -> list[tuple[str, str]]:
        """Returns (kind, path) of everything that the run wrote."""
        cfg, writer = self.config, self.summary_writer.config
        files = [("config", os.path.join(cfg.dir, CONFIG_FILE))]
        if "json_lines" in writer.formats:
            files.append(("metrics", writer.jsonl_path))
        if "tensorboard" in writer.formats:
            files.append(("TensorBoard", writer.dir))
        saver = self.checkpointer
        if saver is not None and self._saved_step is not None:
            files.append(("checkpoint", f"step {self._saved_step} in {saver.config.dir}"))
        if self.routing_log is not None:
            files.append(("routing logs", self.routing_log.folder))
        if cfg.start_trace_steps:
            files.append(("traces", os.path.join(cfg.dir, "profile")))
        return files
