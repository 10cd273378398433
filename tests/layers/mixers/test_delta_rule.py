"""The delta rule: token by token against NumPy, and by chunks against token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.mixers.delta_rule import Tokens, chunked, delta_rule, sequential
from moelib.layers.mixers.documents import documents_of
from moelib.parallel.sharding import SplitError
from tests import tiny
from tests.layers.calling import normal
from tests.oracles import delta_rule as oracle

B, H, K, V = 2, 3, 16, 6


def segments(length):
    """Returns documents of 1 to 40 tokens, with padding within and at the end of the second row."""
    rng = np.random.default_rng(length)
    begins = rng.random((B, length)) < 0.08
    ids = 1 + np.cumsum(begins, axis=1)
    ids[1, 30:33] = ids[1, max(length - 5, 1) :] = 0
    return ids.astype(np.int32)


def inputs(length, num_decays=1, *, decay=1.0, packed=True, batch=B):
    """Returns the arguments of the rule, with a state before the first token, and the segments."""
    rng = np.random.default_rng(length)
    q, k = (normal(batch, length, H, K, seed=seed) for seed in (1, 2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay = -decay * rng.exponential(size=(batch, length, H, num_decays))
    beta = rng.random((batch, length, H))
    ids = segments(length) if packed else np.ones((batch, length), np.int32)
    documents = documents_of(jnp.asarray(ids), ids.shape)
    valid = ids[..., None] > 0
    floats = (
        *(q, k, normal(batch, length, H, V, seed=3)),
        *(np.where(valid[..., None], log_decay, 0), np.where(valid, beta, 0)),
    )
    state = normal(batch, H, K, V, seed=4)
    return [jnp.asarray(x, jnp.float32) for x in floats], documents.number, jnp.asarray(state), ids


@functools.partial(jax.jit, static_argnums=0)
def differentiated(rule, floats, documents, state):
    """Returns (outputs, state after the last token) and all gradients of a scalar of both."""

    def loss(floats, state):
        out, after = rule(Tokens(*floats, documents=documents), state)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(after)), (out, after)

    grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(floats, state)
    return results, grads


@pytest.mark.parametrize("num_decays", [1, K])
@pytest.mark.parametrize("length", [1, 65])
def test_token_by_token_equals_a_loop_in_float64(length, num_decays):
    floats, documents, state, ids = inputs(length, num_decays)
    out, after = jax.jit(sequential)(Tokens(*floats, documents=documents), state)
    want, want_after = oracle.delta_rule(*floats, segment_ids=ids, state=state)
    np.testing.assert_allclose(np.where(ids[..., None, None] > 0, out, 0), want, atol=2e-6)
    np.testing.assert_allclose(after, want_after, atol=2e-6)


# With decays of 20 per token, differences of their sums over a chunk have errors above 1e-5.
@pytest.mark.parametrize(
    ("length", "num_decays", "decay"),
    [(1, 1, 1.0), (63, K, 1.0), (64, 1, 0.01), (65, K, 20.0), (200, 1, 20.0), (200, K, 0.01)],
)
def test_chunks_equal_token_by_token(length, num_decays, decay):
    arguments = inputs(length, num_decays, decay=decay)[:3]
    got, want = (differentiated(rule, *arguments) for rule in (chunked, sequential))
    tiny.assert_trees_close(got, want)


@pytest.mark.parametrize(("length", "num_decays"), [(1, 1), (65, K), (200, 1)])
def test_the_recurrence_without_correction(length, num_decays):
    floats, documents, state, ids = inputs(length, num_decays)
    plain = [functools.partial(rule, corrected=False) for rule in (chunked, sequential)]
    got, want = (differentiated(rule, floats, documents, state) for rule in plain)
    tiny.assert_trees_close(got, want)
    (out, after), _ = want
    oracle_out, oracle_after = oracle.delta_rule(
        *floats, segment_ids=ids, state=state, corrected=False
    )
    np.testing.assert_allclose(np.where(ids[..., None, None] > 0, out, 0), oracle_out, atol=5e-6)
    np.testing.assert_allclose(after, oracle_after, atol=5e-6)


@pytest.mark.slow
def test_groups_of_chunks_equal_token_by_token():
    arguments = inputs(1500)[:3]  # 24 chunks in 2 groups.
    got, want = (differentiated(rule, *arguments) for rule in (chunked, sequential))
    tiny.assert_trees_close(got, want)


def test_equal_keys_without_decay_are_inverted_exactly():
    floats, documents, state, ids = inputs(128, packed=False)
    q, k, v, log_decay, beta = floats
    k = jnp.broadcast_to(k[:, :1], k.shape)  # Each write replaces the one before it.
    arguments = q, k, v, 0 * log_decay, jnp.ones_like(beta)
    out, after = jax.jit(chunked)(Tokens(*arguments, documents=documents), state)
    want, want_after = oracle.delta_rule(*arguments, segment_ids=ids, state=state)
    np.testing.assert_allclose(out, want, atol=5e-6)
    np.testing.assert_allclose(after, want_after, atol=5e-6)


MESHES = [
    *({"data": 4, "model": 2}, {"fsdp": 2}, {"model": 4}),
    *({"seq": 4}, {"data": 2, "seq": 2, "model": 2}),
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_gives_the_numbers_of_one_device(axes):
    floats, documents, state, _ = inputs(70, packed=False, batch=4)
    wide = lambda x: jnp.concatenate([x, x[:, :, :1]], axis=2)  # 4 heads.
    floats, state = [wide(x) for x in floats], jnp.concatenate([state, state[:, :1]], axis=1)
    want = differentiated(sequential, floats, documents, state)
    with jax.set_mesh(tiny.mesh(**axes)):
        got = differentiated(delta_rule, floats, documents, state)
    tiny.assert_trees_close(got, want)


def test_heads_that_the_mesh_does_not_divide_are_refused():
    floats, documents, state, _ = inputs(64, packed=False)
    with jax.set_mesh(tiny.mesh(seq=2)), pytest.raises(SplitError, match=r"size 3 is not.*seq=2"):
        jax.eval_shape(delta_rule, Tokens(*floats, documents=documents), state)


def test_documents_are_numbered_and_padding_belongs_to_the_one_before():
    ids = jnp.asarray([[0, 3, 3, 0, 3, 7, 0, 2], [1, 0, 0, 2, 2, 1, 0, 0]], jnp.int32)
    found = documents_of(ids, ids.shape)
    np.testing.assert_array_equal(
        found.number, [[0, 0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 2, 2, 2]]
    )
    np.testing.assert_array_equal(found.valid, ids > 0)
    np.testing.assert_array_equal(found.num_tokens, [8, 6])
