"""A config's own training step on one mesh, with everything it computes laid open."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core import tree
from moelib.core.context import AuxLoss
from moelib.core.module import functional
from moelib.core.tree import Batch, Nested
from moelib.data.prefetch import row_sharding
from moelib.learner.learner import Learner, LearnerUpdate
from moelib.train import metrics
from moelib.train.state import abstract_state, init_state
from moelib.train.step import make_train_step
from moelib.train.trainer import SpmdTrainer

# Compiled in a third of the time; the numbers differ by the order of sums at most.
_QUICK = {"xla_backend_optimization_level": 0}


class Observed(NamedTuple):
    """What a step on a mesh computed, as it lies on the devices.

    Attributes:
        state: The TrainerState after the step.
        metrics: Numbers by name: loss, auxiliary losses, what layers report.
        gradients: Of the objective, for every parameter that is trained.
        updated: Parameters after the learner's update by the gradients that it was given.
        learner: The learner's state after that update.
    """

    state: Any
    metrics: dict[str, float]
    gradients: Nested
    updated: Nested
    learner: Any


class _Overheard:
    """A learner that is listened to: what gradients it is given."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.gradients: Nested = {}

    def is_updated(self, path: str) -> bool:
        return self._learner.is_updated(path)

    def update(self, *, gradients: Nested, **others: Any) -> LearnerUpdate:
        self.gradients = gradients
        return self._learner.update(gradients=gradients, **others)


class Probe:
    """A config's training step on one mesh of some devices."""

    def __init__(self, cfg: Any, axes: Mapping[str, int], devices: Sequence[Any]) -> None:
        """Builds the trainer; compiles nothing.

        Args:
            cfg: A `SpmdTrainer.Config` with a `dir`.
            axes: Sizes of mesh axes; 1 for those not named.
            devices: As many as the sizes multiply to.

        Raises:
            ValueError: If the config cannot be split over the mesh.
        """
        shape = tuple(axes.get(name, 1) for name in cfg.mesh_axis_names)
        made = cfg.clone(mesh_shape=shape).instantiate(parent=None, devices=devices)
        self.trainer: SpmdTrainer = made
        self._rows = made.batch_sharding
        self._step: Any = None

    def initial(self, prng_seed: int) -> Any:
        """Returns the state before the first step, as a run of this seed begins."""
        trainer = self.trainer
        with trainer.on_mesh():
            return init_state(trainer.model, trainer.learner, prng_seed, self.places)

    @property
    def places(self) -> Any:
        """Where the arrays of the state lie."""
        return self.trainer.trainer_state_shardings

    def compile(self, state: Any, batch: Any, gradients: Nested) -> None:
        """Compiles the step for values of these shapes.

        Raises:
            ValueError: If the config cannot be split over the mesh, or a rule splits nothing.
        """
        trainer = self.trainer
        overheard = _Overheard(trainer.learner)
        train_step = make_train_step(
            trainer.model,
            overheard,  # pyrefly: ignore[bad-argument-type]
            num_microbatches=trainer.config.num_microbatches,
        )

        def step(state: Any, batch: Any, gradients: Nested) -> Any:
            after, packed = train_step(state, batch)
            update = trainer.learner.update(
                gradients=gradients, state=state.learner, params=state.model, loss=jnp.ones(())
            )
            return after, packed, overheard.gradients, update.params, update.state

        with trainer.on_mesh():
            out = (self.places, None, None, None, self.places.learner)
            given = self._put(state, batch, gradients)
            lowered = jax.jit(step, out_shardings=out).lower(*given)
            trainer.check_sharding_rules()
            self._step = lowered.compile(compiler_options=_QUICK)

    def auxiliary_losses(self, params: Nested, batch: Batch) -> set[str]:
        """Returns the paths of all auxiliary losses that arrive at the trainer."""
        forward = functools.partial(functional, self.trainer.model, is_training=True)
        with self.trainer.on_mesh():
            _, collection = jax.eval_shape(forward, jax.random.key(0), params, (batch,))
        losses = tree.flatten_items(collection.aux_losses, lambda x: isinstance(x, AuxLoss))
        return {path for path, _ in losses}

    def save(self, state: Any, step: int) -> None:
        """Writes a checkpoint with the trainer's own checkpointer.

        Raises:
            Exception: If it cannot be written.
        """
        checkpointer = self.trainer.checkpointer
        state = jax.device_put(state, self.places)
        checkpointer.save(state, CheckpointRecord(step=step, arrays={}))
        checkpointer.close()
        if checkpointer.last_error is not None:
            raise checkpointer.last_error

    def restored(self, of: "Probe", step: int) -> Any:
        """Returns the state of a checkpoint that another mesh's probe wrote, on this mesh."""
        target = abstract_state(self.trainer.trainer_state_specs, self.places)
        restored = of.trainer.checkpointer.restore(target, step=step)
        assert restored is not None
        return restored.state

    def _put(self, state: Any, batch: Any, gradients: Nested) -> Any:
        rows = {n: jax.device_put(x, row_sharding(self._rows, x.ndim)) for n, x in batch.items()}
        return (
            jax.device_put(state, self.places),
            rows,
            jax.tree.map(jax.device_put, gradients, _like(gradients, self.places.model)),
        )

    def __call__(self, state: Any, batch: Any, gradients: Nested) -> Observed:
        """Returns what a step from a state computes, and an update by other gradients."""
        with self.trainer.on_mesh():
            after, packed, found, updated, learner = self._step(*self._put(state, batch, gradients))
        return Observed(after, metrics.unpack(packed), found, updated, learner)


def _like(part: Nested, whole: Nested) -> Nested:
    """Returns the leaves of `whole` that `part` has too."""
    return {
        name: _like(inside, whole[name]) if isinstance(inside, dict) else whole[name]
        for name, inside in part.items()
    }
