"""The cache: logits token by token equal those of the whole text, for every kind of layer."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import ParameterSpec
from moelib.inference.cache import arrange_caches, new_cache, next_logits
from moelib.inference.unstack import unstacked
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.transformer import LoopStack, ScanStack, TransformerLayer
from tests import tiny
from tests.inference import models
from tests.inference.models import DECODERS, decoder, layer, model_of, with_parameters

LENGTHS = np.array([2, 8, 5], np.int32)  # Tokens of each prompt; padded to the longest.
NEW = 9  # Tokens that follow one by one: more than twice round a ring of three.
IDS = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, (3, max(LENGTHS) + NEW), np.int32)
PLACES = LENGTHS[:, None] + np.arange(NEW, dtype=np.int32)[None]  # Of the new tokens.


def by_token(model, params, *, room=32, grow_to=None):
    """Returns the logits [3, 1 + NEW, V] at the end of prompts and after each new token."""
    width = max(LENGTHS)
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (3, width))
    cache = new_cache(model, params, 3, room)
    mask = index < LENGTHS[:, None]
    first, cache, _ = next_logits(model, params, cache, jnp.asarray(IDS[:, :width]), index, mask)
    if grow_to is not None:
        cache = arrange_caches(model, [cache], grow_to)

    def step(cache, token):
        ids, position = (x[:, None] for x in token)
        logits, cache, _ = next_logits(model, params, cache, ids, position, jnp.ones((3, 1), bool))
        return cache, logits

    new = np.take_along_axis(IDS, PLACES, axis=1)
    _, rest = jax.lax.scan(step, cache, (jnp.asarray(new.T), jnp.asarray(PLACES.T)))
    return jnp.concatenate([first[:, None], rest.swapaxes(0, 1)], axis=1)


def assert_token_by_token_equals_whole(model, params, **fields):
    """Compares with the logits of whole texts, to 1e-5 of the largest."""

    def both(params):
        return by_token(model, params, **fields), models.whole_logits(model, params, IDS)

    got, whole = jax.jit(both)(params)
    index = np.concatenate([LENGTHS[:, None] - 1, PLACES], axis=1)
    want = np.take_along_axis(np.asarray(whole), index[..., None], axis=1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "scan"])
def test_logits_by_token_equal_those_of_the_whole_text(name):
    tied = {"lm_head": None} if name == "grouped" else {}
    assert_token_by_token_equals_whole(*model_of(name, **tied))


def test_loops_compute_the_same_as_scans():
    model, params = model_of("scan")
    loops, apart = unstacked(model, params)
    assert type(model.decoder) is ScanStack
    assert type(loops.decoder) is LoopStack
    logits = [
        models.compiled_whole_logits(*made, IDS) for made in ((model, params), (loops, apart))
    ]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5 * np.abs(logits[0]).max())
    again, same = unstacked(loops, apart)
    assert again is loops
    jax.tree.map(np.testing.assert_array_equal, same, apart)


def test_a_cache_that_grows_keeps_its_content():
    stack = decoder(layer(window=12), layer(), kind=LoopStack)
    model, params = with_parameters(tiny.model_config(stack))
    assert_token_by_token_equals_whole(model, params, room=8, grow_to=32)


class Attention(BaseLayer):
    """The mean of the tokens so far: an attention without a cache."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = 0

    def forward(self, x, *, positions, segment_ids=None):
        del segment_ids
        return jnp.cumsum(x, axis=1) / (positions[..., None].astype(x.dtype) + 1)


# --8<-- [start:cache]
class RunningMean(BaseLayer):
    """The mean of the tokens so far; its cache is the sum of the earlier ones."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED

    def _create_layer_cache_specs(self, batch_size, length):
        return {"sum": ParameterSpec((batch_size, self.config.input_dim), ("batch", None))}

    def forward(self, x, *, positions, segment_ids=None):
        if segment_ids is not None:
            x = jnp.where(segment_ids[..., None] > 0, x, 0.0)  # Padding after a prompt.
        total = jnp.cumsum(x, axis=1)
        if self.cache is not None:
            if x.shape[1] == 1:  # One more token per sequence; otherwise whole prompts.
                total = total + self.cache["sum"][:, None]
            self.put_cache(sum=total[:, -1])
        return total / (positions[..., None] + 1).astype(x.dtype)


# --8<-- [end:cache]


class Forgetful(GroupedQueryAttention):
    """Has the cache of its base class and does not put it out."""

    def forward(self, x, *, positions, segment_ids=None):
        del positions, segment_ids
        return x


def with_attention(attention):
    block = TransformerLayer.default_config().set(self_attention=attention)
    block.feed_forward.hidden_dim = 8
    return with_parameters(tiny.model_config(decoder(block, layer(), kind=LoopStack)))


def test_without_a_cache_tokens_are_computed_from_the_whole_text_with_a_warning(caplog):
    model, params = with_attention(Attention.default_config())
    with caplog.at_level(logging.WARNING, logger="moelib.inference.cache"):
        assert_token_by_token_equals_whole(model, params, room=8, grow_to=32)
    (message,) = caplog.messages
    assert message.startswith("decoder.layer0 (TransformerLayer) has no cache")


def test_a_layer_can_have_a_cache_of_its_own():
    assert_token_by_token_equals_whole(*with_attention(RunningMean.default_config()))


def test_a_cache_that_is_not_put_out_is_an_error():
    model, params = with_attention(Forgetful.default_config().set(num_heads=4))
    with pytest.raises(ValueError, match=r"decoder\.layer0\.self_attention\.cache\.k"):
        jax.eval_shape(lambda: by_token(model, params))


class SumOfTokens(BaseLayer):
    """A feed-forward layer in which every unmasked token reaches all others."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = 0

    def forward(self, x, mask=None):
        return jnp.broadcast_to(jnp.sum(jnp.where(mask[..., None], x, 0.0), (0, 1)), x.shape)


def test_sequences_that_have_ended_are_masked_in_feed_forward_layers():
    cfg = tiny.model_config(decoder(layer(SumOfTokens.default_config()), kind=LoopStack))
    model, params = with_parameters(cfg)
    ids, position = jnp.asarray([[3], [5]]), jnp.zeros((2, 1), jnp.int32)

    @jax.jit
    def run(ids, position, mask):
        cache = new_cache(model, params, len(ids), 8)
        return next_logits(model, params, cache, ids, position, mask)[0]

    alone = run(ids[:1], position[:1], jnp.ones((1, 1), bool))
    beside = run(ids, position, jnp.asarray([[True], [False]]))
    np.testing.assert_allclose(beside[:1], alone, rtol=0, atol=1e-5)
    assert not np.allclose(run(ids, position, jnp.ones((2, 1), bool))[:1], alone, rtol=1e-2)
