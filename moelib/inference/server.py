"""An HTTP server that generates text: the completions of OpenAI's interface, and a page to chat.

    GET /                     the page
    GET /health               {"status": "ok"}
    GET /v1/models            the model
    POST /v1/completions      texts that follow prompts
    POST /v1/chat/completions the next message of a conversation

Requests are answered together, as they arrive (`moelib.inference.batcher`).
"""

import collections
import contextlib
import dataclasses
import functools
import hmac
import importlib.resources
import json
import logging
import queue
import re
import secrets
import select
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from moelib.core.errors import UserError
from moelib.inference.batcher import Batcher, BusyError, Request
from moelib.inference.conversation import ChatFormat, checked_text
from moelib.inference.generate import PromptError, PromptTooLongError, Settings
from moelib.inference.text import TextStream
from moelib.runtime.http_server import Handler, Server, check_address, page_policy
from moelib.runtime.storage import parse_json

logger = logging.getLogger(__name__)

_MAX_BODY = 4 << 20  # Bytes of a request.
_MAX_DISCARDED = 1 << 28  # Bytes that are read of a request that is refused.
_MAX_CHOICES = 16
_PAGES = "/", "/health", "/v1/models"  # Paths of GET, and of POST.
_TEXTS = "/v1/completions", "/v1/chat/completions"
_SECONDS_TO_LOOK = 0.5  # Between looks at whether a client that waits has gone away.

