"""A config's own training step on one mesh, with its gradients and updates exposed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moelib.checkpoint.contents import RunRecord
from moelib.core import tree
from moelib.core.jaxpr import abstract_parameters, forward_pass, walk
from moelib.core.tree import Nested
from moelib.data.batches.prefetch import row_sharding
from moelib.learner.learner import Learner, LearnerUpdate
from moelib.parallel.channels import own_channels
from moelib.parallel.sharding import abstract_state
from moelib.runtime import memory_maps
from moelib.train import metrics
from moelib.train.stacks import with_empty_stacks
from moelib.train.state import init_state
from moelib.train.step import make_train_step
from moelib.train.trainer import SpmdTrainer

# A third of the compile time; results differ by the order of sums at most.
_FAST_COMPILE = {"xla_backend_optimization_level": 0}


class Observed(NamedTuple):
    """The results of a step, on the devices of its mesh."""

    state: Any  # TrainerState after the step.
    metrics: dict[str, float]  # Loss, auxiliary losses, and metrics of layers, by name.
    gradients: Nested  # Gradients of the objective, for every trained parameter.
    updated: Nested  # Parameters after an update by the gradients that the probe was given.
    learner: Any  # State of the learner after that update.

    @property
    def state_by_given(self) -> Any:
        """The state after the step, with that update in the place of the step's own."""
        trained = tree.by_path(self.gradients)
        own = tree.select(self.state.model, lambda path: path not in trained)
        updated = tree.select(self.updated, trained.__contains__)
        return self.state._replace(model=tree.merge(own, updated), learner=self.learner)


class _RecordingLearner:
    """A learner that keeps the gradients it is given."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.gradients: Nested = {}

    def is_updated(self, path: str) -> bool:
        return self._learner.is_updated(path)

    def is_frozen(self, path: str) -> bool:
        return self._learner.is_frozen(path)

    def update(self, *, gradients: Nested, **others: Any) -> LearnerUpdate:
        self.gradients = gradients
        return self._learner.update(gradients=gradients, **others)


class Probe:
    """A config's training step on one mesh."""

    def __init__(self, cfg: Any, axes: Mapping[str, int], devices: Sequence[Any]) -> None:
        """Builds the trainer of a config with a `dir`, on devices; compiles nothing.

        Axes of the mesh that are not in `axes` have size 1. Raises UserError if the config cannot
        be split over the mesh.
        """
        shape = tuple(axes.get(name, 1) for name in cfg.mesh_axis_names)
        self.trainer: SpmdTrainer = cfg.clone(mesh_shape=shape).instantiate(
            parent=None, devices=devices
        )
        self.shardings: Any = self.trainer.trainer_state_shardings  # Of the state.
        self._batch_sharding = self.trainer.batch_sharding
        self._step: Any = None

    def initial(self, prng_seed: int) -> Any:
        """Returns the state before the first step of a run with this seed."""
        trainer = self.trainer
        with trainer.on_mesh():
            return init_state(trainer.model, trainer.learner, prng_seed, self.shardings)

    def compile(self, state: Any, batch: Any, gradients: Nested) -> None:
        """Compiles the step for values of these shapes.

        Raises UserError if the config cannot be split over the mesh, or a rule splits nothing.
        """
        trainer = self.trainer
        recorder = _RecordingLearner(trainer.learner)
        train_step = make_train_step(
            trainer.model,
            recorder,  # pyrefly: ignore[bad-argument-type]
            train_dtype=trainer.config.train_dtype,
            num_microbatches=trainer.config.num_microbatches,
            pipeline=trainer.pipeline,
        )

        def step(state: Any, batch: Any, gradients: Nested) -> Any:
            after, packed = train_step(state, batch)
            update = trainer.learner.update(
                gradients=gradients, state=state.learner, params=state.model, loss=jnp.ones(())
            )
            return after, packed, recorder.gradients, update.params, update.state

        memory_maps.warn_if_many()
        with trainer.on_mesh():
            out = (self.shardings, None, None, None, self.shardings.learner)
            arguments = self._put(state, batch, gradients)
            jitted = jax.jit(with_empty_stacks(step), out_shardings=out)
            lowered = own_channels(jitted.lower(*arguments), trainer.mesh())
            trainer.check_sharding_rules()
            self._step = lowered.compile(compiler_options=_FAST_COMPILE)

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint with the trainer's own checkpointer. Raises its error."""
        checkpointer = self.trainer.checkpointer
        state = jax.device_put(state, self.shardings)
        checkpointer.save(state, RunRecord(step=step))
        checkpointer.close()
        if checkpointer.last_error is not None:
            raise checkpointer.last_error

    def restore(self, writer: "Probe", step: int) -> Any:
        """Returns the state of a checkpoint written by any mesh's probe, on this mesh."""
        target = abstract_state(self.trainer.trainer_state_specs, self.shardings)
        restored = writer.trainer.checkpointer.restore(target, step=step)
        assert restored is not None
        return restored.state

    def _put(self, state: Any, batch: Any, gradients: Nested) -> Any:
        """Returns the arguments of the step on the devices of the mesh."""
        put = lambda x: jax.device_put(x, row_sharding(self._batch_sharding, x.ndim))
        trained = dict(tree.flatten_items(gradients))
        return (
            jax.device_put(state, self.shardings),
            jax.tree.map(put, batch),
            jax.device_put(gradients, tree.select(self.shardings.model, trained.__contains__)),
        )

    def __call__(self, state: Any, batch: Any, gradients: Nested) -> Observed:
        """Returns the results of a step from `state`, and of an update by `gradients`."""
        with self.trainer.on_mesh():
            after, packed, found, updated, learner = self._step(*self._put(state, batch, gradients))
        return Observed(after, metrics.unpack(packed), found, updated, learner)


def narrow_layers(trainer: SpmdTrainer) -> list[str]:
    """Returns scopes of a trainer's model with arrays of less than float32, for float32 inputs."""
    model = trainer.model
    batch = trainer.config.input.abstract_batch(lambda: trainer.input)
    params = abstract_parameters(model.create_parameter_specs_recursively())
    trace = jax.make_jaxpr(forward_pass(model))(params, batch)
    is_narrow = lambda var: getattr(var.aval, "dtype", None) in (jnp.bfloat16, jnp.float16)
    found = {
        str(site.eqn.source_info.name_stack)
        for site in walk(trace)
        if any(map(is_narrow, site.eqn.outvars))
    }
    outer = lambda name: not any(name.startswith(f"{other}/") for other in found if other)
    return sorted(name for name in found if name and outer(name))
