"""State of a run between steps: its arrays, their shardings, and their initial values."""

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.tree import Nested
from moelib.learner.learner import Learner
from moelib.learner.transforms import LearningRateState
from moelib.parallel import sharding

logger = logging.getLogger(__name__)

# At higher levels LLVM takes 50 s instead of 4 for the random numbers of a few layers, and the code
# is no faster.
_ON_CPU = {"xla_backend_optimization_level": 1}
# States whose `count` is the step of a schedule.
_SCHEDULED = (LearningRateState, optax.ScaleByScheduleState)


class TrainerState(NamedTuple):
    """State of a run after `step` steps."""

    step: Any  # Number of steps taken, int32 scalar.
    prng_key: Any  # Key data, uint32; keys of a step derive from it and the number of the step.
    model: Nested  # Parameters of the model, including those that are not trained.
    learner: Any  # State of the learner.


def key_data(prng_key: jax.Array | int) -> jax.Array:
    """Returns the uint32 data of a seed, or of a key of `jax.random.key` or `PRNGKey`."""
    if isinstance(prng_key, int):
        prng_key = jax.random.key(prng_key)
    if jnp.issubdtype(prng_key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(prng_key)
    return prng_key


def state_specs(model: Any, learner: Learner) -> TrainerState:
    """Returns the state with a ParameterSpec, without initializer, for each array."""
    params = model.create_parameter_specs_recursively()
    key = jax.eval_shape(lambda: key_data(0))
    state = TrainerState(
        step=ParameterSpec((), (), dtype="int32", trainable=False),
        prng_key=ParameterSpec(key.shape, (None,) * key.ndim, dtype="uint32", trainable=False),
        model=params,
        learner=learner.state_specs(),
    )
    bare = lambda spec: dataclasses.replace(spec, initializer=None)
    return jax.tree.map(bare, state, is_leaf=is_spec)


def state_shardings(specs: TrainerState, learner: Learner, mesh: jax.sharding.Mesh) -> TrainerState:
    """Returns the NamedSharding of each array of the state between steps.

    Raises:
        ValueError: If a dimension does not divide over the mesh, or the learner requires a memory
            that the devices cannot address.
    """
    found = sharding.named_shardings(specs, mesh)
    return found._replace(learner=learner.state_shardings(specs.learner, found.learner))


def init_state(
    model: Any, learner: Learner, prng_key: jax.Array | int, shardings: Any
) -> TrainerState:
    """Returns the state before the first step, initialized as shards.

    The values do not depend on the mesh, except for rounding in the last bit. To be called inside
    `jax.set_mesh`. `shardings` is a TrainerState of Shardings; with None, one device holds all.
    """

    def init(data: jax.Array) -> TrainerState:
        init_key, train_key = jax.random.split(jax.random.wrap_key_data(data))
        params = model.initialize_parameters_recursively(init_key)
        step = jnp.zeros((), jnp.int32)
        return TrainerState(step, jax.random.key_data(train_key), params, learner.init(params))

    leaves = jax.tree.leaves(shardings)
    device = next(iter(leaves[0].device_set)) if leaves else jax.devices()[0]
    options = _ON_CPU if device.platform == "cpu" else {}
    return jax.jit(init, out_shardings=shardings, compiler_options=options)(key_data(prng_key))


def restart_learner(state: TrainerState, learner: Learner) -> TrainerState:
    """Returns the state with that of the learner before the first step from its parameters.

    The arrays of the learner's state are deleted first: two do not fit into memory.
    """
    shardings = jax.tree.map(lambda x: x.sharding, state.learner)
    jax.tree.map(lambda x: x.delete(), state.learner)
    return state._replace(learner=jax.jit(learner.init, out_shardings=shardings)(state.model))


def with_learner(state: TrainerState, learner: Learner, shardings: Any) -> TrainerState:
    """Returns the state with that of a learner which updates other parameters.

    Arrays that both learners have are kept, in the dtype of the new one; the others have their
    initial values, which a warning says. Schedules go on at the steps taken.
    """
    initial = jax.jit(learner.init, out_shardings=shardings)(state.model)
    is_scheduled = lambda x: isinstance(x, _SCHEDULED)
    rates = [path for path, x in tree.flatten_items(initial, is_scheduled) if is_scheduled(x)]
    # An array for each, as a step donates them.
    old = {f"{path}/count": state.step - state.learner.skipped_steps for path in rates}
    old |= tree.by_path(tree.to_nested(state.learner))
    begun: list[str] = []

    def kept(path: str, new: jax.Array) -> jax.Array:
        found = old.get(path)
        if found is None or found.shape != new.shape:
            begun.append(path)
            return new
        return jax.device_put(found.astype(new.dtype), new.sharding)

    nested = tree.map_by_path(kept, tree.to_nested(initial))
    if begun:
        logger.warning(
            "%d of %d arrays of the learner's state have initial values, such as %s.",
            *(len(begun), len(tree.by_path(nested)), begun[0]),
        )
    return state._replace(learner=tree.from_nested(nested, initial))


def batch_sharding(
    global_batch_size: int, seq_len: int, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    """Returns the sharding of a batch's arrays [B, S], over batch axes and sequence axes.

    Raises:
        SplitError: If the axes of the mesh do not divide the batch or the sequence.
    """
    split = sharding.partition_spec(
        ("batch", "sequence"),
        dict(mesh.shape),
        shape=(global_batch_size, seq_len),
        array=f"the batch [global_batch_size {global_batch_size}, seq_len {seq_len}]",
    )
    return jax.sharding.NamedSharding(mesh, split)


def updated(fixed: Nested, updates: Nested, trained: Nested, learner: Learner) -> Nested:
    """Returns the parameters that are not trained, with the state updates of layers.

    Raises:
        UserError: If a layer updates a parameter that is trained or does not exist, or with values
            of another shape, or with floats where it has integers.
    """
    known, new = tree.by_path(fixed), tree.by_path(updates)
    for path in sorted(new.keys() - known.keys()):
        reason = f"no parameter; {did_you_mean(path, known)}"
        if path in tree.by_path(trained):
            reason = "trained; give it trainable=False, or name it in `fixed`."
        raise UserError(f"add_state_update or Updated for {path!r}, which is {reason}")
    if (difference := tree.mismatch(new, {path: known[path] for path in new})) is not None:
        raise UserError(f"add_state_update or Updated: {difference}; keep shapes and dtypes.")
    return tree.map_by_path(
        lambda path, old: (
            jnp.asarray(new[path], old.dtype)
            if path in new and not learner.is_frozen(path)
            else old
        ),
        fixed,
    )
