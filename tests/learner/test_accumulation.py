import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moelib.core import metrics
from moelib.learner.accumulation import accumulate, split_batch

RNG = np.random.default_rng(0)
NORMAL = {
    name: RNG.standard_normal(shape, np.float32)
    for name, shape in {"w": (5, 3), "b": (3,), "x": (8, 6, 5), "y": (8, 6, 3)}.items()
}
PARAMS = {name: NORMAL[name] for name in ("w", "b")}
MASK = np.arange(6)[None] < RNG.integers(1, 7, (8, 1))


def make_batch(empty_rows=0):
    mask = MASK & (np.arange(8)[:, None] >= empty_rows)
    return {"x": NORMAL["x"], "y": NORMAL["y"], "mask": mask}


def step(batch, state, sums):
    """Mean squared error over the tokens that are not padding."""

    def objective(params):
        out = jnp.tanh(batch["x"] @ params["w"] + params["b"][None, None])
        error = jnp.sum(jnp.square(out - batch["y"]), -1)
        weight = jnp.sum(batch["mask"])
        return jnp.sum(error * batch["mask"]) / jnp.maximum(weight, 1), weight

    (loss, weight), gradients = jax.value_and_grad(objective, has_aux=True)(PARAMS)
    logged = {
        "layer": {"loss": metrics.weighted(loss, weight)},
        "rows": metrics.weighted(1.0, batch["x"].shape[0]),
        "largest": metrics.maximum(jnp.max(batch["x"]) - 100),
    }
    return loss, weight, gradients, logged, jax.tree.map(lambda x: x + 1, state)


@pytest.mark.parametrize(("num_microbatches", "empty_rows"), [(2, 0), (8, 3)])
def test_equals_the_whole_batch(num_microbatches, empty_rows):
    batch = make_batch(empty_rows=empty_rows)
    whole, parts = (
        jax.jit(functools.partial(accumulate, step, num_microbatches=number))(
            batch, state={"calls": jnp.int32(0)}
        )
        for number in (1, num_microbatches)
    )
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    jax.tree.map(same, whole._replace(state=None), parts._replace(state=None))
    assert int(whole.state["calls"]) == 1
    assert int(parts.state["calls"]) == num_microbatches


def test_batch_without_tokens_gives_zeros():
    out = accumulate(step, make_batch(empty_rows=8), num_microbatches=2)
    assert float(out.weight) == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(out.gradients))
    assert float(out.objective) == 0.0


def test_low_precision_gradients_are_summed_in_float32():
    def tiny(batch, state, sums):
        weight = jnp.float32(batch.shape[0])
        mean = jnp.mean(batch)
        return mean, weight, {"w": mean.astype(jnp.bfloat16)}, {}, state

    batch = jnp.asarray([1.0, 1 / 256, 1 / 256, 1 / 256])  # 1 + 1/256 is 1 in bfloat16.
    out = accumulate(tiny, batch, num_microbatches=4)
    assert out.gradients["w"].dtype == jnp.float32
    np.testing.assert_allclose(out.gradients["w"], (1 + 3 / 256) / 4)


def test_state_goes_from_microbatch_to_microbatch():
    def record(batch, state, sums):
        return batch[0], 1.0, {}, {}, 10 * state + batch[0].astype(jnp.int32)

    out = accumulate(record, jnp.arange(1.0, 4.0), num_microbatches=3, state=jnp.int32(0))
    assert int(out.state) == 123


def test_a_step_is_traced_once():
    traced = []

    def record(batch, state, sums):
        traced.append(batch)
        return step(batch, state, sums)

    parts = functools.partial(accumulate, record, num_microbatches=4)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    batch = make_batch()
    with jax.set_mesh(mesh):
        jax.jit(parts).trace(batch, state={"calls": jnp.int32(0)})
    assert len(traced) == 1


def test_sequences_are_dealt_out():
    out = split_batch({"ids": jnp.arange(8)}, 2)["ids"]
    np.testing.assert_array_equal(out, [[0, 2, 4, 6], [1, 3, 5, 7]])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_sequence_moves_between_devices(axis_type):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(axis_type,))
    rows = np.arange(16 * 3).reshape(16, 3)
    batch = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))
    split = jax.jit(lambda x: split_batch(x, 4)).lower(batch).compile()
    assert tuple(split.output_shardings.spec)[:2] == (None, "data")
    text = split.as_text()
    for collective in ("all-to-all", "all-gather", "collective-permute", "all-reduce"):
        assert collective not in text
    for shard in split(batch).addressable_shards:
        device = shard.index[1].start
        own = rows[4 * device : 4 * device + 4]
        np.testing.assert_array_equal(np.sort(np.asarray(shard.data).ravel()), own.ravel())
