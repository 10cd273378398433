"""What a training run carries from step to step, where its arrays lie, and how it begins."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moelib.core.param import ParameterSpec, is_spec
from moelib.core.tree import Nested
from moelib.learner.learner import Learner
from moelib.parallel import sharding

# Above it LLVM takes 50 s in place of 4 for the random numbers of a few layers, for no faster code.
_ON_CPU = {"xla_backend_optimization_level": 1}


class TrainerState(NamedTuple):
    """The state of a run after `step` steps.

    Attributes:
        step: int32 scalar, the number of steps taken.
        prng_key: uint32 key data; a step's keys derive from it and the step's number.
        model: The model's parameters, those that are not trained included.
        learner: The learner's state.
    """

    step: Any
    prng_key: Any
    model: Nested
    learner: Any


def key_data(prng_key: jax.Array | int) -> jax.Array:
    """Returns the uint32 data of a key, made from a seed, by `jax.random.key` or `PRNGKey`."""
    if isinstance(prng_key, int):
        prng_key = jax.random.key(prng_key)
    if jnp.issubdtype(prng_key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(prng_key)
    return prng_key


def state_specs(model: Any, learner: Learner) -> TrainerState:
    """Returns the state with a ParameterSpec, stripped of its initializer, in place of each array.

    Args:
        model: A module with `create_parameter_specs_recursively()`.
        learner: Built for those specs.
    """
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
    """Returns where each array of the state lies between steps, a NamedSharding for each.

    Raises:
        ValueError: If a dimension does not divide over the mesh, or the learner asks for a memory
            that the mesh's devices do not reach.
    """
    places = sharding.named_shardings(specs, mesh)
    return places._replace(learner=learner.state_shardings(specs.learner, places.learner))


def abstract_state(specs: Any, shardings: Any) -> Any:
    """Returns a `jax.ShapeDtypeStruct` with its sharding for each spec."""
    return jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=place),
        specs,
        shardings,
        is_leaf=is_spec,
    )


def init_state(
    model: Any, learner: Learner, prng_key: jax.Array | int, shardings: Any
) -> TrainerState:
    """Returns the state before the first step; no array is ever whole on one device.

    The values do not depend on the mesh, but for rounding in the last bit. To be called inside
    `jax.set_mesh`.

    Args:
        model: A module with `initialize_parameters_recursively(prng_key)`.
        learner: Built for the model's specs.
        prng_key: Key or seed of the run.
        shardings: TrainerState of a Sharding for each array; None for one device.
    """

    def init(data: jax.Array) -> TrainerState:
        init_key, train_key = jax.random.split(jax.random.wrap_key_data(data))
        params = model.initialize_parameters_recursively(init_key)
        step = jnp.zeros((), jnp.int32)
        return TrainerState(step, jax.random.key_data(train_key), params, learner.init(params))

    places = jax.tree.leaves(shardings)
    device = next(iter(places[0].device_set)) if places else jax.devices()[0]
    options = _ON_CPU if device.platform == "cpu" else {}
    return jax.jit(init, out_shardings=shardings, compiler_options=options)(key_data(prng_key))


def batch_sharding(
    global_batch_size: int, seq_len: int, mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    """Returns where a batch's [B, S] arrays lie: rows over the batch axes, then sequence.

    Raises:
        ValueError: If the axes of the mesh do not divide the rows or the sequence.
    """
    split = sharding.partition_spec(
        ("batch", "sequence"),
        dict(mesh.shape),
        shape=(global_batch_size, seq_len),
        array=f"the batch [global_batch_size {global_batch_size}, seq_len {seq_len}]",
    )
    return jax.sharding.NamedSharding(mesh, split)
