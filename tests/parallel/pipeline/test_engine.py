"""The engine runs every schedule to the gradients of a model without a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, mesh_shape_from_axes
from moelib.parallel.pipeline.engine import Functions, Layout, run_pipeline
from moelib.parallel.pipeline.schedule import Schedule

M, D, V = 8, 4, 10  # Micro-batches, width, vocabulary.


def layer(weight, bias, x):
    """Returns (output, auxiliary loss, the bias after this micro-batch)."""
    y = x + jnp.tanh(x @ weight) + bias
    return y, 0.1 * jnp.mean(y**2), bias + 1e-2 * jax.lax.stop_gradient(jnp.mean(y))


def first(outer, count, constants, micro):
    """Weighs the input by the number of micro-batches so far."""
    x = outer["table"][micro["ids"]] * constants / (1 + count)
    return (x, 0.01 * jnp.sum(outer["table"] ** 2)), (jnp.sum(micro["ids"]), count + 1)


def stage(params, x, fixed, constants, micro, layers):
    def each(carry, given):
        (x, total), (weight, bias, number) = carry, given
        run = lambda: layer(weight, bias, x)
        y, loss, after = jax.lax.cond(number >= 0, run, lambda: (x, jnp.zeros(()), bias))
        return (y, total + loss), (loss, after)

    return jax.lax.scan(each, (x, jnp.zeros(())), (params, fixed, layers))


def last(outer, x, count, constants, micro):
    """Weighs the loss by the number of micro-batches so far."""
    logits = jax.nn.log_softmax(x @ outer["head"])
    loss = -jnp.sum(jnp.take_along_axis(logits, micro["labels"][:, None], 1))
    loss *= 1 + count
    return loss, (loss, count + 1)


def without_pipeline(outer, weights, constants, microbatches):
    total, biases, losses, count = 0.0, jnp.zeros(len(weights)), [], jnp.zeros(())
    for m in range(M):
        micro = jax.tree.map(lambda a, m=m: a[m], microbatches)
        (x, loss), _ = first(outer, m, constants, micro)
        total, new = total + loss, []
        for weight, bias in zip(weights, biases, strict=True):
            x, loss, after = layer(weight, bias, x)
            total += loss
            new.append(after)
        biases = jnp.stack(new)
        loss, (_, count) = last(outer, x, count, constants, micro)
        losses.append(loss)
    return total + sum(losses), (biases, jnp.stack(losses))


FAST = [(Schedule.DUALPIPE_V, 2, False)]
ALL = [(schedule, 4, uniform) for schedule in Schedule for uniform in (False, True)]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "uniform"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)],
)
def test_gradients_and_outputs_equal_those_without_a_pipeline(schedule, num_ranks, uniform):
    stages = num_ranks * schedule.num_chunks
    sizes = (1,) * (stages - 1) + (2,)
    layout = Layout(schedule, num_ranks, sizes)
    keys = jax.random.split(jax.random.key(0), 5)
    weights = 0.3 * jax.random.normal(keys[0], (sum(sizes), D, D))
    outer = {
        "table": jax.random.normal(keys[1], (V, D)),
        "head": jax.random.normal(keys[2], (D, V)),
    }
    microbatches = {
        "ids": jax.random.randint(keys[3], (M, 4), 0, V),
        "labels": jax.random.randint(keys[4], (M, 4), 0, V),
    }
    constants = jnp.float32(1.5)
    grad = jax.jit(jax.grad(without_pipeline, argnums=(0, 1), has_aux=True))
    (of_outer, of_weights), (biases, losses) = grad(outer, weights, constants, microbatches)
    rows = np.array(layout.rows)
    place = lambda a: a[np.maximum(rows, 0)]
    order = np.argsort(rows.ravel())[-len(weights) :]
    back = lambda a: np.asarray(a).reshape(-1, *a.shape[2:])[order]
    axes = mesh_shape_from_axes(pipeline=num_ranks)
    mesh = create_device_mesh(axes, MESH_AXIS_NAMES, jax.devices()[:num_ranks])
    run = jax.jit(
        lambda *args: run_pipeline(Functions(first, stage, last), layout, *args, uniform=uniform)
    )
    with jax.set_mesh(mesh):
        parts = place(weights), place(biases * 0)
        done = run(*parts, outer, jnp.zeros(()), jnp.zeros(()), constants, microbatches)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    close(back(done.params), of_weights)
    jax.tree.map(close, done.outer, of_outer)
    close(back(done.fixed), biases)
    close(done.last, losses)
    assert done.beginning == done.ending == M
    np.testing.assert_array_equal(done.first, jnp.sum(microbatches["ids"], 1))


def test_stages_lie_where_the_schedule_wants_them():
    assert Layout(Schedule.ONE_F_ONE_B, 2, (1, 2)).rows == [[0, -1], [1, 2]]
    assert Layout(Schedule.ZB_V, 2, (1, 1, 1, 1)).rows == [[0], [3], [1], [2]]
    assert Layout(Schedule.INTERLEAVED, 2, (1, 1, 1, 1)).rows == [[0], [2], [1], [3]]
