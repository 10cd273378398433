"""The trainer: builds the parts of a run, restores their state, and runs them to the end."""

import atexit
import collections
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import CheckpointMismatchError, RunRecord, newest_record
from moelib.checkpoint.restore import Restored
from moelib.checkpoint.safetensors import file_sums
from moelib.core import precision
from moelib.core.config import (
    REQUIRED,
    DType,
    InstantiableConfig,
    Required,
    config_class,
    maybe_instantiate,
)
from moelib.core.config_types import NonNegativeInt, PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.module import Module
from moelib.core.tree import Nested
from moelib.data.batches.input import BatchIterator, Input
from moelib.data.batches.prefetch import Prefetcher, host_rows, put_batch
from moelib.data.batches.skip_batches import SKIPPED, SkippingBatches
from moelib.huggingface.pretrained import FILES, copy_files
from moelib.learner.learner import Learner
from moelib.models.model import Model
from moelib.parallel import sharding
from moelib.parallel.mesh import MESH_AXIS_NAMES, HybridMeshShape, mesh_shape_from_axes
from moelib.parallel.pipeline.schedule import Schedule
from moelib.runs import course, phases
from moelib.runs.folder import RunFolder, origin_text
from moelib.runs.identity import AcceptedChange, check_directory, check_inputs, check_processes
from moelib.runs.input_state import gather_input_state, input_state_of
from moelib.runs.model_files import check_tokenizers, save_tokenizer
from moelib.runs.phases import OtherPhase, Phase
from moelib.runs.routing_file import discard_after
from moelib.runs.summary_writer import SummaryWriter
from moelib.runtime import storage
from moelib.runtime.distributed import check_job
from moelib.runtime.processes import agreed, on_process_0
from moelib.train import state as state_lib
from moelib.train.evaler import SpmdEvaler
from moelib.train.failures import MAX_RETURNS, no_progress_error, non_finite_error
from moelib.train.init_from import InitFrom
from moelib.train.kernel_check import replaced_kernels
from moelib.train.loop import TrainLoop
from moelib.train.memory import check_memory, explained_if_full
from moelib.train.metrics import NON_FINITE, language_metrics, unpack
from moelib.train.phase_check import check_data, check_phases
from moelib.train.program import StepProgram
from moelib.train.readable import check_readable
from moelib.train.settings import watchers_of
from moelib.train.signals import StopRequest, ended_by_sigterm
from moelib.train.start import Start
from moelib.train.state import TrainerState
from moelib.train.watcher import Activity, GoBack, Watcher, named_in_errors
from moelib.train.watchers.watchdog import Watchdog

logger = logging.getLogger(__name__)


