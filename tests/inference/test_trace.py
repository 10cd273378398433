"""Traces: arrays inside layers are those that the layers compute."""

import contextlib
import json
import re
import types

import jax
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.inference.trace import trace
from moelib.inference.trace_page import trace_page
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.transformer import ScanStack
from tests import tiny
from tests.inference.models import decoder, latent_layer, layer, with_parameters

TEXT = "some text"


@pytest.fixture(scope="module")
def model():
    """Returns a loaded model with experts, a window, sinks, latent attention, and a scan."""
    moe = tiny.moe(dispatcher=DenseDispatcher.default_config())
    stack = decoder(layer(moe, window=3, sinks=True), latent_layer(), kind=ScanStack)
    module, parameters = with_parameters(tiny.model_config(stack, vocab_size=257))
    return types.SimpleNamespace(
        model=module,
        parameters=parameters,
        on_mesh=contextlib.nullcontext,
        tokenizer=ByteTokenizer.default_config().instantiate(),
        max_length=None,
    )


@pytest.fixture(scope="module")
def found(model):
    """The trace of the text."""
    return trace(model, TEXT)


def test_logits_and_losses_are_those_of_the_model(model, found):
    batch = {"input_ids": np.array([list(TEXT.encode())], np.int32)}
    run = jax.jit(
        lambda params: functional(
            model.model, None, params, (batch,), is_training=False, method="logits"
        )[0]
    )
    logits = run(model.parameters)[0]
    np.testing.assert_allclose(found.logits, logits, rtol=1e-5, atol=1e-6)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    expected = [-log_probs[i, token] for i, token in enumerate(TEXT.encode()[1:])]
    np.testing.assert_allclose(found.losses, expected, rtol=1e-5)
    assert found.tokens == list(TEXT)


def test_the_lens_after_the_last_layer_is_the_model(found):
    ids, probs = found.predictions[[*found.predictions][-1]]
    np.testing.assert_array_equal(ids[:, 0], np.argmax(found.logits, axis=-1))
    expected = np.asarray(jax.nn.softmax(found.logits))
    np.testing.assert_allclose(probs[:, 0], expected.max(-1), rtol=1e-5)


def test_attention_weights_are_causal_within_the_window_and_leave_a_share_to_the_sink(found):
    length = len(TEXT)
    ahead = np.arange(length)[:, None] - np.arange(length)[None]
    windowed = found.layers["decoder.layer0.self_attention"]["attention_weights"]
    latent = found.layers["decoder.layer1.self_attention"]["attention_weights"]
    for weights, is_seen in ((windowed, (ahead >= 0) & (ahead < 3)), (latent, ahead >= 0)):
        assert weights.shape == (length, 4, length)
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(is_seen[:, None], weights.shape))
    np.testing.assert_allclose(latent.sum(-1), 1.0, rtol=1e-6)
    assert np.all(windowed.sum(-1) < 1)


def test_experts_are_the_likeliest_of_the_router(found):
    arrays = found.layers["decoder.layer0.feed_forward"]
    ids, probs, weights = (arrays[x] for x in ("expert_ids", "router_probs", "expert_weights"))
    best = np.argsort(-probs, axis=-1)[:, : ids.shape[-1]]
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-6)
    assert np.all(weights[:, 0] >= weights[:, 1])


def test_the_example_of_the_page(model):
    # --8<-- [start:python]
    found = trace(model, "some text", layers=r"decoder\.layer\d+\.feed_forward")
    for path, arrays in found.layers.items():
        print(path, arrays["expert_ids"][-1], found.tokens[-1])
    # --8<-- [end:python]
    assert [*found.layers] == ["decoder.layer0.feed_forward", "decoder.layer2.feed_forward"]


def test_only_layers_and_arrays_of_interest_are_kept(model):
    found = trace(model, TEXT, layers=r".*layer1\..*|.*layer1", names=["hidden"])
    assert {path: [*arrays] for path, arrays in found.layers.items()} == {
        "decoder.layer1": ["hidden"]
    }
    hidden = found.layers["decoder.layer1"]["hidden"]
    norms = found.residual_norms["decoder.layer1"]
    np.testing.assert_allclose(norms**2, np.sum(hidden**2, -1), rtol=1e-5)
    assert len(repr(found)) < 200


def test_the_page_has_the_tokens_predictions_and_experts_and_no_code_of_the_text(model):
    text = "</script><script>alert(1)</script>\n"
    found = trace(model, text)
    page = trace_page(found, model.tokenizer, title="<b>")
    (content,) = re.findall(r'type="application/json" id="data">(.*?)</script>', page)
    data = json.loads(content)
    assert "".join(data["tokens"]) == text
    assert data["title"] == "<b>"
    assert data["losses"] == pytest.approx(found.losses.tolist(), rel=1e-3)
    experts = data["layers"][0]["experts"]
    ids = found.layers["decoder.layer0.feed_forward"]["expert_ids"]
    assert [[i for i, _ in each] for each in experts] == ids.tolist()
    last = data["predictions"][-1]["best"]
    best = [chr(i) for i in np.argmax(found.logits[:, :128], axis=-1)]
    likely = [i for i, x in enumerate(np.argmax(found.logits, axis=-1)) if x < 128]
    assert [last[i][0][0] for i in likely] == [best[i] for i in likely]
    assert len(likely) > 3


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("a", {}, "text is 'a'"),
        ([1, 999], {}, r"text is \[1, 999\]"),
        (TEXT, {"names": ["router_prob"]}, "'router_prob'.*router_probs"),
        (5, {}, "text is 5; pass one text"),
        (["a b", "c d"], {}, "pass one text, or its token ids"),
        (TEXT, {"names": "hidden"}, "names"),
        (TEXT, {"layers": "*("}, "is no regular expression"),
        (TEXT, {"layers": "nothing"}, "layers='nothing'.*decoder.layer0"),
        ("x" * 9000, {}, "9000 tokens and 16 heads.*attention_weights"),
    ],
)
def test_bad_requests_are_refused(model, text, settings, message):
    with pytest.raises(UserError, match=message):
        trace(model, text, **settings)


def test_a_model_is_loaded_first_and_a_text_as_long_as_it_knows(model):
    with pytest.raises(UserError, match="model is 'runs/a'; pass a model from"):
        trace("runs/a", TEXT)
    short = types.SimpleNamespace(**vars(model) | {"max_length": 4})
    with pytest.raises(UserError, match="has 9 tokens, and the model was trained with 4"):
        trace(short, "x" * 9)
