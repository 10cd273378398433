"""Generation: the same text whatever the buffer, greedy and drawn; bad prompts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.module import functional
from moelib.inference.generate import generate, sample_token
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM


@pytest.fixture(scope="module")
def model():
    layer = TransformerLayer.default_config()
    layer.self_attention.num_heads = 2
    layer.feed_forward.hidden_dim = 16
    decoder = ScanStack.default_config().set(num_layers=1, block=[layer])
    cfg = CausalLM.default_config().set(vocab_size=11, dim=8, decoder=decoder)
    model = cfg.instantiate(parent=None)
    return model, model.initialize_parameters_recursively(jax.random.key(0))


def test_greedy_text_is_the_likeliest_token_each_time(model):
    model, params = model
    ids = [1, 2, 3]
    for token in generate(model, params, ids[:3], max_new_tokens=4, temperature=0.0):
        batch = {"input_ids": jnp.asarray([ids], jnp.int32)}
        logits, _ = functional(
            model, None, params, (batch,), is_training=False, method="logits"
        )  # Without any padding.
        assert token == int(np.argmax(logits[0, -1]))
        ids.append(token)
    assert len(ids) == 7


def test_same_seed_gives_the_same_text_and_another_one_another(model):
    model, params = model
    text = lambda seed: list(generate(model, params, [1], max_new_tokens=12, seed=seed))
    assert text(0) == text(0)
    assert text(0) != text(1)


def test_text_ends_before_a_stop_token(model):
    model, params = model
    free = list(generate(model, params, [1], max_new_tokens=12, seed=3))
    stop = free[5]
    stopped = list(generate(model, params, [1], max_new_tokens=12, seed=3, stop_ids=[stop]))
    assert stopped == list(itertools.takewhile(lambda token: token != stop, free))


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_tokens_beyond_the_tokenizers_vocabulary_are_never_drawn(model, temperature):
    model, params = model
    settings = {"max_new_tokens": 40, "temperature": temperature}
    free = list(generate(model, params, [1], **settings))
    size = max(free)
    assert all(token < size for token in generate(model, params, [1], vocab_size=size, **settings))
    assert free == list(generate(model, params, [1], vocab_size=11, **settings))
    with pytest.raises(ValueError, match="holds id 4; the vocabulary is 4"):
        next(generate(model, params, [4], vocab_size=4, **settings))
    with pytest.raises(ValueError, match="vocab_size is 12, and the model has 11 tokens"):
        next(generate(model, params, [4], vocab_size=12, **settings))


def test_top_p_leaves_out_unlikely_tokens():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = np.asarray(jax.vmap(lambda key: sample_token(logits, key, 1.0, 0.7))(keys))
    assert set(drawn.tolist()) == {0, 1}
    assert abs(np.mean(drawn == 0) - 0.5 / 0.8) < 0.1


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "The prompt is empty"),
        ([3, 11], {}, "holds id 11; the vocabulary is 11"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([1], {"temperature": -1.0}, "temperature -1.0"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
    ],
)
def test_bad_requests_are_refused(model, prompt, settings, message):
    model, params = model
    with pytest.raises(ValueError, match=message):
        next(generate(model, params, prompt, **{"max_new_tokens": 1, **settings}))
