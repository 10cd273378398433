"""A small state that has all that a trainer's has, its checkpoints, and ways to damage one."""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import RunRecord


class Empty(NamedTuple):
    """As Optax has them."""


def make_state(scale=1):
    w = scale * jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    return {
        "step": jnp.int32(scale),
        "model": {"w": w, "b": jnp.ones(3, jnp.bfloat16)},
        "learner": (Empty(), [w + 1], None),
    }


def target_of(state, num_devices=8):
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])

    def target(x):
        spec = PartitionSpec("data") if x.shape == (8, 8) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(target, state)


def make(directory, **settings):
    return (
        Checkpointer.default_config().set(dir=str(directory), **settings).instantiate(parent=None)
    )


def save(checkpointer, step, state=None, **record):
    state = make_state(step) if state is None else state
    checkpointer.save(state, RunRecord(step=step, **record))
    checkpointer.wait()


def truncate_arrays(path):
    for folder, _, names in os.walk(os.path.join(path, "state")):
        for name in names:
            if folder.endswith(os.sep + "d"):
                os.truncate(os.path.join(folder, name), 10)


def remove_record(path):
    os.remove(os.path.join(path, "record", "metadata"))


def tear_record(path):
    os.truncate(os.path.join(path, "record", "metadata"), 10)


def remove_state(path):
    for folder, _, names in os.walk(os.path.join(path, "state")):
        for name in names:
            os.remove(os.path.join(folder, name))


DAMAGES = [truncate_arrays, tear_record, remove_state]
