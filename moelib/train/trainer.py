"""The trainer: builds everything a run needs, restores it, and runs it to its end."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import CheckpointRecord
from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    DType,
    InstantiableConfig,
    Required,
    config_class,
)
from moelib.core.module import Module, nowrap
from moelib.core.param import is_spec
from moelib.data.input import Input, batch_spec
from moelib.data.prefetch import HostRows, host_rows, row_sharding
from moelib.learner.learner import Learner
from moelib.parallel import sharding
from moelib.parallel.mesh import (
    MESH_AXIS_NAMES,
    HybridMeshShape,
    create_device_mesh,
    describe_mesh,
    mesh_shape_from_axes,
)
from moelib.train import state as state_lib
from moelib.train.compiler_options import BY_DEVICE_KIND
from moelib.train.evaler import SpmdEvaler
from moelib.train.identity import CONFIG_FILE, check_directory, config_hash, write_config
from moelib.train.input_state import gather_input_state, input_state_of
from moelib.train.loop import TrainLoop
from moelib.train.memory import check_memory
from moelib.train.no_gradient import warn_without_gradient
from moelib.train.settings import (
    check_config,
    check_microbatches,
    set_if_required,
    with_max_step,
    with_run_length,
    with_vocab_size,
)
from moelib.train.state import TrainerState
from moelib.train.step import make_train_step
from moelib.train.summary_writer import SummaryWriter

logger = logging.getLogger(__name__)


class SpmdTrainer(Module):
    """Trains a model, the same on one device and on many processes with many.

    The model is a module with `create_parameter_specs_recursively() -> nested dict of
    ParameterSpec`, `initialize_parameters_recursively(prng_key) -> nested dict of arrays`, and
    `forward(batch) -> (loss, metrics)`, the loss a WeightedScalar of nats a token and the number
    of tokens. It may have `end_step_recursively(parameters) -> parameters`, applied after each
    step, `flops_per_token(seq_len=) -> float`, for FLOP/s, and `token_counts(batch) -> (tokens of
    the loss, tokens of auxiliary losses)`, without which the latter are weighted like the loss.

    A run leaves in its folder `config.txt`, `metrics.jsonl`, `summaries/` and `checkpoints/`, and
    goes on from the newest checkpoint when it is started again; it then takes the same steps, bit
    for bit, as if it had never been stopped.
    """

    @config_class
    class Config(Module.Config):
        # What is trained, on what.
        input: Required[Input.Config] = REQUIRED
        model: Required[InstantiableConfig] = REQUIRED
        learner: Learner.Config = Learner.default_config()
        max_step: Required[int] = REQUIRED
        prng_seed: int = 0  # Of initial parameters and dropout.
        train_dtype: DType | None = None  # Trainable parameters are cast to it for each step.
        num_microbatches: int = 1  # Parts of a batch computed one after the other.
        # Builds a function from the first TrainerState to the one to begin with. It is given the
        # model, if it has such an argument.
        init_state_builder: InstantiableConfig | None = None

        # Where.
        mesh_shape: Sequence[int] | HybridMeshShape = mesh_shape_from_axes(data=-1)
        mesh_axis_names: Sequence[str] = MESH_AXIS_NAMES
        # (regex for --mesh_selector, mesh shape or one or more ConfigModifiers); first match wins.
        mesh_rules: Sequence[tuple[str, Any]] = ()
        # {logical axis: mesh axes}, in place of lines of `moelib.parallel.sharding.DEFAULT_RULES`.
        sharding_rules: dict[str, Sequence[str]] | None = None
        # Of XLA, for the step; over those of `moelib.train.compiler_options` for the devices.
        compiler_options: dict[str, str] | None = None

        # What it leaves.
        dir: Required[str] = REQUIRED
        checkpointer: Checkpointer.Config | None = Checkpointer.default_config()  # None: none.
        evalers: dict[str, SpmdEvaler.Config] = {}
        summary_writer: SummaryWriter.Config = SummaryWriter.default_config()
        log_every_n_steps: int = 10

        # When something goes wrong, and to see what goes on.
        stop_on_nan: bool = True  # If not, training goes on, but such a state is never saved.
        watchdog_timeout_seconds: float | None = 1800.0  # Without a step: print all stacks.
        crash_on_hang_timeout_seconds: float | None = None  # Without a step: exit.
        start_trace_steps: Sequence[int] = ()  # Steps before which a profiler trace begins.
        num_trace_steps: int = 3  # Steps in a trace.

    def __init__(
        self, cfg: Any, *, parent: Module | None, devices: Sequence[Any] | None = None
    ) -> None:
        """Builds model, learner, evalers and checkpointer. Opens no data and touches no device.

        Args:
            cfg: The config.
            parent: None.
            devices: Those of the mesh, all by default. A step can be lowered for some that are not
                there, such as a topology's.

        Raises:
            ValueError: If a setting cannot be.
        """
        super().__init__(cfg, parent=parent)
        self._devices = devices
        cfg = self.config
        check_config(cfg)
        self._add_child("model", cfg.model)
        specs = self.model.create_parameter_specs_recursively()
        learner = with_run_length(cfg.learner, cfg.max_step)
        self._add_child("learner", learner, param_specs=specs)
        self._evalers: dict[str, Any] = {}
        for name, evaler in cfg.evalers.items():
            evaler = with_max_step(evaler, "eval_policy", cfg.max_step)
            evaler.input = with_vocab_size(evaler.input, cfg.model, f"evalers.{name}.input")
            shared = {"model": self.model, "train_dtype": cfg.train_dtype}
            self._evalers[name] = self._add_child(f"evaler_{name}", evaler, **shared)
        if cfg.checkpointer is not None:
            checkpointer = with_max_step(cfg.checkpointer, "save_policy", cfg.max_step)
            set_if_required(checkpointer, dir=os.path.join(cfg.dir, "checkpoints"))
            self._add_child("checkpointer", checkpointer)
        writer = cfg.summary_writer.clone()
        set_if_required(
            writer,
            dir=os.path.join(cfg.dir, "summaries"),
            jsonl_path=os.path.join(cfg.dir, "metrics.jsonl"),
        )
        self._add_child("summary_writer", writer)
        self._state: TrainerState | None = None
        self._input_state: dict[str, Any] | None = None
        self._compiled: Callable[..., Any] | None = None
        self.on_compiled: Callable[[Any, Any, Any], None] | None = None
        self._axes_asked: set[str] = set()  # Logical axes of state, batch and activations.
        self.restored_metrics: dict[str, float] = {}  # Of evaluations, in the checkpoint restored.
        self.step = 0  # Steps taken, known without asking the devices.

    # What there is.

    @nowrap
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh of the config, over its devices; `jax.set_mesh` takes it.

        Raises:
            ValueError: If it does not take exactly the devices, if nothing is split over one of its
                axes, or if a sharding rule names an axis that is not there.
        """
        return self._mesh

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        cfg = self.config
        mesh = create_device_mesh(cfg.mesh_shape, cfg.mesh_axis_names, self._devices)
        with jax.set_mesh(mesh), sharding.sharding_rules(cfg.sharding_rules or {}):
            sharding.check_mesh_axes(dict(mesh.shape))
        return mesh

    @contextlib.contextmanager
    @nowrap
    def on_mesh(self) -> Iterator[None]:
        """Sets the mesh and the sharding rules, and notes what is asked of these."""
        rules = sharding.sharding_rules(self.config.sharding_rules or {})
        with jax.set_mesh(self.mesh()), rules as asked:
            yield
        self._axes_asked |= asked

    @functools.cached_property
    def input(self) -> Input:
        """The training input, opened when it is first asked for."""
        return with_vocab_size(self.config.input, self.config.model, "input").instantiate()

    @property
    def evalers(self) -> dict[str, SpmdEvaler]:
        """The evalers, by name."""
        return self._evalers

    @functools.cached_property
    def trainer_state_specs(self) -> TrainerState:
        """The state with a ParameterSpec in place of each array."""
        return state_lib.state_specs(self.model, self.learner)

    @functools.cached_property
    def trainer_state_shardings(self) -> TrainerState:
        """The state with a NamedSharding in place of each array."""
        with self.on_mesh():
            return state_lib.state_shardings(self.trainer_state_specs, self.learner, self.mesh())

    @property
    def trainer_state(self) -> TrainerState:
        """The state now. Raises RuntimeError before `init` or `restore_checkpoint`."""
        if self._state is None:
            raise RuntimeError("There is no state yet; call init() or restore_checkpoint() first.")
        return self._state

    @property
    def input_state(self) -> dict[str, Any] | None:
        """This process's place in the data after the steps taken, or None at the beginning."""
        return self._input_state

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Where the arrays [B, S] of a batch lie. Raises ValueError if the mesh cannot split it."""
        cfg = self.config.input
        with self.on_mesh():
            self._check_sequences()
            place = state_lib.batch_sharding(cfg.global_batch_size, cfg.seq_len, self.mesh())
            check_microbatches(self.config, dict(self.mesh().shape))
        return place

    def _check_sequences(self) -> None:
        """Raises ValueError if the mesh does not divide the sequences of an input."""
        cfg, mesh_shape = self.config, dict(self.mesh().shape)
        inputs = {"input": cfg.input} | {
            f"evalers.{n}.input": e.input for n, e in cfg.evalers.items()
        }
        for name in ("sequence", "residual_sequence"):
            axes = sharding.mesh_axes(name, mesh_shape)
            parts = math.prod(mesh_shape[axis] for axis in axes)
            said = ", ".join(f"{axis} {mesh_shape[axis]}" for axis in axes)
            for path, inside in inputs.items():
                if inside.seq_len % parts:
                    raise sharding.SplitError(
                        f"{path}.seq_len is {inside.seq_len}, which does not divide into the "
                        f"{parts} parts of {name!r} over the mesh axes {said}; set it to a "
                        f"multiple of {parts}, or make mesh_shape smaller there."
                    )

    @property
    def _host_rows(self) -> HostRows:
        """Which share of the batch this process reads."""
        return host_rows(self.batch_sharding, self.config.input.global_batch_size)

    @nowrap
    def model_params_for_eval(self) -> dict[str, Any]:
        """Returns the parameters to evaluate: their average if the learner keeps one."""
        return self.learner.eval_params(self.trainer_state.learner, self.trainer_state.model)

    @nowrap
    def flops_per_token(self) -> float | None:
        """Returns the FLOPs of training on a token, or None if the model does not say."""
        if not hasattr(self.model, "flops_per_token"):
            return None
        return self.model.flops_per_token(seq_len=self.config.input.seq_len)

    # State.

    @nowrap
    def init(self, prng_key: jax.Array | int | None = None) -> None:
        """Makes the state before the first step, from a key or else `prng_seed`."""
        cfg = self.config
        key = cfg.prng_seed if prng_key is None else prng_key
        check_memory(self.trainer_state_specs, self.trainer_state_shardings)
        with self.on_mesh():
            state = state_lib.init_state(
                self.model, self.learner, key, self.trainer_state_shardings
            )
            if cfg.init_state_builder is not None:
                given = {"model": self.model} if "model" in cfg.init_state_builder else {}
                state = cfg.init_state_builder.instantiate(**given)(state)
                state = jax.device_put(state, self.trainer_state_shardings)
        self._state, self._input_state, self.step = state, None, int(state.step)

    @nowrap
    def restore_checkpoint(self, step: int | None = None) -> int | None:
        """Takes over the newest checkpoint that can be read, or that of `step`.

        Returns:
            Its step, or None if there is no checkpoint.

        Raises:
            CheckpointMismatchError: If it is of another config.
            CheckpointNotFoundError: If there is none of the step.
            DamagedCheckpointError: If none can be read.
            ValueError: If the place in the data cannot be restored on so many processes.
        """
        if self.config.checkpointer is None:
            return None
        check_memory(self.trainer_state_specs, self.trainer_state_shardings)
        target = state_lib.abstract_state(self.trainer_state_specs, self.trainer_state_shardings)
        restored = self.checkpointer.restore(target, step=step)
        if restored is None:
            return None
        known = os.path.exists(os.path.join(self.config.dir, CONFIG_FILE))  # Compared by `run`.
        if not known and restored.record.config_hash != config_hash(self.config):
            logger.warning(
                "%s was written with another config, or by another version of the library, and "
                "%s/%s is missing.",
                restored.path,
                self.config.dir,
                CONFIG_FILE,
            )
        self._input_state = input_state_of(restored.record.input, self._host_rows)
        self._state, self.step = restored.state, restored.record.step
        self.restored_metrics = restored.record.metrics
        return self.step

    @nowrap
    def save_checkpoint(self, metrics: dict[str, float] | None = None) -> None:
        """Begins to write a checkpoint of the state now, with the metrics of its evaluations.

        All processes must call it.
        """
        record = CheckpointRecord(
            step=self.step,
            arrays={},
            input=gather_input_state(self._input_state, self._host_rows),
            metrics=metrics or {},
            config_hash=config_hash(self.config),
            mesh=dict(self.mesh().shape),
        )
        self.checkpointer.save(self.trainer_state, record)

    # Steps.

    @nowrap
    def compile_train_step(self, batch: Any = None) -> jax.stages.Compiled:
        """Returns the training step (state, batch) -> (state, metrics), compiled; state is donated.

        `on_compiled`, if it is set, is then called with the step traced, lowered and compiled.

        Args:
            batch: As `lower_train_step` takes it.
        """
        traced = self.trace_train_step(batch)
        trained = tree.select(self.trainer_state_specs.model, self.learner.is_updated)
        warn_without_gradient(traced.jaxpr, len(tree.by_path(trained, is_spec)))
        with self.on_mesh():
            lowered = traced.lower()
        compiled = lowered.compile(compiler_options=self.compiler_options())
        if self.on_compiled is not None:
            self.on_compiled(traced, lowered, compiled)
        return compiled

    @nowrap
    def compiler_options(self) -> dict[str, str]:
        """Returns the options of XLA that the step is compiled with."""
        device = self.mesh().devices.flat[0]
        defaults = BY_DEVICE_KIND.get(device.device_kind, {})
        return {**defaults, **(self.config.compiler_options or {})}

    @nowrap
    def lower_train_step(self, batch: Any = None) -> jax.stages.Lowered:
        """Returns the training step as it goes into the compiler, for the config's mesh.

        Args:
            batch: As `trace_train_step` takes it.
        """
        with self.on_mesh():
            return self.trace_train_step(batch).lower()

    @nowrap
    def trace_train_step(self, batch: Any = None) -> jax.stages.Traced:
        """Returns the training step as JAX's own program, for the config's mesh.

        Args:
            batch: Arrays, or what stands for them; by default those that language-model inputs
                give, for which no data is opened.

        Raises:
            ValueError: If the mesh cannot split something, or a sharding rule splits nothing.
        """
        cfg = self.config
        if batch is None:
            shapes = batch_spec(cfg.input.global_batch_size, cfg.input.seq_len)
            batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=row_sharding(self.batch_sharding, len(x.shape))
            ),
            batch,
        )
        state = state_lib.abstract_state(self.trainer_state_specs, self.trainer_state_shardings)
        step = make_train_step(
            self.model,
            self.learner,
            train_dtype=cfg.train_dtype,
            num_microbatches=cfg.num_microbatches,
        )
        replicated = jax.sharding.NamedSharding(self.mesh(), jax.sharding.PartitionSpec())
        out = (self.trainer_state_shardings, replicated)
        with self.on_mesh():
            traced = jax.jit(step, donate_argnums=(0,), out_shardings=out).trace(state, batch)
        self.check_sharding_rules()
        return traced

    @nowrap
    def check_sharding_rules(self) -> None:
        """Raises ValueError if a sharding rule is about an axis that nothing traced so far has."""
        sharding.check_rules_asked(self.config.sharding_rules or {}, self._axes_asked)

    @nowrap
    def run_step(self, batch: Any, *, input_state: dict[str, Any] | None = None) -> Any:
        """Takes a step, and returns its packed metrics without waiting for them.

        Args:
            batch: Global arrays.
            input_state: The place in the data after the batch, to be saved with the state.
        """
        if self._compiled is None:
            begin = time.perf_counter()
            self._compiled = self.compile_train_step(batch)
            logger.info("Compiled the training step in %.1f s.", time.perf_counter() - begin)
        self._state, metrics = self._compiled(self.trainer_state, batch)
        self._input_state = input_state
        self.step += 1
        return metrics

    @nowrap
    def run(self, prng_key: jax.Array | int | None = None) -> dict[str, Any]:
        """Trains up to `max_step`, from the newest checkpoint if there is one.

        SIGTERM or SIGINT saves a checkpoint and returns.

        Args:
            prng_key: Key or seed of a run that begins; by default `prng_seed`.

        Returns:
            `loss` of the last step (nats a token, None if no step was taken), `aux` its metrics by
            name, `evaler_summaries` the newest metrics of each evaler by name, `step` the number
            of steps taken, and `stopped_by` (None, "SIGTERM", "SIGINT" or "end of input").

        Raises:
            TrainerDirConflictError: If the folder belongs to another run.
            NonFiniteError: At the first step whose loss or parameters are not finite.
            CheckpointSaveError: If the last checkpoint could not be written.
        """
        cfg = self.config
        with self.on_mesh():
            _ = self.batch_sharding  # Refuses a mesh that does not divide the batch.
            if cfg.checkpointer is not None:
                self.checkpointer.remove_unfinished()
                if self.checkpointer.latest_step() is not None:  # The folder is taken.
                    check_directory(cfg, cfg.dir)
            restored = self.restore_checkpoint()
            if restored is None:
                _ = self.input  # Opened first: missing data is an error before any computation.
                self.init(prng_key)
            if jax.process_index() == 0:
                write_config(cfg, cfg.dir)
            self.summary_writer.resume(self.step)
            self.summary_writer.write_text(self.step, "config", cfg.debug_string())
            return TrainLoop(self).run()

    @nowrap
    def describe(self) -> str:
        """Returns one line: parameters, state, mesh."""
        params = self.trainer_state_specs.model
        mesh = self.mesh()
        return (
            f"{tree.count_elements(params):,} parameters, "
            f"{tree.count_bytes(self.trainer_state_specs) / 1e6:,.1f} MB of state, mesh: "
            f"{describe_mesh(mesh.shape)} "
            f"({mesh.devices.flat[0].device_kind})"
        )
