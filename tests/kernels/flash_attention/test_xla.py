import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec, flash_attention, xla
from moelib.kernels.flash_attention.reference import whole_sequences
from tests.oracles.attention import attention


def _gradients(window):
    run = functools.partial(flash_attention, spec=MaskSpec(1.0, window=window), backend="xla")
    return jax.grad(lambda q, k, v: jnp.sum(run(q, k, v)), (0, 1, 2))


def _shapes(seq_len):
    return [jax.ShapeDtypeStruct((1, seq_len, 1, 8), jnp.float32)] * 3


def _temporary_bytes(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("window", [None, 100])
def test_memory_is_linear_in_the_sequence(window):
    short, long = (_temporary_bytes(_gradients(window), *_shapes(n)) for n in (1024, 2048))
    assert long < 2.4 * short


def test_scores_are_recomputed_after_the_gradient_has_arrived():
    shape = jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.float32)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0), backend="xla")

    def loss(x, num_layers):
        for _ in range(num_layers):
            x = x + run(x, x, x)
        return jnp.sum(x * x)

    two, four = (
        _temporary_bytes(jax.grad(functools.partial(loss, num_layers=n)), shape) for n in (2, 4)
    )
    # A layer holds its input and its output in two layouts; the scores of a block are as much.
    assert four - two < 2 * 6 * 4 * shape.size


@pytest.mark.parametrize("window", [None, 100])
def test_a_remat_policy_that_saves_matmuls_saves_no_scores(window):
    shapes = _shapes(2048)
    run = functools.partial(flash_attention, spec=MaskSpec(1.0, window=window), backend="xla")
    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable)
    residuals = jax.eval_shape(lambda *args: jax.vjp(kept, *args)[1], *shapes)
    assert {x.size for x in jax.tree.leaves(residuals)} == {shapes[0].size}


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
    return _matmul_flops(jax.make_jaxpr(_gradients(window))(*_shapes(seq_len)).jaxpr)


def test_with_a_window_only_the_keys_around_it_are_computed():
    # 64 queries meet 163 keys, in 7 matmuls: 2 forward and 5 backward.
    assert _flops(1024, 100) == 7 * 2 * 8 * 1024 * 163
    assert _flops(4096, 100) == 4 * _flops(1024, 100)
    assert _flops(1024, 100) < 0.3 * _flops(1024, None)


@pytest.mark.parametrize(("block", "window"), [(1, None), (5, 4), (16, 4), (64, None)])
def test_the_size_of_a_block_changes_no_value(block, window, monkeypatch):
    monkeypatch.setattr(xla, "_BLOCK", block)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 16, 2, 4)).astype(np.float32) for _ in range(3))
    spec = MaskSpec(0.5, window=window)
    run = functools.partial(xla.forward, spec=spec, in_order=True)
    got, _ = jax.jit(lambda q, k, v: run(q, k, v, None, whole_sequences(16, None)))(q, k, v)
    want = attention(q, k, v, scale=0.5, window=window)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
