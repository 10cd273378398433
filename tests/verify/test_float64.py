"""Float32 programs are computed in float64, with what their derivatives would be left out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moelib.verify.float64 import in_float64


@jax.custom_vjp
def wrong_backward(x):
    return x * x


wrong_backward.defvjp(lambda x: (x * x, x), lambda x, grad: (0 * grad,))


def program(x, count):
    """Uses loops, branches, casts, scatters and random bits."""
    key = jax.random.key(0)
    x = wrong_backward(x).astype(jnp.float32) + jax.random.uniform(key, x.shape)
    total, parts = lax.scan(lambda carry, y: (carry + jnp.sin(y), carry), jnp.zeros(()), x)
    total = lax.fori_loop(0, count, lambda _, y: y / 3, total)
    total = lax.cond(count > 1, lambda y: y + 1, lambda y: y, total)
    return total, parts.at[jnp.array([0, 0])].add(lax.stop_gradient(x[:2])), jnp.argmax(x)


def test_a_program_is_computed_in_float64():
    x = np.linspace(0.1, 2, 5).astype(np.float32)
    want = jax.jit(program)(x, 2)
    run = in_float64(program, x, 2)
    with jax.enable_x64(True):
        got, margins = run(np.float64(x), np.int32(2))
        step = 1e-7
        moved, _ = run(np.float64(x) + step, np.int32(2))
        back, _ = run(np.float64(x) - step, np.int32(2))
    assert margins == {}
    assert [leaf.dtype for leaf in got] == [np.float64, np.float64, np.int32]
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert abs(float(moved[0] - back[0])) / (2 * step) > 0.1  # Not the wrong gradient.


def test_float64_has_more_digits():
    run = in_float64(lambda x: (x + 1e8) - 1e8, np.float32(1.25))
    with jax.enable_x64(True):
        assert float(run(np.float64(1.25))[0]) == 1.25


def test_the_margin_of_a_choice_is_known_by_scope():
    """The last entry that is chosen and the next one: 3 and 2.5, and 8 and 8 - 1e-9."""

    def route(x):
        with jax.named_scope("router"):
            return jax.checkpoint(lambda x: lax.top_k(x, 2)[1])(x)

    x = np.array([[1, 4, 3, 2.5], [9, 8, 0, 0]], np.float32)
    run = in_float64(route, x)
    moved = np.float64(x)
    moved[1, 2] = 8 - 1e-9
    with jax.enable_x64(True):
        (_, wide), (_, close) = run(np.float64(x)), run(moved)
        assert list(wide) == ["router"]
        assert float(wide["router"]) == 0.125
    np.testing.assert_allclose(close["router"], 1e-9 / 9, rtol=1e-6)
