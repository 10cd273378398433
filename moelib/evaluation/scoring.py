"""Log-likelihoods: how probable a model finds the continuations of contexts.

Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.context import Nested
from moelib.core.module import functional
from moelib.core.param import cast_parameters
from moelib.core.tree import Batch
from moelib.data.input import PADDING_LABEL, TOKEN_ARRAYS, rows_of_host
from moelib.data.prefetch import host_rows, put_batch
from moelib.evaluation.requests import Request
from moelib.parallel import sharding
from moelib.train.state import batch_sharding

logger = logging.getLogger(__name__)

MIN_LENGTH = 64
BATCH_TOKENS = 1 << 14

_Rows = list[tuple[int, slice]]  # The request of each row of a batch, and the places it scores.


class Score(NamedTuple):
    """What a model says of a continuation.

    Attributes:
        log_prob: Sum of the log-probabilities of its tokens, in nats.
        is_greedy: Whether each of its tokens is the likeliest one in its place.
    """

    log_prob: float
    is_greedy: bool


class Scorer:
    """Scores requests with a model, in batches of few lengths, each compiled once."""

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        max_length: int,
        batch_tokens: int = BATCH_TOKENS,
        train_dtype: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
            model: A language model with a method `logits(batch) -> [B, S, V]`.
            vocab_size: Tokens that mean something; the model's logits beyond them do not count.
            max_length: The most tokens the model is to read.
            batch_tokens: Tokens of a batch, padding included; a batch has one row at least.
            train_dtype: What trainable parameters are cast to.
            mesh: Where parameters lie. None takes them where they are, on one device.

        Raises:
            ValueError: If a size is not positive.
        """
        for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more.")
        self.vocab_size, self.max_length, self.train_dtype = vocab_size, max_length, train_dtype
        self.batch_tokens, self._mesh = batch_tokens, mesh
        everywhere = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._score = jax.jit(_score_fn(model, vocab_size, train_dtype), out_shardings=everywhere)

    def score(
        self,
        params: Nested,
        requests: Sequence[Request],
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[Score]:
        """Returns the score of each request, in their order.

        What does not fit into `max_length` is cut from the left of the context, and a warning says
        of how many requests. On a mesh, to be called by all processes inside `jax.set_mesh(mesh)`.

        Args:
            params: The model's parameters.
            requests: What to score.
            on_batch: Called after each batch with the number of requests done so far.

        Raises:
            ValueError: If a request has no context or no continuation, an id beyond the vocabulary,
                or a continuation longer than max_length; if vocab_size is larger than the model's;
                or if a score is not a number.
        """
        for i, request in enumerate(requests):
            self._check(i, request)
        if num_cut := self.num_cut(requests):
            logger.warning(
                "%d of %d requests are longer than max_length, which is %d tokens: their contexts "
                "are cut from the left.",
                num_cut,
                len(requests),
                self.max_length,
            )
        scores: dict[int, Score] = {}
        before: Any = None  # One batch is read back while the next one runs.
        for rows, batch in itertools.chain(self._batches(requests), [([], {})]):
            after = (rows, self._score(params, self._put(batch))) if batch else None
            if before is not None:
                scores |= _read(*before)
                if on_batch is not None:
                    on_batch(len(scores))
            before = after
        return [scores[i] for i in range(len(requests))]

    def num_cut(self, requests: Sequence[Request]) -> int:
        """Returns how many requests are longer than `max_length` allows."""
        return sum(request.num_tokens > self.max_length + 1 for request in requests)

    def _check(self, index: int, request: Request) -> None:
        context, continuation = map(len, request)
        if not context or not continuation:
            raise ValueError(
                f"Request {index} has {context} tokens of context and {continuation} of "
                "continuation; give it at least one of each."
            )
        if continuation > self.max_length:
            raise ValueError(
                f"Request {index} has a continuation of {continuation} tokens, and max_length is "
                f"{self.max_length}; set it to {continuation} or more, or leave the request out."
            )
        low, high = min(map(np.min, request)), max(map(np.max, request))
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"Request {index} holds id {low if low < 0 else high}, and the vocabulary is "
                f"{self.vocab_size}; encode it with the tokenizer that the model was trained with."
            )

    def _batches(self, requests: Sequence[Request]) -> Iterator[tuple[_Rows, Batch]]:
        """Yields (rows, batch), the longest requests first."""
        ids = [np.concatenate(request)[-(self.max_length + 1) :] for request in requests]
        longest_first = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        of_length = itertools.groupby(longest_first, lambda i: self._padded(len(ids[i]) - 1))
        for length, group in ((length, list(group)) for length, group in of_length):
            shape = (self._num_rows(len(group), length), length)
            for chunk in itertools.batched(group, shape[0]):
                batch = {name: np.zeros(shape, np.int32) for name in TOKEN_ARRAYS}
                batch["target_labels"][:] = PADDING_LABEL
                rows: _Rows = []
                for row, i in enumerate(chunk):
                    end = len(ids[i]) - 1
                    places = slice(end - len(requests[i].continuation), end)
                    batch["input_ids"][row, :end] = ids[i][:-1]
                    batch["target_labels"][row, places] = requests[i].continuation
                    batch["segment_ids"][row, :end] = 1
                    batch["positions"][row, :end] = np.arange(end)
                    rows.append((i, places))
                yield rows, batch

    def _padded(self, num_tokens: int) -> int:
        """Returns the length of a row for so many tokens: a power of two, or max_length."""
        length = max(MIN_LENGTH, 1 << (num_tokens - 1).bit_length())
        ring = self._parts("sequence")
        pieces = 2 * ring if ring > 1 else 1  # Attention takes two of each device.
        parts = math.lcm(pieces, self._parts("residual_sequence"))
        return _round_up(min(length, self.max_length), parts)

    def _num_rows(self, num_requests: int, length: int) -> int:
        """Returns the rows of batches of a length: no more than there is use for."""
        rows = min(max(1, self.batch_tokens // length), 1 << (num_requests - 1).bit_length())
        return _round_up(rows, self._parts("batch"))

    def _parts(self, axis: str) -> int:
        """Returns into how many parts the mesh splits a logical axis."""
        shape = dict(self._mesh.shape) if self._mesh is not None else {}
        return math.prod(shape[name] for name in sharding.mesh_axes(axis, shape))

    def _put(self, batch: Batch) -> dict[str, Any]:
        """Returns the batch as arrays over the mesh, of which this process gives its rows."""
        if self._mesh is None:
            return batch
        num_rows, length = batch["input_ids"].shape
        place = batch_sharding(num_rows, length, self._mesh)
        mine = rows_of_host(num_rows, *host_rows(place, num_rows))
        share = {name: array[mine.start : mine.stop] for name, array in batch.items()}
        return put_batch(share, place, num_rows)


def _score_fn(model: Any, vocab_size: int, train_dtype: str | None) -> Callable[..., Any]:
    """Returns the function (params, batch) -> (log-probabilities of labels [B, S], greedy)."""

    def score(params: Nested, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        params = cast_parameters(params, model.create_parameter_specs_recursively(), train_dtype)
        logits, _ = functional(
            model, prng_key=None, state=params, inputs=(batch,), is_training=False, method="logits"
        )
        if logits.shape[-1] < vocab_size:
            raise ValueError(
                f"vocab_size is {vocab_size}, and the model has {logits.shape[-1]} tokens; take "
                "the tokenizer that the model was trained with."
            )
        known = jnp.arange(logits.shape[-1]) < vocab_size
        logits = jnp.where(known[None, None], logits.astype(jnp.float32), -jnp.inf)
        labels = batch["target_labels"]
        places = jnp.maximum(labels, 0)[..., None]
        picked = jnp.take_along_axis(logits, places, axis=-1)[..., 0]
        log_probs = picked - jax.nn.logsumexp(logits, axis=-1)
        return log_probs, jnp.argmax(logits, axis=-1) == labels

    return score


def _read(rows: _Rows, outputs: Any) -> dict[int, Score]:
    """Returns the scores of a batch, by request. Raises ValueError if one is not a number."""
    log_probs, greedy = (np.asarray(output) for output in outputs)
    scores = {}
    for row, (i, places) in enumerate(rows):
        log_prob = float(np.sum(log_probs[row, places], dtype=np.float64))
        if math.isnan(log_prob):
            raise ValueError(
                f"The log-likelihood of request {i} is not a number: the parameters are not "
                "finite, it seems; take another checkpoint."
            )
        scores[i] = Score(log_prob, bool(np.all(greedy[row, places])))
    return scores


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
