import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.learner import schedules
from tests.oracles.schedules import megatron_lr

# Iterations of the seven FLAME-MoE models.
FLAME_ITERS = (2121, 2424, 4165, 5473, 5685, 8815, 11029)


def all_steps(schedule, num_steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(1, num_steps + 1, dtype=np.int32)))


@pytest.mark.parametrize("iters", FLAME_ITERS)
def test_flame_recipe_equals_that_of_megatron(iters):
    schedule = schedules.wsd(
        3e-4,
        max_step=iters,
        warmup_steps=0.01 * iters,
        decay_steps=iters // 10,
        end_lr=3e-5,
        decay="exponential",
    )
    batch = 1024  # Megatron counts in samples.
    expected = [
        megatron_lr(
            step * batch,
            style="WSD",
            max_lr=3e-4,
            min_lr=3e-5,
            warmup=0.01 * iters * batch,
            decay=iters * batch,
            wsd_decay=iters // 10 * batch,
            wsd_style="exponential",
        )
        for step in range(1, iters + 1)
    ]
    got = all_steps(schedule, iters)
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    assert got[-1] == np.float32(3e-5)


LIKE_MEGATRON = {
    **{
        decay: (
            schedules.wsd(
                2.0, max_step=100, warmup_steps=10, decay_steps=30, end_lr=0.5, decay=decay
            ),
            {"style": "WSD", "wsd_decay": 30, "wsd_style": decay},
        )
        for decay in ("linear", "cosine", "exponential", "minus_sqrt")
    },
    "linear alone": (
        schedules.linear(2.0, max_step=100, warmup_steps=10, end_lr=0.5),
        {"style": "linear"},
    ),
    "cosine alone": (
        schedules.cosine(2.0, max_step=100, warmup_steps=10, end_lr=0.5),
        {"style": "cosine"},
    ),
}


@pytest.mark.parametrize(("schedule", "fields"), LIKE_MEGATRON.values(), ids=LIKE_MEGATRON)
def test_schedules_equal_those_of_megatron(schedule, fields):
    fields = {"max_lr": 2.0, "min_lr": 0.5, "warmup": 10, "decay": 100, **fields}
    expected = [megatron_lr(step, **fields) for step in range(1, 201)]
    np.testing.assert_allclose(all_steps(schedule, 200), expected, rtol=1e-6)


def test_schedule_without_warmup_starts_at_the_peak():
    assert float(schedules.wsd(3.0, max_step=10, decay_steps=2)(1)) == 3.0
    assert float(schedules.constant(3.0)(1)) == 3.0


def test_a_constant_rate_may_have_a_warmup():
    schedule = schedules.constant(3.0, warmup_steps=4)
    assert [float(schedule(step)) for step in range(1, 6)] == [0.75, 1.5, 2.25, 3.0, 3.0]


def test_decay_of_the_whole_run():
    got = all_steps(schedules.wsd(1.0, max_step=4, decay_steps=4), 5)
    np.testing.assert_allclose(got, [0.75, 0.5, 0.25, 0, 0])


def test_step_may_be_traced_and_gives_float32():
    out = jax.jit(schedules.cosine(1.0, max_step=10))(jnp.int32(5))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


def test_number_is_a_schedule():
    assert float(schedules.as_schedule(0.25)(7)) == 0.25