# Fields of a request: name in `Settings`, types, default.
_SAMPLING: Mapping[str, tuple[str, tuple[type, ...], Any]] = {
    "temperature": ("temperature", (int, float), 1.0),
    "top_p": ("top_p", (int, float), 1.0),
    "top_k": ("top_k", (int,), None),
    "min_p": ("min_p", (int, float), 0.0),
    "repetition_penalty": ("repetition_penalty", (int, float), 1.0),
    "seed": ("seed", (int,), None),
}
# Fields that change nothing here, and those that are accepted with these values only.
_IGNORED = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier"))
_FIXED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ServeError(UserError):
    """A request that is refused.

    Attributes:
        status: Status of HTTP.
        code: Short name of the reason; None for others.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Call(NamedTuple):
    """A checked request."""

    prompts: list[list[int]]  # Token ids of each text.
    settings: list[Settings]  # Of each text.
    stop: list[str]  # Strings that end a text.
    stream: bool
    include_usage: bool  # Whether the last event of a stream counts tokens.
    is_chat: bool


class Choice(NamedTuple):
    """An event of a text: a piece, or the end."""

    index: int
    text: str
    reason: str | None = None  # "stop" or "length" at the end.


class TextServer(Server):
    """Serves a model."""

    def __init__(
        self,
        model: Any,
        batcher: Batcher,
        port: int,
        *,
        chat: ChatFormat | None,
        host: str | None = None,
        name: str,
        api_key: str | None = None,
    ) -> None:
        """Binds the port. Arguments are those of `serve`."""
        super().__init__("the model", _Handler, port, host)
        self.model, self.batcher, self.chat = model, batcher, chat
        self.name, self.api_key, self.created = name, api_key, int(time.time())

    def call_of(self, body: Any, *, is_chat: bool) -> Call:
        """Returns the checked body of a request. Raises ServeError."""
        if not isinstance(body, dict):
            raise ServeError(f"The body is {type(body).__name__}; send a JSON object.")
        body = {name: value for name, value in body.items() if value is not None}
        body = _without_fixed(body)
        taken = body.pop
        if (name := taken("model", self.name)) != self.name:
            text = f"model is {name!r:.80}; set it to {self.name!r}, which is served here."
            raise ServeError(text, 404, "model_not_found")
        stream, options = taken("stream", False), taken("stream_options", {})
        stop, choices = taken("stop", []), taken("n", 1)
        stop = [stop] if isinstance(stop, str) else stop
        _check("stream", stream, isinstance(stream, bool), "true or false")
        _check("stream_options", options, isinstance(options, dict), "an object")
        is_text = isinstance(stop, list) and all(isinstance(x, str) and x for x in stop)
        _check("stop", stop, is_text and len(stop) <= 16, "up to 16 texts, none of them empty")
        is_number = isinstance(choices, int) and not isinstance(choices, bool)
        _check("n", choices, is_number and 1 <= choices <= _MAX_CHOICES, f"1 to {_MAX_CHOICES}")
        if (other := "prompt" if is_chat else "messages") in body:
            raise ServeError(
                f"{other} is a field of {_TEXTS[not is_chat]}; send the request there."
            )
        prompts = self._chat_prompt(body) if is_chat else self._prompts(taken("prompt", ""))
        settings = self._settings(body, is_chat=is_chat)
        if unknown := sorted(body):
            raise ServeError(f"{unknown[0]}={body[unknown[0]]!r:.80}: no such field; remove it.")
        number = len(prompts) * choices
        _check("prompt", number, number <= _MAX_CHOICES, f"up to {_MAX_CHOICES} texts in all")
        if is_chat and self.chat is not None:
            stop = [*stop, *self.chat.stop]
        each = [prompt for prompt in prompts for _ in range(choices)]
        seeds = range(settings.seed, settings.seed + number)
        return Call(
            each,
            [_with_seed(settings, seed) for seed in seeds],
            stop,
            stream,
            bool(options.get("include_usage")),
            is_chat,
        )

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Returns the token ids of a text, of texts, of token ids or of lists of token ids."""

        def are_ids(value: Any) -> bool:
            return isinstance(value, list) and all(type(x) is int for x in value)

        prompts = [prompt] if are_ids(prompt) or not isinstance(prompt, list) else prompt
        for each in prompts:
            is_valid = are_ids(each) or isinstance(each, str)
            _check("prompt", each, is_valid, "a text, or a list of token ids")
        encode = lambda text: self.model.tokenizer.encode_prompts([checked_text(text, "prompt")])[0]
        return [encode(each) if isinstance(each, str) else each for each in prompts]

    def _chat_prompt(self, body: dict[str, Any]) -> list[list[int]]:
        if self.chat is None:
            raise ServeError(
                "The model has no chat template; use /v1/completions, or start the server with "
                "--chat_template."
            )
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        return [self.chat.prompt(body.pop("messages", None))]

    def _settings(self, body: dict[str, Any], *, is_chat: bool) -> Settings:
        """Returns the settings of a request, and removes their fields."""
        fields: dict[str, Any] = {}
        for name, (field, types, default) in _SAMPLING.items():
            value = body.pop(name, default)
            words = "an integer" if types == (int,) else "a number"
            is_number = isinstance(value, types) and not isinstance(value, bool)
            _check(name, value, value is default or is_number, words)
            fields[field] = value
        if fields["seed"] is None:
            fields["seed"] = secrets.randbelow(1 << 31)
        # OpenAI's completions have 16 tokens by default; a message ends by itself.
        limit = body.pop("max_tokens", self.model.max_length or 1024 if is_chat else 16)
        is_number = type(limit) is int and 0 < limit < 1 << 31
        _check("max_tokens", limit, is_number, f"an integer from 1 to {(1 << 31) - 1}")
        return Settings(max_new_tokens=limit, max_length=self.model.max_length, **fields)

    def start(self, call: Call) -> tuple[list[Request], "queue.SimpleQueue[tuple[int, Any]]"]:
        """Starts the texts of a call; returns their requests, and the queue of their events."""
        events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        requests: list[Request] = []
        try:
            for index, (ids, settings) in enumerate(zip(call.prompts, call.settings, strict=True)):
                put = functools.partial(_put, events, index)
                requests.append(self.batcher.submit(ids, settings, put, put))
        except UserError:
            for request in requests:
                request.cancel()
            raise
        return requests, events


