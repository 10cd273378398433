import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec, flash_attention, xla
from moelib.kernels.flash_attention.reference import attention, whole_sequences


def _temporary_bytes(seq_len, window):
    shape = jax.ShapeDtypeStruct((1, seq_len, 1, 8), jnp.float32)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0, window=window), backend="xla")
    compiled = jax.jit(jax.grad(lambda q, k, v: jnp.sum(run(q, k, v)), (0, 1, 2)))
    return compiled.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("window", [None, 100])
def test_memory_is_linear_in_the_sequence(window):
    assert _temporary_bytes(2048, window) < 2.4 * _temporary_bytes(1024, window)


def test_scores_are_recomputed_after_the_gradient_has_arrived():
    shape = jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.float32)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0), backend="xla")

    def temporary_bytes(num_layers):
        def loss(x):
            for _ in range(num_layers):
                x = x + run(x, x, x)
            return jnp.sum(x * x)

        compiled = jax.jit(jax.grad(loss)).lower(shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A layer holds its input and its output in two layouts; the scores of a block are as much.
    assert temporary_bytes(4) - temporary_bytes(2) < 2 * 6 * 4 * shape.size


@pytest.mark.parametrize("window", [None, 100])
def test_a_remat_policy_that_saves_matmuls_saves_no_scores(window):
    shape = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0, window=window), backend="xla")
    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable)
    residuals = jax.eval_shape(lambda *args: jax.vjp(kept, *args)[1], shape, shape, shape)
    assert {x.size for x in jax.tree.leaves(residuals)} == {shape.size}


def _matmul_flops(jaxpr):
    """Returns the FLOPs of all matmuls, those in loops as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _), lhs = eqn.params["dimension_numbers"], eqn.invars[0].aval
            inner = np.prod([lhs.shape[axis] for axis in contracted])
            total += 2 * inner * np.prod(eqn.outvars[0].aval.shape)
        times = 1
        if eqn.primitive.name == "while":  # Its condition: the iteration is below their number.
            times = int(eqn.params["cond_jaxpr"].eqns[0].invars[1].val)
        for param in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(param, "jaxpr", param)  # A closed one holds an open one.
            total += times * _matmul_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def _flops(seq_len, window):
    shape = jax.ShapeDtypeStruct((1, seq_len, 1, 8), jnp.float32)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0, window=window), backend="xla")
    grad = jax.grad(lambda q, k, v: jnp.sum(run(q, k, v)), (0, 1, 2))
    return _matmul_flops(jax.make_jaxpr(grad)(shape, shape, shape).jaxpr)


def test_with_a_window_only_the_keys_around_it_are_computed():
    # 64 queries meet 163 keys, in 7 matmuls: 2 forward and 5 backward.
    assert _flops(1024, 100) == 7 * 2 * 8 * 1024 * 163
    assert _flops(4096, 100) == 4 * _flops(1024, 100)
    assert _flops(1024, 100) < 0.3 * _flops(1024, None)


@pytest.mark.parametrize("block", [1, 5, 16, 64])
@pytest.mark.parametrize("window", [None, 4])
def test_the_size_of_a_block_changes_no_value(block, window, monkeypatch):
    monkeypatch.setattr(xla, "_BLOCK", block)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 4)), jnp.float32) for _ in range(3))
    spec = MaskSpec(0.5, window=window)
    run = functools.partial(xla.forward, spec=spec, in_order=True)
    got, _ = jax.jit(lambda q, k, v: run(q, k, v, None, whole_sequences(16, None)))(q, k, v)
    want = attention(q, k, v, None, None, spec=spec)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
