"""Generation for requests that arrive at any time: each step gives every active one a token.

A thread of its own runs the model. The batch has as many rows as active requests, rounded up to a
power of two. When requests arrive, their prompts are read together, and their rows join the batch.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from moelib.core.errors import UserError
from moelib.inference.decode import (
    MIN_CACHE,
    NO_TOKEN,
    NOT_FINITE,
    DecodeState,
    Decoding,
    Prompt,
    advance,
    arrange,
    begin,
    padded,
    padded_length,
    unsplit_sequences,
)
from moelib.inference.generate import Settings, drawn_vocab_size, limit_of
from moelib.inference.sampling import Sampling
from moelib.inference.unstack import unstacked
from moelib.parallel import sharding

logger = logging.getLogger(__name__)

_MAX_PROMPTS = 8  # Prompts that are read together; texts in progress wait meanwhile.

# Dtype of each setting of a row, and its value without effect.
_SETTINGS = {
    "repetition_penalty": (jnp.float32, 1.0),
    "temperature": (jnp.float32, 0.0),
    "top_k": (jnp.int32, (1 << 31) - 1),
    "top_p": (jnp.float32, 1.0),
    "min_p": (jnp.float32, 0.0),
}
_ALWAYS = "repetition_penalty", "temperature"  # A request that joins changes no program by these.

Reason = Literal["stop", "length", "error"]  # Of the end: a stop token, the limit, or an error.


class BusyError(UserError):
    """More requests than the batcher accepts."""


@dataclasses.dataclass(eq=False)
class Request:
    """A text in progress."""

    ids: Sequence[int]  # Token ids of the prompt.
    settings: Settings
    limit: int  # Maximum number of tokens to generate.
    # Called by the thread of the batcher: with each token, and with the reason of the end.
    on_token: Callable[[int], None]
    on_end: Callable[[Reason], None]
    num_tokens: int = 0  # Given to `on_token` so far.
    ended: bool = False

    def cancel(self) -> None:
        """Ends the text, from any thread; neither function is called for later tokens."""
        self.ended = True

    def end(self, reason: Reason) -> None:
        """Ends the text, and says so."""
        if not self.ended:
            self.ended = True
            self.on_end(reason)

    def give(self, token: int) -> None:
        """Gives the next token of the model, which may be the sign of an end."""
        if self.ended:
            return
        if token in (NO_TOKEN, NOT_FINITE):
            self.end("stop" if token == NO_TOKEN else "error")
            return
        self.num_tokens += 1
        self.on_token(token)
        if self.num_tokens == self.limit:
            self.end("length")


class Batcher:
    """Generates the texts of requests together, in a thread that ends with the `with` block."""

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Sequence[int] | None = None,
        max_active: int = 16,
        max_requests: int = 64,
    ) -> None:
        """Prepares the thread.

        Args:
            model: A `moelib.runs.loading.LoadedModel`.
            stop_ids: Ids of tokens that end a text; None for those of the model.
            max_active: Number of texts that are generated together.
            max_requests: Number of requests in progress, active or waiting; more are refused.

        Raises:
            UserError: If a number is below 1.
        """
        for name, value in {"max_active": max_active, "max_requests": max_requests}.items():
            if value < 1:
                raise UserError(f"{name} is {value}; set it to 1 or more.")
        self._loaded, self._max_active, self._max_requests = model, max_active, max_requests
        self._stop_ids = jnp.array(model.stop_ids if stop_ids is None else stop_ids, jnp.int32)
        self._vocab_size = drawn_vocab_size(
            model.model, Settings(vocab_size=model.tokenizer.vocab_size)
        )
        self._condition = threading.Condition()
        self._waiting: list[Request] = []
        self._rows: list[Request] = []  # Requests of the first rows of the state.
        self._state: DecodeState | None = None
        self._tokens: Any = None  # Of the last step, not yet given to the requests.
        self._room = 0  # Tokens that the cache has room for.
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def __enter__(self) -> "Batcher":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    @property
    def num_requests(self) -> int:
        """Number of requests in progress."""
        return sum(not request.ended for request in (*self._waiting, *self._rows))

    def submit(
        self,
        ids: Sequence[int],
        settings: Settings,
        on_token: Callable[[int], None],
        on_end: Callable[[Reason], None],
    ) -> Request:
        """Adds a request. Its tokens depend on its prompt and settings, not on other requests.

        Args:
            ids: Token ids of the prompt.
            settings: Settings of the text, without `stop_ids` and `vocab_size`.
            on_token: Called with each token.
            on_end: Called once, unless the request is cancelled.

        Raises:
            PromptError: If the prompt is empty, too long, or has an id outside the vocabulary.
            BusyError: If `max_requests` are in progress.
            UserError: If `stop_ids` or `vocab_size` is set, which all requests share.
        """
        if settings.stop_ids or settings.vocab_size is not None:
            raise UserError(
                f"settings has stop_ids={settings.stop_ids} and vocab_size={settings.vocab_size}; "
                "set the batcher's stop_ids instead, and leave them unset."
            )
        limit = limit_of(0, ids, settings, self._vocab_size)
        request = Request(ids, settings, limit, on_token, on_end)
        with self._condition:
            if self._is_closed or self.num_requests >= self._max_requests:
                raise BusyError(
                    f"{self.num_requests} requests are in progress, of max_requests="
                    f"{self._max_requests}; try again later."
                )
            self._waiting.append(request)
            self._condition.notify()
        return request

    # -- The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        new: list[Request] | None = []
        with self._loaded.on_mesh():
            self._model, self._params = unstacked(self._loaded.model, self._loaded.parameters)
            while (new := self._next()) is not None:
                try:
                    self._step(new)
                except Exception:
                    logger.exception("A step of %d requests failed.", len(self._rows) + len(new))
                    self._end_all([*self._rows, *new])
        with self._condition:
            self._end_all([*self._rows, *self._waiting])

    def _end_all(self, requests: Sequence[Request]) -> None:
        """Ends requests that cannot go on."""
        for request in requests:
            request.end("error")
        self._rows, self._state, self._tokens = [], None, None

    def _next(self) -> list[Request] | None:
        """Waits for work, and returns the requests that become active; None after the last."""
        with self._condition:
            while not (self._is_closed or self._waiting or self._rows):
                self._condition.wait()
            if self._is_closed:
                return None
            self._waiting = [request for request in self._waiting if not request.ended]
            active = sum(not request.ended for request in self._rows)
            number = min(self._max_active - active, _MAX_PROMPTS)
            new, self._waiting = self._waiting[:number], self._waiting[number:]
            return new

    def _step(self, new: list[Request]) -> None:
        """Starts to compute a token of each request, and gives out those of the last step."""
        # A token of the last step may not be counted yet.
        longest = max((len(x.ids) + x.num_tokens + 1 for x in self._rows), default=0)
        ended = sum(request.ended for request in self._rows)
        if new or longest > self._room or 2 * ended >= len(self._rows):
            self._give()
            self._arrange(new)
        if self._state is not None:
            with unsplit_sequences():
                state, drawn = advance(self._model, self._params, self._state, self._decoding)
            self._give()
            self._state, self._tokens = state, drawn.token

    def _give(self) -> None:
        """Gives the tokens of the last step to their requests."""
        if self._tokens is not None:
            tokens, self._tokens = np.asarray(self._tokens).tolist(), None
            for request, token in zip(self._rows, tokens, strict=False):
                request.give(token)

    def _arrange(self, new: list[Request]) -> None:
        """Makes a state of the requests that have not ended, and of new ones."""
        states, size, begun = [], 0, []
        kept = [i for i, request in enumerate(self._rows) if not request.ended]
        if kept and self._state is not None:
            states, size = [self._state], len(self._state.token)
        if new:
            try:
                state, begun = self._begin(new)
            except Exception:  # Texts in progress go on.
                logger.exception("The prompts of %d requests failed.", len(new))
                for request in new:
                    request.end("error")
                new = []
            else:
                states.append(state)
        requests = [self._rows[i] for i in kept] + new
        self._state, self._rows = None, requests
        longest = max((len(x.ids) + x.num_tokens + 2 for x in requests), default=0)
        self._room = max(padded_length(max(longest, MIN_CACHE)), self._room if kept else 0)
        if requests:
            num_rows, _ = sharding.padded_batch(1 << (len(requests) - 1).bit_length(), 1)
            rows = np.full(num_rows, -1, np.int32)
            rows[: len(requests)] = [*kept, *range(size, size + len(new))]
            self._state = arrange(self._model, states, self._room, jnp.asarray(rows))
            self._decoding = self._decoding_of(requests, num_rows)
        for request, token in zip(new, begun, strict=True):
            request.give(token)

    def _begin(self, new: list[Request]) -> tuple[DecodeState, list[int]]:
        """Returns the state of new requests after their prompts, and their first tokens."""
        longest = max(len(request.ids) for request in new)
        prompts = [Prompt(x.ids, x.limit, x.settings.seed) for x in new]
        ids, state = padded(prompts, 1 << (len(new) - 1).bit_length(), longest)
        decoding = self._decoding_of(new, len(ids))
        room = padded_length(longest + 1)
        state, drawn = begin(self._model, self._params, ids, state, decoding, room)
        return state, np.asarray(drawn.token)[: len(new)].tolist()

    def _decoding_of(self, requests: list[Request], num_rows: int) -> Decoding:
        """Returns the settings of each row. Filters that no request uses are omitted."""
        columns = {}
        for name, (dtype, off) in _SETTINGS.items():
            values = [getattr(request.settings, name) for request in requests]
            values = [off if value is None else value for value in values]
            is_used = name in _ALWAYS or set(values) != {off}
            padded_values = [*values, *[off] * (num_rows - len(values))]
            columns[name] = jnp.asarray(padded_values, dtype) if is_used else None
        return Decoding(Sampling(**columns), self._stop_ids, jnp.int32(self._vocab_size))