def _put(events: "queue.SimpleQueue[tuple[int, Any]]", index: int, event: Any) -> None:
    events.put((index, event))


def _with_seed(settings: Settings, seed: int) -> Settings:
    return dataclasses.replace(settings, seed=seed % (1 << 32))


def _check(name: str, value: Any, is_valid: bool, words: str) -> None:
    if not is_valid:
        raise ServeError(f"{name} is {value!r:.80}; set it to {words}.")


def _without_fixed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that have an effect."""
    kept = {}
    for name, value in body.items():
        is_bool = isinstance(value, bool)  # 0 equals False, but asks for log probabilities.
        same = [x for x in _FIXED.get(name, ()) if x == value and isinstance(x, bool) == is_bool]
        if name in _FIXED and not same:
            raise ServeError(f"{name}={value!r:.80} is not supported; remove it.")
        if name not in _FIXED and name not in _IGNORED:
            kept[name] = value
    return kept


class _Handler(Handler):
    """Answers requests."""

    protocol_version = "HTTP/1.1"
    server: TextServer
    _unread = 0  # Bytes of the request that were refused.

    @property
    def policy(self) -> str:  # pyrefly: ignore[bad-override]
        """The policy of the page."""
        return _page()[1]

    def do_GET(self) -> None:  # noqa: N802
        """Sends the page, the model, or a sign of life."""
        self._answer(self._get)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        """Sends texts."""
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        """Calls a method. Errors of the client are answers; others are logged, too."""
        try:
            method(self.path.partition("?")[0])
        except ServeError as error:
            self._send_error(str(error), error.status, error.code)
            self._discard()
        except BusyError as error:
            self._send_error(str(error), 429, "busy", Retry_After="1")
        except PromptError as error:
            is_too_long = isinstance(error, PromptTooLongError)
            code = "context_length_exceeded" if is_too_long else None
            self._send_error(f"The prompt {error.reason}", 400, code)
        except UserError as error:
            self._send_error(str(error), 400)
        except OSError:
            raise
        except Exception as error:
            self._send_error(_logged(error), 500)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what is no GET, HEAD or POST, or no HTTP."""
        del explain
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:  # Only then are the headers those of this request.
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, f"There is no {self.command} here."
            size = self.headers.get("Content-Length", "")
            self._unread = (
                min(int(size), _MAX_DISCARDED) if re.fullmatch(r"[0-9]{1,18}", size) else 0
            )
        self._send_error(message or HTTPStatus(code).phrase, code, Connection="close")
        self._discard()

    def _get(self, path: str) -> None:
        if not self.is_own_host():
            raise ServeError("The Host header names another site.", 403)
        if path == "/":
            self.send(_page()[0], "text/html; charset=utf-8")
        elif path == "/health":
            self._send_json({"status": "ok"})
        elif path == "/v1/models":
            self._check_key()
            self._send_json({"object": "list", "data": [self._model()]})
        elif path in _TEXTS:
            raise ServeError(f"{path} has no {self.command}; send a POST.", 405)
        else:
            raise ServeError(f"There is no {path!r:.80}, only {', '.join(_PAGES + _TEXTS)}.", 404)

    def _model(self) -> dict[str, Any]:
        server = self.server
        fields = {"id": server.name, "object": "model", "created": server.created}
        return fields | {"owned_by": "moelib", "has_chat": server.chat is not None}

    def _post(self, path: str) -> None:
        body = self._body()  # Read first: an answer before it would break the connection.
        if not self.is_own_host() or not self._is_own_origin():
            raise ServeError("The Host or Origin header names another site.", 403)
        self._check_key()
        if path in _PAGES:
            raise ServeError(f"{path} has no POST; send a GET.", 405)
        if path not in _TEXTS:
            raise ServeError(f"There is no {path!r:.80}, only {', '.join(_PAGES + _TEXTS)}.", 404)
        try:
            content = parse_json(body)
        except ValueError as error:
            raise ServeError(f"The body is not JSON in UTF-8: {error!s:.200}.") from error
        call = self.server.call_of(content, is_chat=path.endswith("/chat/completions"))
        requests, events = self.server.start(call)
        try:
            (self._stream if call.stream else self._send_whole)(call, requests, events)
        finally:
            for request in requests:
                request.cancel()

    def _body(self) -> bytes:
        """Returns the body of the request, which must be JSON of a stated and limited size."""
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > 18:
            self.close_connection = True
            raise ServeError("Content-Length is missing or no number; set it.", 411)
        if int(size) > _MAX_BODY:
            self.close_connection = True
            self._unread = min(int(size), _MAX_DISCARDED)
            raise ServeError(f"The body has {size} bytes; send up to {_MAX_BODY}.", 413)
        body = self.rfile.read(int(size))
        # Pages of other sites can only send other types without asking first.
        if self.headers.get_content_type() != "application/json":
            raise ServeError("Content-Type is not application/json; set it.", 415)
        return body

    def _discard(self) -> None:
        """Reads what a client still sends, which else would not see the answer."""
        while self._unread > 0 and (piece := self.rfile.read1(1 << 16)):
            self._unread -= len(piece)

    def _is_own_origin(self) -> bool:
        """Returns whether a browser's request is from the server's own page."""
        origin = self.headers.get("Origin")
        return origin is None or urllib.parse.urlsplit(origin).netloc == self.headers.get("Host")

    def _check_key(self) -> None:
        key, sent = self.server.api_key, self.headers.get("Authorization", "")
        if key is not None and not hmac.compare_digest(f"Bearer {key}".encode(), sent.encode()):
            raise ServeError("The API key is missing or wrong.", 401, "invalid_api_key")

    # -- Texts -----------------------------------------------------------------------------------

    def _choices(
        self,
        call: Call,
        requests: list[Request],
        events: "queue.SimpleQueue[tuple[int, Any]]",
        num_tokens: collections.Counter[int],
    ) -> Iterator[Choice]:
        """Yields the pieces of all texts as they come, each with an end. Raises ServeError.

        Counts the tokens of each text, up to the one with which a stop string ends it.
        """
        decode = self.server.model.tokenizer.decode
        streams = [TextStream(ids, decode, call.stop) for ids in call.prompts]
        unfinished = set(range(len(requests)))
        while unfinished:
            try:
                index, event = events.get(timeout=_SECONDS_TO_LOOK)
            except queue.Empty:
                if self._is_gone():
                    raise ConnectionAbortedError from None
                continue
            if index not in unfinished:
                continue
            if event == "error":
                raise ServeError("The text could not be generated; see the log.", 500)
            reason, piece = None, ""
            if isinstance(event, str):
                reason, piece = event, streams[index].rest
            else:
                num_tokens[index] += 1
                piece = streams[index].add(event)
                reason = "stop" if streams[index].ended else None
            if reason is not None:
                requests[index].cancel()
                unfinished.remove(index)
            if piece or reason:
                yield Choice(index, piece, reason)

    def _is_gone(self) -> bool:
        """Returns whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _send_whole(self, call: Call, requests: list[Request], events: Any) -> None:
        texts, reasons = [""] * len(requests), [""] * len(requests)
        num_tokens: collections.Counter[int] = collections.Counter()
        for index, piece, reason in self._choices(call, requests, events, num_tokens):
            texts[index] += piece
            reasons[index] = reason or reasons[index]
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            message = {"role": "assistant", "content": text}
            content = {"message": message} if call.is_chat else {"text": text}
            choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
            choices.append(choice)
        answer = self._about(call, chunk=False) | {"choices": choices}
        self._send_json(answer | {"usage": _usage(call, num_tokens.total())})

    def _stream(self, call: Call, requests: list[Request], events: Any) -> None:
        """Sends the pieces of the texts as events, as they come."""
        num_tokens: collections.Counter[int] = collections.Counter()
        choices = self._choices(call, requests, events, num_tokens)
        about = self._about(call, chunk=True)
        self.close_connection = True
        self.begin("text/event-stream", Connection="close")
        try:
            if call.is_chat:
                for index in range(len(requests)):
                    delta = {"role": "assistant", "content": ""}
                    self._event(about, {"index": index, "delta": delta, "finish_reason": None})
            for index, piece, reason in choices:
                content = {"delta": {"content": piece} if piece else {}}
                content = content if call.is_chat else {"text": piece}
                choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
                self._event(about, choice)
        except ServeError as error:
            self._data({"error": _error(str(error), error.status, error.code)})
            return
        except OSError:
            raise
        except Exception as error:  # The answer has begun, so that it can have no other status.
            self._data({"error": _error(_logged(error), 500, None)})
            return
        if call.include_usage:
            self._data(about | {"choices": [], "usage": _usage(call, num_tokens.total())})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, about: dict[str, Any], choice: dict[str, Any]) -> None:
        self._data(about | {"choices": [choice]})

    def _data(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: %s\n\n" % json.dumps(content).encode())

    def _about(self, call: Call, *, chunk: bool) -> dict[str, Any]:
        """Returns the fields of an answer that are the same for all its parts."""
        kind = "chat.completion" if call.is_chat else "text_completion"
        return {
            "id": ("chatcmpl-" if call.is_chat else "cmpl-") + secrets.token_hex(12),
            "object": f"{kind}.chunk" if chunk and call.is_chat else kind,
            "created": int(time.time()),
            "model": self.server.name,
        }

    def _send_json(self, content: Any, status: int = 200, **headers: str) -> None:
        self.send(json.dumps(content).encode(), "application/json", status, **headers)

    def _send_error(
        self, message: str, status: int, code: str | None = None, **headers: str
    ) -> None:
        self._send_json({"error": _error(message, status, code)}, status, **headers)


def _logged(error: Exception) -> str:
    """Logs an error that is no client's, and returns the message for the client."""
    logger.error("A request failed.", exc_info=error)
    return f"{type(error).__name__}: see the log of the server"