class SpmdTrainer(StepProgram):
    """Trains a model on any number of devices and processes.

    A run writes `config.txt`, `metrics.jsonl`, `summaries/` and `checkpoints/` into its folder.
    Started again, it resumes from the newest checkpoint and takes the same steps, bit for bit, as
    an uninterrupted run on the same mesh.
    """

    # Settings that determine the numbers of a run, as do all that a subclass adds; how a run that
    # resumes may change the others says `moelib.runs.identity.RESUME`.
    NUMBERS = ("model", "input", "learner", "prng_seed")

    summary_writer: SummaryWriter
    _state: TrainerState | None = None

    @config_class
    class Config(Module.Config):
        # -- Task
        input: Required[Input.Config] = REQUIRED  # Training batches.
        # The model: a CausalLM, or any `moelib.models.model.Model`.
        model: Required[InstantiableConfig] = REQUIRED
        learner: Learner.Config = Learner.default_config()  # Optimizer, schedule, averages.
        max_step: Required[PositiveInt] = REQUIRED  # Step at which training ends.
        prng_seed: int = 0  # Seed of initial parameters and dropout.
        # Dtype that trainable parameters are cast to in each step; None computes in their own.
        train_dtype: DType | None = None
        # Dtype in which devices sum gradients of weights; None for that of the gradients. In
        # bfloat16, sums over n devices are rounded n - 1 times; float32 sends twice the bytes.
        reduce_dtype: Literal["float32"] | None = None
        # Parts of a batch computed one after the other, with one set of gradients.
        num_microbatches: PositiveInt = 1
        # Another run's checkpoint, or a Hugging Face model, that a new run starts from; None starts
        # from initial values. A run that resumes ignores it.
        init_from: InitFrom.Config | None = None

        # -- Devices
        # Devices per mesh axis, in the order of mesh_axis_names; -1 for all that remain.
        mesh_shape: Sequence[int] | HybridMeshShape = mesh_shape_from_axes(data=-1)
        mesh_axis_names: Sequence[str] = MESH_AXIS_NAMES  # Names of the mesh axes.
        # (regex for --mesh_selector, mesh shape or one or more ConfigModifiers); first match wins.
        mesh_rules: Sequence[tuple[str, Any]] = ()
        # Whether parameters without logical axes, those of other libraries, are sharded over the
        # axis "model" by a trace of the model, and stored over "fsdp". Those of tasks always are.
        auto_sharding: bool = False
        # {logical axis: mesh axes} that replace lines of parallel.sharding.DEFAULT_RULES.
        sharding_rules: dict[str, Sequence[str]] | None = None
        # Order of the passes on a mesh with the axis "pipeline", over which the layers of a
        # ScanStack are then spread; None for no pipeline. On a mesh with the axis "expert",
        # DUALPIPE_V pairs the passes of two micro-batches without the axis "pipeline" too.
        pipeline_schedule: Schedule | None = None
        # Options of XLA for the step, which override those of train.compiler_options.
        compiler_options: dict[str, str] | None = None
        # Whether a step repeated on the same devices has the same bits; GPUs then take longer.
        deterministic: bool = False
        # {kernel: backend}, such as {"gmm": "xla"}; others follow MOELIB_KERNEL_BACKEND, then the
        # device (docs/kernels.md).
        kernel_backends: dict[str, str] = {}
        # If True, kernels are not compared with their references at the first start on a device.
        skip_kernel_check: bool = False

        # -- Output
        dir: Required[str] = REQUIRED  # Folder of the run.
        # Accepted differences from the run in `dir` that change all further steps: "schedule"
        # (max_step or decay_steps), "train_dtype", "accumulation" (num_microbatches), "data" (the
        # input; sources that it had before go on where they were), "config" (other settings that
        # determine the numbers of a run). Also "tokenizer": the input has another one than the
        # initial weights or an evaler. None accepts nothing.
        accept_changes: Sequence[AcceptedChange] | None = None
        # Step whose checkpoint the run resumes from, once; later ones are moved aside. None resumes
        # from the newest.
        rewind_to: NonNegativeInt | None = None
        # Settings that change after a step, by the name of the phase that begins there.
        phases: dict[str, Phase.Config] = {}
        # Name of the phase whose settings count, to plan or verify one; a run chooses it. None for
        # those before the first.
        phase: str | None = None
        # Ranges "first:stop" of batches, counted from 0, that are never trained on. On resume they
        # replace the saved ones that the data have not reached; None keeps those, if any.
        skip_batches: Sequence[str] | None = None
        # Saves and restores the state; None saves nothing.
        checkpointer: Checkpointer.Config | None = Checkpointer.default_config()
        evalers: dict[str, SpmdEvaler.Config] = {}  # By the name that prefixes their metrics.
        summary_writer: SummaryWriter.Config = SummaryWriter.default_config()  # Metrics on disk.
        log_every_n_steps: PositiveInt = 10  # Steps between log lines and written metrics.

        # -- Failures and profiling
        stop_on_nan: bool = True  # If False, training continues, but such a state is never saved.
        # Times that a batch is read again after a transient error of the system, such as EIO, after
        # 1, 2, 4 ... seconds; 0 for none.
        input_retries: NonNegativeInt = 5
        # Further behaviors of the run, by a name of your choice, in the order in which they are
        # called: BadSteps, DeviceCheck, RoutingEvaler, and your own (docs/extend_a_run.md).
        watchers: dict[str, Watcher.Config] = {}
        # Seconds without a step before the stacks of all threads are printed; None prints nothing.
        watchdog_timeout_seconds: PositiveFloat | None = 1800.0
        # Seconds without a step before the process exits; None never exits.
        crash_on_hang_timeout_seconds: PositiveFloat | None = None
        # Whether steps estimate the gradient-noise scale, from the gradients of micro-batches, of
        # which there must be two or more. False adds nothing to a step.
        log_gradient_noise: bool = False
        start_trace_steps: Sequence[PositiveInt] = ()  # Steps before which a profiler trace starts.
        num_trace_steps: PositiveInt = 3  # Steps per trace.

    def __init__(
        self, cfg: Any, *, parent: Module | None, devices: Sequence[Any] | None = None
    ) -> None:
        """Builds model, learner, evalers and checkpointer.

        Opens no data and uses no device, except for a task whose parameters the mesh shards.

        The mesh is over all devices, or `devices`, which may be descriptions, such as those of a
        topology, for which a step can only be compiled.

        Raises:
            UserError: If a setting is invalid.
        """
        super().__init__(cfg, parent=parent, devices=devices)
        cfg = self._completed
        self.folder = RunFolder(cfg.dir)
        shared = {"model": self.model, "train_dtype": cfg.train_dtype}
        self.evalers: Mapping[str, Any] = {
            name: self._add_child(f"evaler_{name}", evaler, **shared)
            for name, evaler in cfg.evalers.items()
        }
        self.saver: Checkpointer | None = None  # The checkpointer; None if nothing is saved.
        if cfg.checkpointer is not None:
            self.saver = cast(Checkpointer, self._add_child("checkpointer", cfg.checkpointer))
        self._add_child("summary_writer", cfg.summary_writer)
        self._origin: dict[str, Any] = {}  # Of the initial state, if it is another run's.
        # The checkpoint that the state is from, without its arrays; None for an initial state.
        self.restored: Restored | None = None
        self._init_from: InitFrom | None = maybe_instantiate(cfg.init_from)
        self.input_state: dict[str, Any] | None = None  # Position in the data, None at first.
        self._compiled: Callable[..., Any] | None = None
        self._check_locks: list[Callable[[], None]] = []  # Raise if a folder of the run was moved.
        self._file_sums: dict[str, str] = {}  # SHA-256 of the tokenizer's files, when written.
        self._is_of_restored_phase = False  # Whether the phase is that of a state already seen.
        self.step = 0  # Steps taken, known without waiting for the devices.
        self._newest: tuple[Any, Any] = ((), None)  # Of `batches`, and the position after it.
        # By name: those of single fields, then those of `watchers`.
        self.watchers: Mapping[str, Watcher] = {
            name: watcher.instantiate() for name, watcher in watchers_of(cfg).items()
        }
        for name, watcher in self.watchers.items():
            watcher.path = f"watchers.{name}"
            with named_in_errors(watcher):
                watcher.prepare(self)

    @functools.cached_property
    def input(self) -> Input:
        """The training input, opened on first use."""
        opened = self.new_input()
        opened.parameters, opened.policy = self._params_on_host, self._policy
        return opened

    def result(self) -> Any:
        """Returns the parameters to evaluate as the model gives them to `moelib.fit`, or None."""
        return self.model.result_of(self.model_params_for_eval())

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint; see `Checkpointer.best_step`."""
        return None if self.saver is None else self.saver.best_step()

    def _params_on_host(self) -> Any:
        """Returns the current result as NumPy arrays; None without state."""
        if self._state is None:
            return None
        replicated = jax.sharding.NamedSharding(self.mesh(), jax.sharding.PartitionSpec())
        params = jax.jit(lambda x: x, out_shardings=replicated)(self.trainer_state.model)
        return self.model.result_of(jax.tree.map(np.asarray, params))

    def _policy(self) -> tuple[Model, Nested] | None:
        """Returns the model and its current parameters as a step reads them; None without state."""
        if self._state is None:
            return None
        specs, params = self.model.create_parameter_specs_recursively(), self.trainer_state.model
        return self.model, precision.cast_parameters(params, specs, self.config.train_dtype)

    @property
    def trainer_state(self) -> TrainerState:
        """The current state. Raises RuntimeError before `init` or `restore_checkpoint`."""
        if self._state is None:
            raise RuntimeError("There is no state yet; call init() or restore_checkpoint() first.")
        return self._state

    @property
    def _host_rows(self) -> range:
        """This process's rows of a batch."""
        return host_rows(self.batch_sharding, self.config.input.global_batch_size)

    def model_params_for_eval(self) -> dict[str, Any]:
        """Returns the parameters to evaluate, such as their average; see `Learner.eval_params`."""
        return self.learner.eval_params(self.trainer_state.learner, self.trainer_state.model)

    # State.

    def init(self, prng_key: jax.Array | int | None = None) -> None:
        """Initializes the state from a key, by default from `prng_seed`.

        Raises:
            InsufficientMemoryError: If the state does not fit into memory.
        """
        cfg = self.config
        key = cfg.prng_seed if prng_key is None else prng_key
        check_memory(self.trainer_state_specs, self.trainer_state_shardings)
        with self.on_mesh():
            state = state_lib.init_state(
                self.model, self.learner, key, self.trainer_state_shardings
            )
            position = None
            if self._init_from is not None:
                again = self._origin.get("step")
                start = self._init_from.start(state, self.model, self.learner, step=again)
                state, self._origin = start.state, start.origin
                position = input_state_of(start.input, self._host_rows)
        self._state, self.input_state, self.step = state, position, int(state.step)

    def restore_checkpoint(self, step: int | None = None) -> int | None:
        """Restores the newest readable checkpoint, or that of `step`.

        Returns:
            The step of the checkpoint, or None if there is none.

        Raises:
            CheckpointMismatchError: If its arrays are not those of this config.
            CheckpointNotFoundError: If there is none of the step.
            DamagedCheckpointError: If none is readable.
            InsufficientMemoryError: If the state does not fit into memory.
            ValueError: If the position in the data cannot be restored on this number of processes.
        """
        if self.saver is None:
            return None
        check_memory(self.trainer_state_specs, self.trainer_state_shardings)
        try:
            restored = self.saver.restore(_target(self), step=step)
        except CheckpointMismatchError:
            newest = on_process_0(self.saver.latest_step) if step is None else step
            if not phases.begins_after(self.config, newest or 0):
                raise
            restored = self._restore_phase_before(step)
        self.restored = None
        if restored is None:
            return None
        record = restored.record
        self.restored = restored._replace(state=None)
        self._state, self.step = restored.state, record.step
        self.input_state = input_state_of(record.input, self._host_rows)
        self._origin, self._file_sums = record.origin, record.files
        return self.step

    def _restore_phase_before(self, step: int | None) -> Restored | None:
        """Restores the last checkpoint of the phase before, which updates other parameters."""
        assert self.saver is not None
        before = self._program_of(phases.name_at(self.config, phases.first_step(self.config) - 1))
        restored = self.saver.restore(_target(before), step=step)
        if restored is None:
            return None
        shardings = self.trainer_state_shardings.learner
        state = state_lib.with_learner(restored.state, self.learner, shardings)
        return restored._replace(state=state)

    def save_tokenizer(self) -> None:
        """Writes the input's tokenizer into the folder of the run, and hashes its files."""
        if save_tokenizer(self.config) or not self._file_sums:
            self._file_sums = file_sums(self.config.dir, FILES)

    def save_checkpoint(
        self, metrics: dict[str, float] | None = None, *, local: bool = False
    ) -> None:
        """Starts to write a checkpoint of the current state; all processes must call it.

        Args:
            metrics: Metrics of the evaluations after this step, by name.
            local: Whether it is a local checkpoint.

        Raises:
            UserError: If a folder of the run was moved, or its lock removed.
        """
        on_process_0(lambda: [check() for check in self._check_locks])
        record = RunRecord(
            step=self.step,
            input=gather_input_state(self.input_state, self._host_rows),
            metrics=metrics or {},
            evaluated={k: x for k, e in self.evalers.items() if (x := e.input_identity)},
            config=self.config.debug_string(),
            files=self._file_sums if jax.process_index() == 0 else {},
            mesh=dict(self.mesh().shape),
            origin=self._origin,
        )
        if not local:
            self.summary_writer.upload()
        save = self.checkpointer.save_locally if local else self.checkpointer.save
        save(self.trainer_state, record)

    # Steps.

    def open_input(self, start: Start) -> Prefetcher[Any]:
        """Returns the training batches from the position of a start, without those to skip."""
        cfg, ranges, position = self.config, start.skip_ranges, start.input_state
        sharding, batch_size = self.batch_sharding, cfg.input.global_batch_size
        opened = agreed(lambda: self.input)
        check_inputs("input", opened)

        def read() -> BatchIterator:
            batches = opened.iterator(self._host_rows)
            if ranges:
                batches = SkippingBatches(batches, ranges)
            if position is None:
                return batches
            if phases.begins_after(cfg, start.step) or "data" in (cfg.accept_changes or ()):
                batches.follow(position)
                if batches.state()["input"] != position.get("input"):
                    self.folder.note("other_data", step=start.step)
            else:
                batches.restore(position)
            return batches

        batches = agreed(read)
        if ranges != (position or {}).get(SKIPPED, ranges[:0]):
            self.folder.note("skipped_ranges", step=start.step, ranges=ranges)
        on_process_0(self.save_tokenizer)
        return Prefetcher(
            batches,
            lambda batch: put_batch(batch, sharding, batch_size),
            num_batches=0 if opened.reads_parameters else 2,
            num_retries=cfg.input_retries,
        )

    def run_step(self, batch: Any, *, input_state: dict[str, Any] | None = None) -> Any:
        """Dispatches a step on a global batch; returns its packed metrics without waiting for them.

        `input_state` is the position in the data after the batch, saved with the state.
        """
        if self._compiled is None:
            begin = time.perf_counter()
            self._compiled = self.compile_train_step(batch)
            logger.info("Compiled the training step in %.1f s.", time.perf_counter() - begin)
        try:
            self._state, metrics = self._compiled(self.trainer_state, batch)
        except TypeError as error:  # JAX counts what a leaked tracer adds to the inputs.
            if "compiled for" in str(error):
                error.add_note(
                    "A layer, loss or optimizer keeps a value of an earlier trace (a leaked "
                    "tracer); JAX_CHECK_TRACER_LEAKS=1 in the environment finds it."
                )
            raise
        self.input_state = input_state
        self.step += 1
        return metrics

    def batches(self) -> Iterator[Any]:
        """Yields batches for `train_step` from the current position in the data: for a custom loop.

            trainer = cfg.instantiate(parent=None)
            trainer.init()
            for batch in trainer.batches():
                metrics = trainer.train_step(batch)
                if trainer.step == 100:
                    break

        Watchers, evaluations, logs and checkpoints are of `run`.

        Raises:
            UserError: If `phases` is set, and `phase` is not; or if `rewind_to` is set.
        """
        cfg = self.config
        if cfg.phases and cfg.phase is None:
            raise UserError(
                f"phases={list(cfg.phases)}: batches() has the settings of one phase; set phase to "
                "its name, remove phases, or call moelib.fit."
            )
        if cfg.rewind_to is not None:
            raise UserError(
                f"rewind_to={cfg.rewind_to}: batches() goes on from the current state; call "
                f"restore_checkpoint({cfg.rewind_to}), and set rewind_to to None."
            )
        on_process_0(lambda: storage.make_folder(cfg.dir))
        skipped = course.ranges_to_skip(cfg, course.course_of(self.folder), self.input_state)
        start = Start(self.step, self.input_state, skip_ranges=skipped)
        with self.open_input(start) as feed:
            atexit.register(feed.close)  # Of a loop that is left, before Python's modules end.
            try:
                while True:
                    with self.on_mesh():
                        batch = next(feed, None)
                    if batch is None:
                        return
                    self._newest = batch, feed.state()
                    yield batch
            finally:
                atexit.unregister(feed.close)

    def train_step(self, batch: Any) -> Scalars:
        """Takes a step on the newest batch of `batches`, and returns its metrics by name.

        Raises:
            UserError: If it is another batch, whose position in the data is not known.
            NonFiniteError: If the loss or the parameters are not finite, and `stop_on_nan` is set.
        """
        newest, position = self._newest
        if batch is not newest:
            raise UserError(
                "batch is not the newest one of batches(); train on each as it comes, or call "
                "run_step(batch, input_state=...) with the position to save."
            )
        with self.on_mesh():
            scalars = unpack(self.run_step(batch, input_state=position))
        if scalars[NON_FINITE] and self.config.stop_on_nan:
            raise non_finite_error(self.step, scalars, self.saver)
        return scalars | (language_metrics(scalars) if self.model.is_language_model else {})

    def run(self, prng_key: jax.Array | int | None = None) -> dict[str, Any]:
        """Trains up to `max_step`, from the newest checkpoint if there is one.

        Of a config with `phases` it takes the steps of one; `moelib.fit` takes all.

        SIGTERM or SIGINT saves a checkpoint and returns.

        Args:
            prng_key: Key or seed of a new run; by default `prng_seed`.

        Returns:
            `loss` of the last step (nats per token; None if no step was taken), `aux` with its
            metrics by name, `evaler_summaries` with the latest metrics of each evaler by name,
            `step` with the number of steps taken, and `stopped_by` (None, "SIGTERM", "SIGINT",
            "end of input", "end of phase", or the reason of a watcher).

        Raises:
            UserError: If the processes have different configs or numbers of devices, or are not
                connected.
            TrainerDirConflictError: If the folder belongs to a run with another config.
            DirectoryInUseError: If another process trains in the folder, or in the checkpointer's.
            OtherPhase: If the newest checkpoint is of another phase.
            NonFiniteError: At the first step whose loss or parameters are not finite.
            CheckpointSaveError: If the last checkpoint could not be written.
            InsufficientMemoryError: If a device or the host has too little memory.
        """
        cfg, began = self.config, time.time()
        self.folder = RunFolder(cfg.dir)  # Whose events are read again.
        check_job()
        with contextlib.ExitStack() as stack:
            check_processes(cfg)
            stack.enter_context(self.on_mesh())
            batch_size = cfg.input.global_batch_size
            stack.enter_context(explained_if_full(batch_size, cfg.num_microbatches))
            _ = self.batch_sharding  # Refuses a mesh that does not divide the batch.
            if cfg.phase is None:
                check_phases(self, self._program_of)
            if cfg.checkpointer is not None and self.model.is_in_config:
                agreed(lambda: check_readable(cfg, self.trainer_state_specs.model))
            if not cfg.skip_kernel_check:
                self.replaced_kernels = replaced_kernels(self)
                stack.enter_context(self.on_mesh())
            saver, checked = self.saver, None

            def lock() -> None:
                locks = self.folder.locked(None if saver is None else saver.dir)
                self._check_locks = stack.enter_context(locks)

            on_process_0(lock)
            if saver is not None:
                saver.remove_unfinished()
                checked = course.rewind_or_resume(
                    *(self.all_phases, self.folder, saver, self._host_rows, self.mesh().shape),
                    is_first=not self._is_of_restored_phase,
                )
            if cfg.phase is None and cfg.phases:
                check_data(self, self._program_of, checked or 0)
            if not self._is_of_restored_phase:  # The checkpoint before a damaged one tells better.
                self._check_phase(checked or 0)
            start = self._start(began, prng_key, checked)
            on_process_0(lambda: self.folder.write_config(cfg))
            return self._take_steps(start, prng_key)

    def _start(self, began: float, prng_key: jax.Array | int | None, checked: int | None) -> Start:
        """Restores the newest checkpoint, or initializes the state, and drops later metrics.

        `checked` is the step whose config is known to be this run's.
        """
        begin, cfg, saver = time.perf_counter(), self.config, self.saver
        phase = {"phase": cfg.phase} if cfg.phases else {}
        self.folder.note("start", time=round(began, 3), num_processes=jax.process_count(), **phase)
        watchdog = Watchdog.default_config().set(timeout_seconds=cfg.watchdog_timeout_seconds)
        activity = Activity(self.step, time.monotonic(), ", while the run restores")
        with watchdog.instantiate().watch(activity), ended_by_sigterm("restoring"):
            step = self.restore_checkpoint()
            if step is None:
                self._begin(prng_key)
            elif cfg.init_from is not None and not self._origin:
                logger.warning(
                    "init_from.run=%s is ignored: %s has a checkpoint of step %d; set another dir "
                    "(--trainer_dir) to start from it.",
                    *(cfg.init_from.run, cfg.dir, step),
                )
            if step is not None and step < cfg.max_step:
                agreed(lambda: check_tokenizers(cfg, cfg.dir))
            restored = self.restored
            if restored is not None and step != checked:  # Local, or before a damaged one.
                mesh = self.mesh().shape
                whole = self.all_phases
                agreed(lambda: check_directory(whole, self.folder, restored.record, mesh=mesh))
            self._check_phase(self.step)
        if saver is not None and saver.local is not None:
            saver.local.delete_after(self.step)
        on_process_0(lambda: discard_after(cfg.dir, self.step))
        events = course.course_of(self.folder)
        return Start(
            self.step,
            self.input_state,
            restored,
            durable_position=self._durable_position(),
            skip_ranges=course.ranges_to_skip(cfg, events, self.input_state),
            began=began,
            restore_seconds=time.perf_counter() - begin,
        )

    def _durable_position(self) -> int | None:
        """Returns the position in the data of the durable checkpoint before a local one.

        It is 0 without one, and None if the state is not local, or that of another run may precede.
        """
        saver = self.saver
        if saver is None or self.restored is None or not saver.is_local(self.restored.path):
            return None
        newest = on_process_0(saver.latest_step)  # Only it may know of a damaged one.
        record = None if newest is None else agreed(lambda: newest_record(saver.dir, newest))
        if record is None:
            return None if self._origin else 0
        return (input_state_of(record.input, self._host_rows) or {}).get("step")

    def _check_phase(self, step: int) -> None:
        """Raises OtherPhase if the step after this one is of another phase than the trainer."""
        name = phases.name_at(self.config, min(step + 1, self.config.max_step))
        if name != self.config.phase:
            raise OtherPhase(name)

    def _program_of(self, name: str | None) -> StepProgram:
        """Returns the program of another phase."""
        return StepProgram(self.all_phases.clone(phase=name), parent=None, devices=self._devices)

    def of_phase(self, name: str | None) -> "SpmdTrainer":
        """Returns the trainer of another phase of the run. This one's state is freed."""
        self._state = None
        cfg = self.all_phases.clone(phase=name)
        trainer = type(self)(cfg, parent=None, devices=self._devices)
        trainer._is_of_restored_phase = True
        if self.saver is not None and trainer.saver is not None:
            trainer.saver.damaged |= self.saver.damaged
        return trainer

    def next_phase(self) -> "SpmdTrainer":
        """Returns the trainer of the phase that begins after the current step."""
        return self.of_phase(phases.name_at(self.config, self.step + 1))

    def _begin(self, prng_key: jax.Array | int | None) -> None:
        """Initializes the state of a new run, from elsewhere if `init_from` is set."""
        cfg, init_from = self.config, self._init_from
        weights = None if init_from is None else init_from.folder
        agreed(lambda: self.input)  # Missing data is an error before computations.
        fits = agreed(lambda: check_tokenizers(cfg, weights))
        if init_from is not None and not self._origin:
            earlier = init_from.earlier_step(course.course_of(self.folder))
            self._origin = {} if earlier is None else {"step": earlier}
        self.init(prng_key)
        if weights is not None and fits:
            on_process_0(lambda: copy_files(weights, cfg.dir))
        if self._origin and jax.process_index() == 0:
            self.folder.note(course.INIT_FROM, **self._origin)
            print(f"starts from {origin_text(self._origin)}")

    def _take_steps(self, start: Start, prng_key: jax.Array | int | None) -> dict[str, Any]:
        """Runs the loop, again from the newest checkpoint after each bad step to take again."""
        stop = StopRequest()
        stopped_by: str | None = None
        # By the step that went back, and its position in the data: BadSteps may skip batches.
        returns = collections.Counter[tuple[int, int | None]]()
        try:
            text = self.config.debug_string()
            on_process_0(lambda: self.summary_writer.start_trackers(text))
            while True:
                try:
                    result = TrainLoop(self, start, stop=stop).run()
                except GoBack as again:
                    point = self.step, (self.input_state or {}).get("step")
                    returns[point] += 1
                    if returns[point] > MAX_RETURNS:
                        raise no_progress_error(self.step, again.reason) from again
                    self.folder.note("go_back", step=self.step, reason=again.reason)
                    start = self._go_back(prng_key, again)
                else:
                    stopped_by = result["stopped_by"]
                    return result
        finally:
            self.summary_writer.close_trackers(stopped_by)

    def _go_back(self, prng_key: jax.Array | int | None, again: GoBack) -> Start:
        """Restores the newest checkpoint, a durable one if asked, and returns the start from it."""
        jax.block_until_ready(self._state)  # Else its collectives meet those of the restore.
        self._state = None  # Frees its memory for the one to restore.
        saver = self.saver
        if again.durable and saver is not None and saver.local is not None:
            saver.local.delete_after(on_process_0(saver.latest_step) or 0)
        return self._start(time.time(), prng_key, self.step)


def _target(program: StepProgram) -> TrainerState:
    """Returns the state of a program without values, with its shardings."""
    return sharding.abstract_state(program.trainer_state_specs, program.trainer_state_shardings)
