"""The training loop: what happens around each step, and in which order.

Steps are dispatched without waiting: while step k runs, the loop looks at the metrics of step
k - 1. Only an evaluation, a checkpoint, the end of a trace and the end of the run wait for the
step itself, so that no state is saved before it is known to be sound.
"""

import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import jax

from moelib.checkpoint.checkpointer import CheckpointSaveError
from moelib.core.config import did_you_mean
from moelib.data.input import save_tokenizer
from moelib.data.prefetch import Prefetcher, host_rows, put_batch
from moelib.train.metrics import PackedMetrics, Scalars, language_metrics, unpack
from moelib.train.profiler import ProfilerWindow
from moelib.train.progress import ProgressLine, evaluation_text
from moelib.train.report import report_run
from moelib.train.signals import StopRequest
from moelib.train.step import NON_FINITE
from moelib.train.throughput import Throughput
from moelib.train.watchdog import Watchdog

if TYPE_CHECKING:
    from moelib.train.trainer import SpmdTrainer

logger = logging.getLogger(__name__)


class NonFiniteError(FloatingPointError):
    """A step whose loss or parameters are not finite."""


class TrainLoop:
    """One run of a trainer, from its state now to the end."""

    def __init__(self, trainer: "SpmdTrainer", *, config_path: str) -> None:
        """Takes a trainer that has its state. To be used inside `jax.set_mesh`."""
        cfg = trainer.config
        self.trainer, self.config_path = trainer, config_path
        self.start_step = trainer.step
        mesh = trainer.mesh()
        self.throughput = Throughput(trainer.flops_per_token(), list(mesh.devices.flat))
        self.last: Scalars = {}  # Of the newest step that was looked at.
        self.last_report: Scalars = {}
        self.evaler_summaries: dict[str, Scalars] = {}
        self.stopped_by: str | None = None
        self._pending: tuple[int, PackedMetrics] | None = None
        self._summaries: Scalars = {}  # Of the evaluations after this step.
        self._saved_step: int | None = trainer.step or None
        self._unsound = False  # Whether the last checkpoint was left out for its state.
        self._num_slots = cfg.input.global_batch_size * cfg.input.seq_len
        self._stop = StopRequest()
        self._profiler = ProfilerWindow(cfg.dir, cfg.start_trace_steps, cfg.num_trace_steps)
        self._watchdog = Watchdog(
            cfg.watchdog_timeout_seconds,
            crash_timeout_seconds=cfg.crash_on_hang_timeout_seconds,
        )
        self.is_main = jax.process_index() == 0
        self._line = ProgressLine(cfg.max_step, start=trainer.step, active=self.is_main)

    def run(self) -> dict[str, Any]:
        """Takes the steps; see `SpmdTrainer.run`."""
        begin = time.perf_counter()
        trainer = self.trainer
        with contextlib.ExitStack() as stack:
            stack.callback(trainer.summary_writer.close)
            stack.callback(self._close_checkpointer)
            stack.callback(self._profiler.stop)
            stack.enter_context(self._stop)
            stack.enter_context(self._line)
            stack.enter_context(self._watchdog)
            self._greet()
            if trainer.step:  # What the run was stopped before.
                self._evaluate(trainer.step, done=trainer.restored_metrics)
            if trainer.step < trainer.config.max_step:
                for evaler in trainer.evalers.values():  # What is wrong is known before a step.
                    evaler.open_input(trainer.mesh())
                self._take_steps(stack.enter_context(self._open_input()))
            self._end()
        if self.is_main:
            report_run(self, wall_seconds=time.perf_counter() - begin)
        return {
            "loss": self.last.get("loss"),
            "aux": self.last,
            "evaler_summaries": self.evaler_summaries,
            "step": trainer.step,
            "stopped_by": self.stopped_by,
        }

    def _greet(self) -> None:
        trainer = self.trainer
        self._line.say(trainer.describe())
        if trainer.step:
            self._line.say(f"restored step {trainer.step} from {trainer.checkpointer.dir}")

    def _open_input(self) -> Prefetcher[Any]:
        """Returns the training batches from where the state is."""
        trainer = self.trainer
        sharding, rows = trainer.batch_sharding, trainer.config.input.global_batch_size
        batches = trainer.input.iterator(*host_rows(sharding, rows))
        if trainer.input_state is not None:
            batches.restore(trainer.input_state)
        if self.is_main:
            save_tokenizer(trainer.config.input, trainer.config.dir)
        return Prefetcher(batches, lambda batch: put_batch(batch, sharding, rows))

    def _take_steps(self, feed: Prefetcher[Any]) -> None:
        trainer, max_step = self.trainer, self.trainer.config.max_step
        first = self._next_batch(feed)
        if first is None:
            return
        begin = time.perf_counter()
        self._take_step(first, feed)
        self._line.say(f"first step, compilation included: {time.perf_counter() - begin:.1f} s")
        self.throughput.restart()  # Rates are of steps, not of the compiler.
        while not self._after_step() and trainer.step < max_step:
            batch = self._next_batch(feed)
            if batch is None:
                return
            self._take_step(batch, feed)

    def _next_batch(self, feed: Prefetcher[Any]) -> Any:
        """Returns the next batch, or None at the end of the input."""
        begin = time.perf_counter()
        batch = next(feed, None)
        self.throughput.add("input", time.perf_counter() - begin)
        if batch is None:
            self.stopped_by = "end of input"
        return batch

    def _take_step(self, batch: Any, feed: Prefetcher[Any]) -> None:
        """Dispatches a step, and looks at the one before while it runs."""
        trainer = self.trainer
        self._profiler.before_step(trainer.step + 1)
        with jax.profiler.StepTraceAnnotation("train", step_num=trainer.step + 1):
            packed = trainer.run_step(batch, input_state=feed.state())
        self._look()
        self._pending, self._summaries = (trainer.step, packed), {}

    def _look(self) -> None:
        """Waits for the step that was dispatched last, if not looked at yet, and checks it."""
        if self._pending is None:
            return
        (step, packed), self._pending = self._pending, None
        scalars = unpack(packed)
        self._watchdog.beat(step)
        self.throughput.step_done(scalars["num_tokens"], self._num_slots)
        self.last = scalars
        cfg = self.trainer.config
        if scalars[NON_FINITE] and cfg.stop_on_nan:
            self._log(step, scalars)
            raise self._non_finite(step, scalars)
        if step % cfg.log_every_n_steps == 0 or step == cfg.max_step:
            self._log(step, scalars)

    def _log(self, step: int, scalars: Scalars) -> None:
        self.last_report = self.throughput.report()
        logged = {name: value for name, value in scalars.items() if name != NON_FINITE}
        logged |= language_metrics(scalars) | self.last_report
        self.trainer.summary_writer.write(step, logged)
        self._line.step(step, logged)

    def _non_finite(self, step: int, scalars: Scalars) -> NonFiniteError:
        """Returns the error that names the step and what can be gone back to."""
        what = f"the loss is {scalars['objective']}"
        if math.isfinite(scalars["objective"]):
            what = f"the loss is {scalars['objective']:.4f}, but parameters after it are not finite"
        good = None
        if self.trainer.config.checkpointer is not None:
            self.trainer.checkpointer.wait()
            good = self.trainer.checkpointer.latest_step()
        back = "There is no checkpoint before it."
        if good is not None:
            back = (
                f"The last good checkpoint is of step {good}, in {self.trainer.checkpointer.dir}."
            )
        return NonFiniteError(
            f"step {step}: {what} (gradient norm {scalars.get('gradient_norm', math.nan):.4g}). "
            f"{back} Lower the learning rate, or set learner.skip to leave such steps out."
        )

    # Between steps.

    def _after_step(self) -> bool:
        """Evaluates and saves if it is time to; returns whether to stop.

        Who asks to stop may not wait long: an evaluation that is due is left to the run that
        goes on.
        """
        step = self.trainer.step
        if self._profiler.ends_after(step):
            self._look()
            self._profiler.stop()
        if self._asked_to_stop(step):
            return True
        summaries = self._evaluate(step)
        checkpointer = self.trainer.config.checkpointer and self.trainer.checkpointer
        if checkpointer and checkpointer.should_save(step=step, summaries=summaries):
            self._save(summaries)
        return self._asked_to_stop(step)

    def _asked_to_stop(self, step: int) -> bool:
        if not self._stop.asked(step):
            return False
        self.stopped_by = self._stop.signal_name
        saving = "saving and " if self.trainer.config.checkpointer else ""
        self._line.say(f"{self.stopped_by}: {saving}stopping after step {step}")
        return True

    def _evaluate(self, step: int, *, done: Scalars | None = None) -> Scalars:
        """Runs the evalers whose time it is; returns "<evaler>/<metric>" of all of them.

        Args:
            step: The step.
            done: What evalers have found at this step, which are left out.
        """
        trainer = self.trainer
        ran = {name.partition("/")[0] for name in done or {}}
        due = {
            name: evaler
            for name, evaler in trainer.evalers.items()
            if name not in ran and evaler.should_evaluate(step=step)
        }
        if not due:
            return {}
        self._look()
        found: Scalars = {}
        with self.throughput.spent_on("evaluation"):
            params = trainer.model_params_for_eval()
            for name, evaler in due.items():
                scalars = evaler.evaluate(
                    params, trainer.mesh(), on_batch=lambda _: self._watchdog.beat(step)
                )
                self.evaler_summaries[name] = scalars
                trainer.summary_writer.write(step, scalars, group=name)
                found |= {f"{name}/{metric}": value for metric, value in scalars.items()}
                self._line.say(f"step {step}  {name}: {evaluation_text(scalars)}")
        self._summaries = found
        return found

    def _save(self, summaries: Scalars) -> None:
        """Begins to save, unless the state is not sound."""
        self._look()
        trainer = self.trainer
        if self.last.get(NON_FINITE):
            logger.error("NO CHECKPOINT of step %d: its state is not finite.", trainer.step)
            self._unsound = True
            return
        metric = trainer.checkpointer.config.best_metric
        if metric is not None and summaries and metric not in summaries:
            evaler = metric.partition("/")[0]
            if any(name.startswith(f"{evaler}/") for name in summaries):
                raise ValueError(
                    f"checkpointer.best_metric is {metric!r}; {did_you_mean(metric, summaries)}"
                )
        with self.throughput.spent_on("checkpoint"):
            trainer.save_checkpoint(summaries)
        self._saved_step, self._unsound = trainer.step, False

    def _end(self) -> None:
        """Looks at the last step, and sees to it that its state is saved."""
        self._look()
        trainer = self.trainer
        if trainer.config.checkpointer is None:
            return
        if trainer.step != self._saved_step:
            self._save(self._summaries)
        self._watchdog.pause()
        with self.throughput.spent_on("checkpoint"):
            trainer.checkpointer.wait()
        self.throughput.report()
        error = trainer.checkpointer.last_error
        if self._unsound or error is not None:
            reason = "its state is not finite" if self._unsound else str(error)
            raise CheckpointSaveError(
                f"The last checkpoint, of step {trainer.step}, could not be written to "
                f"{trainer.checkpointer.dir}: {reason}"
            ) from error

    def _close_checkpointer(self) -> None:
        if self.trainer.config.checkpointer is not None:
            self.trainer.checkpointer.close()