def _error(message: str, status: int, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message, "type": kind, "param": None, "code": code}


def _usage(call: Call, completion: int) -> dict[str, int]:
    prompt = sum(map(len, call.prompts))
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts | {"total_tokens": prompt + completion}


@functools.cache
def _page() -> tuple[bytes, str]:
    """Returns the page and its policy."""
    page = importlib.resources.files("moelib.inference").joinpath("chat_page.html").read_bytes()
    return page, page_policy(page)


@contextlib.contextmanager
def serve(
    model: Any,
    port: int = 8000,
    *,
    chat: ChatFormat | None = None,
    host: str | None = None,
    name: str = "moelib",
    api_key: str | None = None,
    max_active: int = 16,
    max_requests: int = 64,
) -> Iterator[str]:
    """Serves a model during the body, and yields the address.

    Args:
        model: A `moelib.runs.loading.LoadedModel`.
        port: Port; 0 for any free one.
        chat: Format of conversations; None refuses them.
        host: Address to bind; None for 127.0.0.1, which only this machine reaches.
        name: Name of the model in answers.
        api_key: Key that clients must send; required for addresses that others reach.
        max_active: Number of texts that are generated together.
        max_requests: Number of texts in progress, active or waiting; more are answered by 429.

    Raises:
        UserError: If the port cannot be bound, a number is below 1, or the key is missing.
    """
    check_address(host, port, api_key)
    stop_ids = [*model.stop_ids, *(() if chat is None else chat.stop_ids)]
    numbers = {"max_active": max_active, "max_requests": max_requests}
    batcher = Batcher(model, stop_ids=stop_ids, **numbers)
    server = TextServer(
        model, batcher, port, chat=chat, host=host, name=name, api_key=api_key or None
    )
    with batcher, server.running() as url:
        yield url
