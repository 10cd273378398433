"""The loss of a language model against float64, without a mesh and on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.models.loss import language_model_loss
from moelib.parallel.sharding import sharding_rules
from tests import tiny
from tests.layers.calling import normal

B, S, D, V = 8, 4, 6, 10
HIDDEN, HEAD = jnp.asarray(normal(B, S, D)), jnp.asarray(normal(D, V, seed=1))
LABELS = jnp.asarray(np.random.default_rng(2).integers(-3, V, (B, S)), jnp.int32)


def by_hand(z_loss):
    """Returns (objective, cross-entropy, tokens), token by token."""
    logits = np.asarray(HIDDEN, np.float64) @ np.asarray(HEAD, np.float64)
    objective, entropy, tokens = 0.0, 0.0, 0
    for b, s in np.ndindex(B, S):
        if (label := int(LABELS[b, s])) >= 0:
            lse = np.log(np.exp(logits[b, s]).sum())
            entropy += lse - logits[b, s, label]
            objective += lse - logits[b, s, label] + z_loss * lse**2
            tokens += 1
    return objective, entropy, tokens


@pytest.mark.parametrize("z_loss", [0.0, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_sums_are_over_the_tokens_that_count(z_loss, tied):
    head = HEAD.T if tied else HEAD
    got = language_model_loss(HIDDEN, head, LABELS, tied=tied, z_loss=z_loss)
    np.testing.assert_allclose(got[:3], by_hand(z_loss), rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "axes",
    [{"data": 8}, {"data": 2, "seq": 2, "model": 2}, {"model": 2}, {"fsdp": 2, "model": 2}],
    ids=str,
)
def test_every_mesh_gives_the_sums_and_gradients_of_one_device(axes, tied):
    def run(hidden, head):
        out = language_model_loss(hidden, head, LABELS, tied=tied, z_loss=0.1)
        return out.objective, out

    head = HEAD.T if tied else HEAD
    compute = lambda: jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(HIDDEN, head)
    want = compute()
    with jax.set_mesh(tiny.mesh(**axes)):
        got = compute()
    tiny.assert_trees_close(got, want, 1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_may_be_split_over_an_axis_that_splits_no_tokens(tied):
    head = HEAD.T if tied else HEAD
    run = lambda hidden, head: language_model_loss(hidden, head, LABELS, tied=tied).objective
    want = jax.value_and_grad(run, (0, 1))(HIDDEN, head)
    rules = sharding_rules({"embed": ("model",), "vocab": ()})
    with jax.set_mesh(tiny.mesh(fsdp=4, model=2)), rules:
        got = jax.jit(jax.value_and_grad(run, (0, 1)))(HIDDEN, head)
    tiny.assert_trees_close(got, want, 1e-6)


def test_rows_that_do_not_divide_are_refused():
    message = r"target_labels:.*'batch'.*size 3.*8"
    with jax.set_mesh(tiny.mesh(data=8)), pytest.raises(ValueError, match=message):
        language_model_loss(HIDDEN[:3], HEAD, LABELS[:3], tied=False)


def test_a_label_beyond_a_split_vocabulary_is_nan():
    with jax.set_mesh(tiny.mesh(model=2)):
        got = jax.jit(lambda labels: language_model_loss(HIDDEN, HEAD, labels, tied=False))
        assert np.isnan(got(LABELS.at[0, 0].set(V)).objective)
        assert np.isfinite(got(LABELS.at[0, 0].set(V - 1)).objective)


def test_a_vocabulary_that_does_not_divide_is_refused():
    message = r"'vocab'.*size 9.*2"
    with jax.set_mesh(tiny.mesh(model=2)), pytest.raises(ValueError, match=message):
        language_model_loss(HIDDEN, HEAD[:, :9], LABELS, tied=False)


def test_an_axis_that_splits_tokens_and_the_vocabulary_is_refused():
    message = r"'fsdp'.*'batch'.*'vocab'"
    rules = sharding_rules({"vocab": ("model", "fsdp"), "embed": ()})
    mesh = jax.set_mesh(tiny.mesh(fsdp=2, model=2))
    with mesh, rules, pytest.raises(ValueError, match=message):
        language_model_loss(HIDDEN, jnp.ones((D, 12)), LABELS, tied=False)


def test_no_token_that_counts_is_a_loss_of_zero():
    got = language_model_loss(HIDDEN, HEAD, jnp.full((B, S), -1), tied=False)
    assert [float(x) for x in got[:3]] == [0, 0, 0]
