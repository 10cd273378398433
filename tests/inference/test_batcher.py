"""The batcher: texts equal those of `generate_tokens`, whenever their requests arrive."""

import contextlib
import queue
import types

import jax
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.inference import decode
from moelib.inference.batcher import Batcher, BusyError
from moelib.inference.generate import PromptError, Settings, generate_tokens
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.transformer import LoopStack
from moelib.parallel import sharding
from tests import tiny
from tests.inference.models import decoder, layer, mamba_layer, with_parameters

SECONDS = 120


@pytest.fixture(scope="module")
def model():
    """Returns a loaded model with a window, a state and experts."""
    moe = tiny.moe(dispatcher=DenseDispatcher.default_config())
    stack = decoder(layer(moe, window=3), mamba_layer(), kind=LoopStack)
    module, parameters = with_parameters(tiny.model_config(stack))
    return types.SimpleNamespace(
        model=module,
        parameters=parameters,
        on_mesh=contextlib.nullcontext,
        stop_ids=[7],
        tokenizer=types.SimpleNamespace(vocab_size=32),
    )


class Client:
    """Sends a request, and waits for its text."""

    def __init__(self, batcher, prompt, **settings):
        self.tokens, self.reason, self.events = [], None, queue.SimpleQueue()
        settings = Settings(**{"max_new_tokens": 12, **settings})
        self.request = batcher.submit(prompt, settings, self.events.put, self.events.put)

    def wait(self):
        """Waits for the next token, or the reason of the end, unless it is known."""
        if self.reason is None:
            event = self.events.get(timeout=SECONDS)
            if isinstance(event, int):
                self.tokens.append(event)
            else:
                self.reason = event

    def end(self):
        """Returns the reason of the end."""
        while self.reason is None:
            self.wait()
        return self.reason


KINDS = [
    {"max_new_tokens": 40, "temperature": 0.0},
    {"max_new_tokens": 8, "temperature": 1.3, "top_p": 0.8},
    {"max_new_tokens": 25, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.4},
    {"max_new_tokens": 2, "temperature": 2.0, "min_p": 0.05, "top_p": 1.0},
]


def texts(model, prompts, seeds, **settings):
    """Returns the texts that `generate_tokens` gives."""
    settings = Settings(**{"stop_ids": model.stop_ids, "max_new_tokens": 12, **settings})
    return [*generate_tokens(model.model, model.parameters, prompts, settings, seeds=seeds)]


def test_texts_are_those_of_other_batches_whenever_requests_arrive(model, monkeypatch):
    monkeypatch.setattr(decode, "MIN_CACHE", 16)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32, rng.integers(1, 17)).tolist() for _ in range(12)]
    clients = []
    with Batcher(model, max_active=4) as batcher:
        for i, prompt in enumerate(prompts):
            clients.append(Client(batcher, prompt, seed=i, **KINDS[i % 4]))
            clients[i // 2].wait()  # Some texts are in progress when others arrive.
        reasons = {client.end() for client in clients}
    assert reasons == {"length", "stop"}
    for k, settings in enumerate(KINDS):
        expected = texts(model, prompts[k::4], range(k, 12, 4), **settings)
        assert [client.tokens for client in clients[k::4]] == expected
    for client in clients:
        is_whole = len(client.tokens) == client.request.limit
        assert client.reason == ("length" if is_whole else "stop")


def test_a_cancelled_text_makes_room_for_one_that_waits(model):
    with Batcher(model, stop_ids=[], max_active=1, max_requests=2) as batcher:
        first = Client(batcher, [1], max_new_tokens=100_000, temperature=0.0)
        first.wait()
        second = Client(batcher, [2, 3], temperature=0.0)
        with pytest.raises(BusyError, match="max_requests=2"):
            Client(batcher, [4])
        first.request.cancel()
        assert second.end() == "length"
    assert [second.tokens] == texts(model, [[2, 3]], [0], temperature=0.0, stop_ids=[])
    assert len(first.tokens) < 100


def test_a_failed_step_ends_its_texts_and_later_ones_go_on(model, monkeypatch, caplog):
    with Batcher(model, stop_ids=[]) as batcher:
        with monkeypatch.context() as patch:
            patch.setattr("moelib.inference.batcher.advance", lambda *_: 1 / 0)
            assert Client(batcher, [1]).end() == "error"
        assert "ZeroDivisionError" in caplog.text
        assert Client(batcher, [1], temperature=0.0, max_new_tokens=3).end() == "length"


def test_a_failed_prompt_ends_no_text_in_progress(model, monkeypatch, caplog):
    with Batcher(model, stop_ids=[]) as batcher:
        first = Client(batcher, [1], max_new_tokens=60, temperature=0.0)
        first.wait()
        with monkeypatch.context() as patch:
            patch.setattr("moelib.inference.batcher.begin", lambda *_: 1 / 0)
            assert Client(batcher, [2]).end() == "error"
        assert "ZeroDivisionError" in caplog.text
        large = Client(batcher, [2], max_new_tokens=3, temperature=1.0, top_k=1 << 31)
        assert (large.end(), first.end()) == ("length", "length")
    assert [first.tokens] == texts(
        model, [[1]], [0], max_new_tokens=60, temperature=0.0, stop_ids=[]
    )


def test_logits_that_are_not_finite_end_a_text(model):
    broken = jax.tree.map(lambda x: x * np.nan, model.parameters)
    loaded = types.SimpleNamespace(**(vars(model) | {"parameters": broken}))
    with Batcher(loaded) as batcher:
        client = Client(batcher, [1])
        assert client.end() == "error"
    assert not client.tokens


def test_texts_in_progress_end_with_the_batcher(model):
    with Batcher(model, stop_ids=[]) as batcher:
        client = Client(batcher, [1], max_new_tokens=100_000)
        client.wait()
    assert client.end() == "error"
    with pytest.raises(BusyError):
        Client(batcher, [1])


def test_bad_requests_are_refused(model):
    with pytest.raises(UserError, match="max_active is 0"):
        Batcher(model, max_active=0)
    with Batcher(model) as batcher:
        with pytest.raises(UserError, match=r"stop_ids=\[3\]"):
            Client(batcher, [1], stop_ids=[3])
        with pytest.raises(PromptError, match="no tokens"):
            Client(batcher, [])
        with pytest.raises(PromptError, match="id 32"):
            Client(batcher, [32])
        with pytest.raises(PromptError, match="max_length=3"):
            Client(batcher, [1, 2, 3], max_length=3)


def test_a_mesh_gives_the_texts_of_one_device(model):
    mesh = tiny.mesh(data=2, model=2)
    shardings = sharding.named_shardings(model.model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        parameters = jax.device_put(model.parameters, shardings)
    loaded = {"parameters": parameters, "on_mesh": lambda: jax.set_mesh(mesh), "stop_ids": []}
    prompts = [[1, 2], [3], [4, 5, 6]]
    with Batcher(types.SimpleNamespace(**(vars(model) | loaded))) as batcher:
        clients = [Client(batcher, prompt, temperature=0.0) for prompt in prompts]
        assert {client.end() for client in clients} == {"length"}
    expected = texts(model, prompts, range(3), temperature=0.0, stop_ids=[])
    assert [client.tokens for client in clients] == expected
