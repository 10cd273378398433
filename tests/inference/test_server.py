"""The server of text: the client of OpenAI, errors, limits, clients that go away."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import time
import types
import urllib.parse

import openai
import pytest

from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.inference.conversation import ChatFormat
from moelib.inference.generate import generate
from moelib.inference.server import serve
from moelib.inference.text import TextStream
from moelib.layers.transformer import LoopStack
from tests import tiny
from tests.inference.models import decoder, layer, with_parameters

LENGTH = 400
GREEDY = {"temperature": 0.0, "max_tokens": 12}


class Lines:
    """A template of a line per message."""

    def render(self, messages, *, add_generation_prompt):
        lines = [f"{each['role'][0]}: {each['content']}\n" for each in messages]
        return "".join(lines) + "a: " * add_generation_prompt


@pytest.fixture(scope="module")
def model():
    """Returns a loaded model of bytes that knows nothing."""
    cfg = tiny.model_config(decoder(layer(), kind=LoopStack), vocab_size=257)
    module, parameters = with_parameters(cfg)
    tokenizer = ByteTokenizer.default_config().instantiate()
    tokenizer.encode_rendered = tokenizer.encode
    return types.SimpleNamespace(
        model=module,
        parameters=parameters,
        on_mesh=contextlib.nullcontext,
        stop_ids=[tokenizer.eos_id],
        tokenizer=tokenizer,
        max_length=LENGTH,
    )


@pytest.fixture(scope="module")
def url(model):
    """The address of a server."""
    chat = ChatFormat(Lines(), model.tokenizer)
    with serve(model, 0, chat=chat, name="tiny", max_active=8, max_requests=12) as url:
        yield url


@pytest.fixture
def client(url):
    """Returns the client of OpenAI."""
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(model, prompt, number=12, **settings):
    """Returns the text that `generate` gives."""
    settings = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": number, **settings}
    return next(generate(model, [prompt], **settings)).text


def request(url, method="POST", path="/v1/completions", body=b"{}", **headers):
    """Returns the status, the headers and the JSON of an answer."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", **headers}
        connection.request(method, path, body if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


def test_texts_and_messages_are_those_of_generate(model, client):
    answer = client.completions.create(model="tiny", prompt="Once", **GREEDY)
    assert answer.choices[0].text == expected(model, "Once")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    assert answer.choices[0].message.content == expected(model, "s: S\nu: U\na: ", stop=["\n"])


def test_a_stream_has_the_pieces_of_the_text(model, client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "U"}]}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(model="tiny", messages=messages, **GREEDY, **options)]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert len(pieces) > 5
    assert "".join(pieces) == expected(model, "u: U\na: ")
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    pieces = client.completions.create(model="tiny", prompt="Once", stream=True, **GREEDY)
    assert "".join(each.choices[0].text for each in pieces) == expected(model, "Once")


def test_several_texts_have_seeds_of_their_own_and_stop_strings_end_them(model, client):
    settings = {"temperature": 1.5, "max_tokens": 30, "seed": 5}
    answer = client.completions.create(model="tiny", prompt=["ab", "c"], n=2, **settings)
    texts = [choice.text for choice in answer.choices]
    for i, (prompt, text) in enumerate(zip(["ab", "ab", "c", "c"], texts, strict=True)):
        assert text == expected(model, prompt, 30, temperature=1.5, seeds=[5 + i])
    stop = texts[0][10]
    answer = client.completions.create(model="tiny", prompt="ab", stop=stop, **settings)
    assert answer.choices[0].text == texts[0].partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_tokens_are_counted_up_to_the_stop_string(model, client, monkeypatch):
    add = TextStream.add
    # The batcher is then tokens ahead.
    monkeypatch.setattr(TextStream, "add", lambda *args: time.sleep(0.05) or add(*args))
    settings = {"temperature": 0.0, "max_tokens": 60}
    (completion,) = generate(model, ["Once"], temperature=0.0, max_new_tokens=60)
    stop = completion.text[3:5]
    tokens, decode = completion.tokens, model.tokenizer.decode
    want = next(n for n in range(len(tokens)) if stop in decode(tokens[:n]))
    answer = client.completions.create(model="tiny", prompt="Once", stop=stop, **settings)
    assert answer.usage.completion_tokens == want
    settings |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(model="tiny", prompt="Once", stop=stop, **settings)
    assert last.usage.completion_tokens == want


