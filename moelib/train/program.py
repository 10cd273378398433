"""The program of a training step: its parts, trace without data, checks, and compilation."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.module import Module
from moelib.core.param import is_spec
from moelib.core.precision import reduce_dtype
from moelib.core.tree import Nested
from moelib.data.batches.input import Input
from moelib.data.batches.prefetch import row_sharding
from moelib.kernels.backend import kernel_backends, warn_unused_backends
from moelib.learner.learner import Learner
from moelib.models.model import Model
from moelib.parallel import sharding
from moelib.parallel.auto_sharding.specs import ShardingReport
from moelib.parallel.channels import own_channels
from moelib.parallel.mesh import HybridMeshShape, create_device_mesh, describe_mesh, shared_sides
from moelib.parallel.pipeline.schedule import check_microbatches
from moelib.runs import phases
from moelib.train import state as state_lib
from moelib.train.compiler_options import compile_with, step_options
from moelib.train.no_gradient import warn_without_gradient
from moelib.train.pipeline import PipelineConfig, stack_of, warn_empty_stages
from moelib.train.settings import (
    check_batch,
    check_config,
    completed,
    rules_of,
    schedule_on,
    warn_unused_schedule,
)
from moelib.train.shardings import shard_external_layers
from moelib.train.stacks import with_empty_stacks
from moelib.train.state import TrainerState
from moelib.train.step import TrainStep, make_own_train_step, make_train_step
from moelib.train.watchers import gradient_noise


class StepProgram(Module):
    """A model and its learner on a mesh, and the program of their training step.

    Its config is a `SpmdTrainer.Config`.
    """

    model: Model
    learner: Learner

    def __init__(
        self, cfg: Any, *, parent: Module | None, devices: Sequence[Any] | None = None
    ) -> None:
        """Builds model and learner; see `SpmdTrainer`."""
        self.all_phases = cfg  # The config with the settings of no phase.
        super().__init__(phases.applied(cfg), parent=parent)
        self._devices = devices
        check_config(self.config)
        self._completed = cfg = completed(self.config)
        _, built = cfg.model._header()  # A class or function.
        if not (isinstance(built, type) and issubclass(built, Model)):
            raise UserError(
                f"model is a {built.__qualname__}; set a moelib.models.model.Model, whose forward "
                "pass returns the loss of a batch."
            )
        self._add_child("model", cfg.model)
        self.sharding_report: ShardingReport | None = None  # Of automatic shardings.
        if cfg.auto_sharding or self.model.is_auto_sharded:
            with sharding.sharding_rules(rules_of(cfg)):
                self.sharding_report = shard_external_layers(
                    self.model, self.mesh_sizes, self._replica_batch
                )
        specs = self.model.create_parameter_specs_recursively()
        self._add_child("learner", cfg.learner, param_specs=specs)
        self.on_compiled: Callable[[Any, Any, Any], None] | None = None
        self._axes_used: set[str] = set()  # Logical axes of state, batch and activations.
        self.replaced_kernels: dict[str, str] = {}  # Backends for kernels that failed their check.

    # Devices and shardings.

    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh of the config.

        Raises:
            ValueError: If its size is not the number of devices, if nothing is split over one of
                its axes, or if a sharding rule names an unknown axis.
        """
        return self._mesh

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        cfg = self.config
        mesh = create_device_mesh(cfg.mesh_shape, cfg.mesh_axis_names, self._devices)
        with jax.set_mesh(mesh), sharding.sharding_rules(rules_of(cfg)):
            sharding.check_mesh_axes(dict(mesh.shape))
        return mesh

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes; devices are counted only if one of the config's is -1."""
        shape = self.config.mesh_shape
        if isinstance(shape, HybridMeshShape):
            shape = [a * b for a, b in zip(*shape, strict=True)]
        names = self.config.mesh_axis_names
        if len(shape) != len(names) or min(shape) < 1:
            return dict(self.mesh().shape)
        return dict(zip(names, shape, strict=True))

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """Sets mesh, sharding rules and kernel backends; records the logical axes that are used."""
        rules = sharding.sharding_rules(rules_of(self.config))
        kernels = kernel_backends({**self.config.kernel_backends, **self.replaced_kernels})
        reduce = reduce_dtype(self.config.reduce_dtype)
        with kernels, reduce, jax.set_mesh(self.mesh()), rules as used:
            yield
        self._axes_used |= used

    @property
    def input(self) -> Input:
        """The training input, opened on first use."""
        raise NotImplementedError

    def new_input(self) -> Input:
        """Opens and returns the training input."""
        return self._completed.input.instantiate()

    def abstract_batch(self) -> Any:
        """Returns a batch without values, if possible without opening data."""
        return self._completed.input.abstract_batch(lambda: self.input)

    def _replica_batch(self) -> Any:
        """Returns the micro-batch of one data-parallel replica, without values."""
        batch, shape = self.abstract_batch(), self.mesh_sizes
        parts = self.config.num_microbatches * math.prod(
            shape[axis] for axis in sharding.mesh_axes("batch", shape)
        )
        return jax.tree.map(lambda x: x.update(shape=(x.shape[0] // parts, *x.shape[1:])), batch)

    @functools.cached_property
    def trainer_state_specs(self) -> TrainerState:
        """The state with a ParameterSpec for each array."""
        return state_lib.state_specs(self.model, self.learner)

    @functools.cached_property
    def trainer_state_shardings(self) -> TrainerState:
        """The state with a NamedSharding for each array."""
        with self.on_mesh():
            return state_lib.state_shardings(self.trainer_state_specs, self.learner, self.mesh())

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of the arrays [B, S] of a batch.

        Raises:
            SplitError: If the mesh does not divide them.
        """
        cfg = self.config.input
        with self.on_mesh():
            check_batch(self.config, self.mesh().shape)
            return state_lib.batch_sharding(cfg.global_batch_size, cfg.seq_len, self.mesh())

    def flops_per_token(self) -> float | None:
        """Returns the training FLOPs per token, or None if the model does not count them.

        Gradients of matrices that are not trained are left out, those of all inputs are counted.
        """
        flops = self.model.flops_per_token(seq_len=self.config.input.seq_len)
        return None if flops is None else flops - self.untrained_flops_per_token()

    def untrained_flops_per_token(self) -> float:
        """Returns the forward FLOPs per token of matrices that are not trained."""
        return self.model.matrix_flops_per_token(lambda path: not self.learner.is_updated(path))

    def describe(self) -> str:
        """Returns one line with the size of the model and of the state, and the mesh."""
        params = self.trainer_state_specs.model
        mesh = self.mesh()
        shared = shared_sides(mesh.devices, mesh.axis_names)
        return (
            f"{tree.count_elements(params):,} parameters, "
            f"{tree.count_bytes(self.trainer_state_specs) / 1e6:,.1f} MB of state, mesh: "
            f"{describe_mesh(mesh.shape)} ({mesh.devices.flat[0].device_kind})"
            f"{', shared sides of the torus: ' + '; '.join(shared) if shared else ''}"
        )

    # The step.

    @functools.cached_property
    def pipeline(self) -> PipelineConfig | None:
        """The pipeline of a step; None without one.

        Raises:
            UserError: If the model cannot be spread over it, or needs more micro-batches.
        """
        cfg, num_ranks = self.config, self.mesh_sizes.get("pipeline", 1)
        schedule = schedule_on(cfg, self.mesh_sizes)
        if schedule is None:
            return None
        stack_of(self.model)
        check_microbatches(schedule, num_ranks, cfg.num_microbatches)
        gradient_noise.check(cfg.log_gradient_noise, cfg.num_microbatches, in_pipeline=True)
        on_cpus = self.mesh().devices.flat[0].platform == "cpu"
        return PipelineConfig(schedule, num_ranks, uniform=on_cpus)

    def trace_train_step(self, batch: Any = None) -> jax.stages.Traced:
        """Returns the training step as a jaxpr.

        Args:
            batch: Arrays or `jax.ShapeDtypeStruct`s; by default those of a language-model input,
                without opening data.

        Raises:
            ValueError: If the mesh does not divide an array, or a sharding rule splits nothing.
        """
        return self._trace(batch, self.pipeline)

    def _trace(self, batch: Any, pipeline: PipelineConfig | None) -> jax.stages.Traced:
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=row_sharding(self.batch_sharding, len(x.shape))
            ),
            self.abstract_batch() if batch is None else batch,
        )
        shardings = self.trainer_state_shardings
        state = sharding.abstract_state(self.trainer_state_specs, shardings)
        step = self._step_function(pipeline)
        replicated = jax.sharding.NamedSharding(self.mesh(), jax.sharding.PartitionSpec())
        with self.on_mesh():
            jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(shardings, replicated))
            traced = jitted.trace(state, batch)
        self.check_sharding_rules()
        return traced

    def _step_function(self, pipeline: PipelineConfig | None) -> TrainStep:
        cfg = self.config
        if not self.model.has_own_step:
            step = make_train_step(
                self.model,
                self.learner,
                train_dtype=cfg.train_dtype,
                num_microbatches=cfg.num_microbatches,
                pipeline=pipeline,
                log_gradient_noise=cfg.log_gradient_noise,
                # Saves the memory of a micro-batch's gradients. On GPUs only: the compiler of CPUs
                # rounds some sums otherwise, by a bit, and no step of a TPU was compiled with it.
                sum_by_layer=self.mesh().devices.flat[0].device_kind.startswith("NVIDIA"),
            )
            return with_empty_stacks(step)
        if cfg.num_microbatches > 1 or cfg.train_dtype is not None:
            raise UserError(
                f"num_microbatches={cfg.num_microbatches}, train_dtype={cfg.train_dtype}: a model "
                "with its own train_step uses neither; leave them unset."
            )
        return make_own_train_step(self.model, self.learner)

    def check_sharding_rules(self) -> None:
        """Raises ValueError if a sharding rule names a logical axis that nothing traced has."""
        sharding.check_rules_used(self.config.sharding_rules or {}, self._axes_used)

    def compiler_options(self) -> dict[str, str]:
        """Returns the options of XLA for the step.

        Raises:
            UserError: If one contradicts `deterministic`.
        """
        kind = self.mesh().devices.flat[0].device_kind
        return step_options(kind, self.config.compiler_options or {}, self.config.deterministic)

    def check_trained(self) -> Nested:
        """Returns the specs of the parameters that are trained.

        Raises:
            UserError: If there are none.
        """
        trained = tree.select(self.trainer_state_specs.model, self.learner.is_updated)
        if not trained and not self.model.has_own_step:
            raise UserError(
                "no parameter is trained: all are integers, booleans, `fixed` or frozen; give the "
                "model one array of floats, or, for a task, set train_step."
            )
        return trained

    def compile_train_step(self, batch: Any = None) -> jax.stages.Compiled:
        """Returns the compiled training step (state, batch) -> (state, metrics); donates the state.

        Calls `on_compiled`, if set, with the traced, the lowered and the compiled step. Logs a
        warning if parameters get no gradient, if `pipeline_schedule` or `kernel_backends` has no
        effect, or if stages have no layers. `batch` is that of `trace_train_step`.
        """
        cfg, model, pipeline = self.config, self.model, self.pipeline
        warn_unused_schedule(cfg, self.mesh_sizes)
        traced = self.trace_train_step(batch)
        warn_unused_backends(cfg.kernel_backends)
        trained = self.check_trained()
        # Gradients that a pipeline sums in its loop are no constants; those of a plain step are.
        plain = traced
        if pipeline is not None:
            warn_empty_stages(model, pipeline)
            plain = self._trace(batch, None)
        warn_without_gradient(plain.jaxpr, len(tree.by_path(trained, is_spec)))
        with self.on_mesh():
            lowered = own_channels(traced.lower(), self.mesh())
        compiled = compile_with(lowered, self.compiler_options())
        if self.on_compiled is not None:
            self.on_compiled(traced, lowered, compiled)
        return compiled
