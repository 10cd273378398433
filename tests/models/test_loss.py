"""The loss of a language model against float64, without a mesh and on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.models.loss import language_model_loss, token_log_probs
from moelib.parallel.sharding import sharding_rules
from tests import tiny
from tests.layers.calling import normal
from tests.oracles.losses import cross_entropy

B, S, D, V = 8, 4, 6, 10
HIDDEN, HEAD = jnp.asarray(normal(B, S, D)), jnp.asarray(normal(D, V, seed=1))
WEIGHTS = normal(B, S, seed=3)
LABELS = jnp.asarray(np.random.default_rng(2).integers(-3, V, (B, S)), jnp.int32)


@pytest.mark.parametrize(("z_loss", "tied"), [(0.0, False), (0.5, True)])
def test_sums_are_over_the_tokens_that_count(z_loss, tied):
    head = HEAD.T if tied else HEAD
    got = language_model_loss(HIDDEN, head, LABELS, tied=tied, z_loss=z_loss)
    (loss, (nll, _)), _ = cross_entropy(HIDDEN.reshape(-1, D), HEAD, LABELS.ravel(), z_loss)
    np.testing.assert_allclose(got[:3], (loss, nll.sum(), (LABELS >= 0).sum()), rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"data": 2, "seq": 2, "model": 2}, {}),
        # The head may be split over an axis that splits no tokens.
        ({"fsdp": 4, "model": 2}, {"embed": ("model",), "vocab": ()}),
        *(
            pytest.param(axes, {}, marks=pytest.mark.slow)
            for axes in ({"data": 8}, {"model": 2}, {"fsdp": 2, "model": 2})
        ),
    ],
    ids=str,
)
def test_every_mesh_gives_the_sums_and_gradients_of_one_device(axes, rules, tied):
    def run(hidden, head):
        out = language_model_loss(hidden, head, LABELS, tied=tied, z_loss=0.1)
        log_probs = token_log_probs(hidden, head, LABELS, tied=tied, chunk_size=8)
        return out.objective + jnp.sum(WEIGHTS * log_probs**2), (out, log_probs)

    head = HEAD.T if tied else HEAD
    compute = lambda: jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(HIDDEN, head)
    want = compute()
    with jax.set_mesh(tiny.mesh(**axes)), sharding_rules(rules):
        got = compute()
    tiny.assert_trees_close(got, want, 1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_log_probabilities_have_the_gradients_of_any_function_of_them(chunk_size, tied):
    def plain(hidden, head):
        log_probs = jax.nn.log_softmax(hidden @ head, -1)
        index = jnp.maximum(LABELS, 0)[..., None]
        log_probs = jnp.take_along_axis(log_probs, index, -1)[..., 0]
        return of_log_probs(jnp.where(LABELS < 0, 0.0, log_probs))

    def of_log_probs(log_probs):
        return jnp.sum(jnp.tanh(WEIGHTS * log_probs)), log_probs

    def run(hidden, head):
        head = head.T if tied else head
        hidden = jnp.where(LABELS[..., None] < 0, jnp.nan, hidden)  # It may hold anything.
        options = {"tied": tied, "chunk_size": chunk_size}
        return of_log_probs(token_log_probs(hidden, head, LABELS, **options))

    got, want = (
        jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(HIDDEN, HEAD)
        for function in (run, plain)
    )
    tiny.assert_trees_close(got, want, 1e-5)


def test_a_label_beyond_a_split_vocabulary_is_nan():
    with jax.set_mesh(tiny.mesh(model=2)):
        got = jax.jit(lambda labels: language_model_loss(HIDDEN, HEAD, labels, tied=False))
        assert np.isnan(got(LABELS.at[0, 0].set(V)).objective)
        assert np.isfinite(got(LABELS.at[0, 0].set(V - 1)).objective)


@pytest.mark.parametrize(
    ("axes", "rules", "rows", "vocab_size", "named"),
    [
        ({"data": 8}, {}, 3, V, "target_labels:.*'batch'.*size 3.*8"),
        ({"model": 2}, {}, B, 9, "'vocab'.*size 9.*2"),
        (
            {"fsdp": 2, "model": 2},
            {"vocab": ("model", "fsdp"), "embed": ()},
            B,
            8,
            "'fsdp'.*'batch'.*'vocab'",
        ),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(axes, rules, rows, vocab_size, named):
    mesh, head = jax.set_mesh(tiny.mesh(**axes)), HEAD[:, :vocab_size]
    with mesh, sharding_rules(rules), pytest.raises(ValueError, match=named):
        language_model_loss(HIDDEN[:rows], head, LABELS[:rows], tied=False)


def test_no_token_that_counts_is_a_loss_of_zero():
    nothing = jnp.full_like(LABELS, -1)
    got = language_model_loss(HIDDEN, HEAD, nothing, tied=False)
    assert [float(x) for x in got[:3]] == [0, 0, 0]