def test_an_error_in_a_stream_is_its_last_event(url, monkeypatch, caplog):
    monkeypatch.setattr(TextStream, "add", lambda *_: 1 / 0)
    netloc = urllib.parse.urlsplit(url).netloc
    body = json.dumps({"prompt": "a", "stream": True, **GREEDY})
    with contextlib.closing(http.client.HTTPConnection(netloc, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        found = connection.getresponse().read()
    event = json.loads(found.removeprefix(b"data: "))
    assert event["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in event["error"]["message"]
    assert "ZeroDivisionError" in caplog.text


def test_the_model_and_the_page_are_shown(url, client):
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert request(url, "GET", "/health")[2] == {"status": "ok"}
    netloc = urllib.parse.urlsplit(url).netloc
    with contextlib.closing(http.client.HTTPConnection(netloc)) as connection:
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert b"<textarea" in answer.read()
        assert (
            "default-src 'none'; script-src 'sha256-" in answer.headers["Content-Security-Policy"]
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "body is list"),
        (b'{"prompt": 5}', "prompt is 5"),
        (b'{"prompt": [[1, "a"]]}', "prompt is "),
        (b'{"prompt": ""}', "The prompt has no tokens"),
        (b'{"prompt": [999]}', "The prompt has id 999"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        (b'{"prompt": "a", "max_tokens": 2147483648}', "from 1 to 2147483647"),
        (b'{"messages": []}', "messages is a field of /v1/chat/completions; send"),
        (b'{"prompt": "\\ud800"}', "prompt is no text of Unicode"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
        (b'{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
        (b'{"prompt": "a", "temperature": -1}', "temperature is -1"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        (b'{"prompt": "a", "n": 99}', "n is 99"),
        (
            b'{"prompt": "a", "stop": ""}',
            "stop is ['']; set it to up to 16 texts, none of them empty",
        ),
        (b"\xff", "not JSON in UTF-8"),
        (b'{"prompt": "a", "stream": 1}', "stream is 1"),
        (b'{"prompt": "a", "logprobs": 5}', "logprobs=5 is not supported"),
        (b'{"prompt": "a", "logprobs": 0}', "logprobs=0 is not supported"),
        (b'{"prompt": "a", "best": 5}', "best=5: no such field"),
        (json.dumps({"prompt": "x" * LENGTH}).encode(), f"max_length={LENGTH}"),
    ],
)
def test_a_bad_text_request_is_answered(url, body, words):
    status, _, answer = request(url, body=body)
    assert status == 400
    assert words in answer["error"]["message"]
    code = "context_length_exceeded" if "max_length" in words else None
    assert answer["error"]["code"] == code


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is None"),
        ([], "messages is []; set it to a list of one message or more"),
        (["a"], "messages[0] is 'a'"),
        ([{"role": "boss", "content": "a"}], "messages[0].role is 'boss'"),
        ([{"role": "user"}], "messages[0].content is None"),
        ([{"role": "user", "content": "a<|endoftext|>"}], "special token '<|endoftext|>'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "content is [{'type': 'image_url'}]",
        ),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content is no text of Unicode"),
    ],
)
def test_bad_messages_are_answered(url, messages, words):
    body = json.dumps({"messages": messages}).encode()
    status, _, answer = request(url, path="/v1/chat/completions", body=body)
    assert (status, words in answer["error"]["message"]) == (400, True)


def test_requests_from_elsewhere_and_of_other_forms_are_refused(url):
    assert request(url, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert request(url, Host="evil.example")[0] == 403
    assert request(url, Origin="http://evil.example")[0] == 403
    assert request(url, **{"Content-Type": "text/plain"})[0] == 415
    for method, path in [("PUT", "/health"), ("GET", "/v1/completions"), ("POST", "/health")]:
        status, _, answer = request(url, method, path)
        assert (status, answer["error"]["type"]) == (405, "invalid_request_error")
    status, _, answer = request(url, body=b'{"model": "other", "prompt": "a"}')
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert request(url, path="/v1/nothing")[0] == 404
    assert request(url, "GET", "/nothing")[0] == 404
    assert request(url, **{"Content-Length": "100000000"})[0] == 413
    assert request(url, body=b" " * (5 << 20))[0] == 413
    assert request(url, **{"Content-Length": "x"})[0] == 411


def test_a_body_that_never_comes_does_not_hold_others(url, client):
    host = urllib.parse.urlsplit(url)
    with socket.create_connection((host.hostname, host.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n")
        assert client.completions.create(model="tiny", prompt="a", **GREEDY).choices[0].text


def test_two_hundred_requests_at_once_are_answered_or_told_to_wait(model, url):
    body = json.dumps({"prompt": "Once", **GREEDY}).encode()
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = [*pool.map(lambda _: request(url, body=body), range(200))]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 12
    text = expected(model, "Once")
    for status, headers, answer in answers:
        if status == 200:
            assert answer["choices"][0]["text"] == text
        else:
            assert headers["Retry-After"] == "1"
            assert "max_requests=12" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(url, client, stream):
    body = {"prompt": "a", "max_tokens": LENGTH - 1, "n": 12, "stream": stream, "temperature": 0}
    host = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(host.netloc)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        if stream:
            connection.getresponse().read(10)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(openai.RateLimitError):
            assert client.completions.create(model="tiny", prompt="a", **GREEDY)
            return
        time.sleep(0.1)
    pytest.fail("The places are not free.")


def test_a_key_is_required_where_others_reach_the_server(model):
    with (
        pytest.raises(UserError, match=r"host='0.0.0.0'.*api_key"),
        serve(model, 0, host="0.0.0.0"),
    ):
        pass
    with serve(model, 0, api_key="secret") as url:
        for key, status in {"secret": 200, "Secret": 401, "": 401}.items():
            body = b'{"prompt": "a", "max_tokens": 1}'
            assert request(url, body=body, Authorization=f"Bearer {key}")[0] == status
        status, _, answer = request(url, path="/v1/chat/completions", Authorization="Bearer secret")
        assert (status, "no chat template" in answer["error"]["message"]) == (400, True)
