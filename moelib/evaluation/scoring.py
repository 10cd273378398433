"""Log-likelihoods of continuations under a language model.

Letters: B batch, S tokens of a sequence, N scored tokens of a sequence, D model, V vocabulary.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.precision import cast_parameters
from moelib.core.tree import Batch, Nested
from moelib.data.batches.input import PADDING_LABEL, TOKEN_ARRAYS
from moelib.data.batches.prefetch import host_rows, put_batch
from moelib.evaluation.requests import Request
from moelib.parallel import sharding
from moelib.train.state import batch_sharding

logger = logging.getLogger(__name__)

BATCH_TOKENS = 1 << 14
_MIN_LENGTH = 64  # Minimum padded length of a sequence.
_MIN_SCORED = 16  # Minimum padded number of scored tokens of a sequence.
_LOGITS_BYTES = 1 << 27  # Maximum size of the logits that a device holds at once.

_Shape = tuple[int, int]  # Padded length of a sequence and number of its scored tokens.


class Score(NamedTuple):
    """The score of a continuation."""

    log_prob: float  # Log-probability of the continuation, in nats.
    is_greedy: bool  # Whether each of its tokens is the most likely one.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores requests with a model, in batches of few shapes, each compiled once.

    Raises:
        UserError: If a size is not positive, or vocab_size exceeds the model's.
    """

    # A language model with methods `hidden(batch) -> [B, S, D]` and `head(hidden) -> [B, S, V]`.
    model: Any
    vocab_size: int  # Number of the tokenizer's tokens; logits of others are excluded.
    max_length: int  # Maximum number of tokens of a sequence.
    # Number of tokens of a batch, padding included, if a sequence is not longer.
    batch_tokens: int = BATCH_TOKENS
    # Dtype that trainable parameters are cast to; None for their own.
    train_dtype: str | None = None
    mesh: jax.sharding.Mesh | None = None  # Mesh that holds the parameters; None for one device.

    def __post_init__(self) -> None:
        for name in ("max_length", "batch_tokens"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"{name} is {value}; set it to 1 or more.")
        if self.vocab_size > (available := self.model.config.vocab_size):
            raise UserError(
                f"vocab_size={self.vocab_size}, but the model has vocab_size={available}; use the "
                "tokenizer that the model was trained with."
            )

    def score(
        self,
        params: Nested,
        requests: Sequence[Request],
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[Score]:
        """Returns the scores of requests, in their order.

        A context that does not fit into `max_length` is cut from the left, and a warning counts
        such requests. On a mesh, all processes must call this inside `jax.set_mesh(mesh)`.

        Args:
            params: The model's parameters.
            requests: Continuations to score.
            on_batch: Function called after each batch with the number of requests done so far.

        Raises:
            UserError: If a request has an empty context or continuation, or a continuation longer
                than max_length.
            ValueError: If a score is not a number.
        """
        for i, request in enumerate(requests):
            self._check(i, request)
        if num_cut := self.num_cut(requests):
            logger.warning(
                "%d of %d requests exceed max_length=%d tokens: their contexts are cut from the "
                "left.",
                num_cut,
                len(requests),
                self.max_length,
            )
        scores: dict[int, Score] = {}
        for indices, outputs in self._outputs(params, requests):
            scores |= _read(requests, indices, outputs)
            if on_batch is not None:
                on_batch(len(scores))
        return [scores[i] for i in range(len(requests))]

    def _outputs(
        self, params: Nested, requests: Sequence[Request]
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """Yields the indices of requests and their outputs, while the next batch runs."""
        previous = None
        for indices, num_scored, batch in self._batches(requests):
            current = indices, self._run(params, batch, num_scored)
            if previous is not None:
                yield previous
            previous = current
        if previous is not None:
            yield previous

    def num_cut(self, requests: Sequence[Request]) -> int:
        """Returns the number of requests that exceed `max_length`."""
        return sum(request.num_tokens > self.max_length + 1 for request in requests)

    def _check(self, index: int, request: Request) -> None:
        context, continuation = map(len, request)
        if not context or not continuation:
            raise UserError(
                f"Request {index} has {context} tokens of context and {continuation} of "
                "continuation; each needs at least one."
            )
        if continuation > self.max_length:
            raise UserError(
                f"Request {index} has a continuation of {continuation} tokens, but max_length is "
                f"{self.max_length}; set max_length to at least {continuation}."
            )

    def _batches(self, requests: Sequence[Request]) -> Iterator[tuple[Sequence[int], int, Batch]]:
        """Yields (indices of requests, number of scored tokens, batch), the longest first."""
        ids = [np.concatenate(request)[-(self.max_length + 1) :] for request in requests]
        shapes = [
            self._padded(len(all_ids) - 1, len(request.continuation))
            for all_ids, request in zip(ids, requests, strict=True)
        ]
        by_shape = lambda i: shapes[i]
        order = sorted(range(len(ids)), key=by_shape, reverse=True)
        for (length, num_scored), group in itertools.groupby(order, by_shape):
            indices = list(group)
            batch_size = self._batch_size(len(indices), length)
            for chunk in itertools.batched(indices, batch_size):
                batch = {name: np.zeros((batch_size, length), np.int32) for name in TOKEN_ARRAYS}
                batch["first_scored"] = np.zeros(batch_size, np.int32)
                batch["target_labels"][:] = PADDING_LABEL
                for row, i in enumerate(chunk):
                    end = len(ids[i]) - 1
                    first = end - len(requests[i].continuation)
                    batch["input_ids"][row, :end] = ids[i][:-1]
                    batch["target_labels"][row, first:end] = requests[i].continuation
                    batch["segment_ids"][row, :end] = 1
                    batch["positions"][row, :end] = np.arange(end)
                    batch["first_scored"][row] = first
                yield chunk, num_scored, batch

    def _padded(self, num_tokens: int, num_scored: int) -> _Shape:
        """Returns powers of two, up to the maximum length, padded to what the mesh divides."""
        round_up = lambda n, least: min(max(least, 1 << (n - 1).bit_length()), self.max_length)
        _, length = sharding.padded_batch(1, round_up(num_tokens, _MIN_LENGTH))
        return length, round_up(num_scored, _MIN_SCORED)

    def _batch_size(self, num_requests: int, length: int) -> int:
        """Returns the batch size for sequences of a length, not larger than needed."""
        size = min(max(1, self.batch_tokens // length), 1 << (num_requests - 1).bit_length())
        return sharding.padded_batch(size, 1)[0]

    def _run(self, params: Nested, batch: Batch, num_scored: int) -> Any:
        if self.mesh is not None:  # This process provides its own sequences.
            batch_size, length = batch["input_ids"].shape
            split = batch_sharding(batch_size, length, self.mesh)
            mine = host_rows(split, batch_size)
            share = {name: array[mine.start : mine.stop] for name, array in batch.items()}
            batch = put_batch(share, split, batch_size)
        return _score(self.model, self.vocab_size, self.train_dtype, num_scored, params, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _score(
    model: Any,
    vocab_size: int,
    train_dtype: str | None,
    num_scored: int,
    params: Nested,
    batch: Batch,
) -> tuple[Float32[Array, "B N"], Bool[Array, "B N"]]:
    """Returns the log-probabilities of the labels, and whether each label is the most likely token.

    The head is applied to scored positions only, a few at a time.
    """
    params = cast_parameters(params, model.create_parameter_specs_recursively(), train_dtype)

    def run(method: str, inputs: Any) -> Array:
        outputs, _ = functional(
            model, prng_key=None, state=params, inputs=(inputs,), is_training=False, method=method
        )
        return outputs

    def score_position(inputs: tuple[Float[Array, "B D"], Int[Array, "B"]]) -> tuple[Array, Array]:
        hidden, labels = inputs
        logits = run("head", hidden[:, None])[:, 0].astype(jnp.float32)  # [B, V]
        known = jnp.arange(logits.shape[-1])[None] < vocab_size
        logits = jnp.where(known, logits, -jnp.inf)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        return picked - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == labels

    labels = batch["target_labels"]
    batch_size, length = labels.shape
    offsets = jnp.arange(num_scored, dtype=jnp.int32)[None]
    positions = jnp.minimum(batch["first_scored"][:, None] + offsets, length - 1)  # [B, N]
    hidden = jnp.take_along_axis(run("hidden", batch), positions[..., None], axis=1)  # [B, N, D]
    labels = jnp.take_along_axis(labels, positions, axis=1)
    per_device = batch_size * model.config.vocab_size / sharding.num_parts("batch")
    chunk = max(1, min(num_scored, int(_LOGITS_BYTES / (4 * per_device))))
    by_position = (hidden.swapaxes(0, 1), labels.T)
    outputs = jax.lax.map(score_position, by_position, batch_size=chunk)
    return jax.tree.map(lambda x: sharding.constrain(x.T, (None, None)), outputs)


def _read(requests: Sequence[Request], indices: Sequence[int], outputs: Any) -> dict[int, Score]:
    """Returns the scores of a batch by request. Raises ValueError if one is not a number."""
    log_probs, greedy = (np.asarray(output) for output in outputs)
    scores = {}
    for row, i in enumerate(indices):
        scored = slice(len(requests[i].continuation))
        log_prob = float(np.sum(log_probs[row, scored], dtype=np.float64))
        if math.isnan(log_prob):
            raise ValueError(
                f"The log-likelihood of request {i} is not a number: the parameters are not "
                "finite; choose another checkpoint."
            )
        scores[i] = Score(log_prob, bool(np.all(greedy[row, scored])))
    return scores
