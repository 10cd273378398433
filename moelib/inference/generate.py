"""Text from a model: one that is shown as it is written, or many side by side.

Letters: N prompts, S tokens of a row.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from moelib.core.context import Nested
from moelib.inference.decode import NO_TOKEN, Choice, Prompt, tokens_of_rows
from moelib.inference.sampling import Sampling
from moelib.inference.unstack import unstacked
from moelib.models.causal_lm import CausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts go on. Without temperature they are always the same.

    Attributes:
        max_new_tokens: The most tokens after a prompt, 1 to 2147483647.
        max_length: The most tokens of prompt and text together, 2 to 2147483647; None for any
            number.
        temperature: Divides the logits; 0 takes the likeliest token, whatever the next three are.
        top_k: Draws among as many of the likeliest tokens; None among all.
        top_p: Draws among the likeliest tokens whose probabilities reach this sum, up to 1.
        min_p: Draws among tokens at least so many times as likely as the likeliest; from 0 to 1.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of the tokens
            that stand in the prompt or the text already; 1 changes nothing.
        seed: Decides what is drawn.
        stop_ids: Tokens that end a text; they are no part of it.
        vocab_size: Tokens that mean something, if the model's vocabulary is padded beyond them: the
            others are never drawn. None takes all of the model's.

    Raises:
        ValueError: If one is out of its range.
    """

    max_new_tokens: int
    max_length: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, (inside, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not inside(value):
                raise ValueError(f"{name} is {value}; set it to {words}.")

    def sampling(self) -> Sampling:
        """Returns the steps by which a token is chosen; those that change nothing are left out."""
        plain = self.repetition_penalty == 1
        penalty = None if plain else jnp.float32(self.repetition_penalty)
        if self.temperature == 0:
            return Sampling(penalty)
        return Sampling(
            penalty,
            jnp.float32(max(self.temperature, 1e-6)),
            None if self.top_k is None else jnp.int32(min(self.top_k, _MOST)),
            None if self.top_p == 1 else jnp.float32(self.top_p),
            None if self.min_p == 0 else jnp.float32(self.min_p),
        )


_MOST = (1 << 31) - 1  # As int32 can count.

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda x: 1 <= x <= _MOST, f"1 to {_MOST}"),
    "max_length": (lambda x: 2 <= x <= _MOST, f"2 to {_MOST}"),
    "temperature": (lambda x: 0 <= x < math.inf, "0 or more"),
    "top_k": (lambda x: x >= 1, "1 or more"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and up to 1"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "above 0; 1 changes nothing"),
}


def generate(
    model: CausalLM, params: Nested, prompt: Sequence[int], **settings: Any
) -> Iterator[int]:
    """Returns the tokens that follow a prompt, each as soon as it is known.

    Token n depends on (seed, n) and what stands before it.

    Args:
        model: A language model. Under `jax.set_mesh`, rows and heads of its cache are split as the
            sharding table says.
        params: Its parameters. Those of a `ScanStack` are copied, see `unstacked`.
        prompt: Token ids, at least one.
        **settings: Fields of `Settings`.

    Raises:
        ValueError: If a setting is out of range, or the prompt is empty, too long, or holds an id
            beyond the vocabulary; or, with the token, if its logits are not finite.
    """
    made = Settings(**settings)
    row = Prompt(prompt, _limit(model, prompt, made, "The prompt"), made.seed)
    return _tokens(model, params, row, made)


def _tokens(model: CausalLM, params: Nested, row: Prompt, settings: Settings) -> Iterator[int]:
    for (token,) in tokens_of_rows(*unstacked(model, params), [row], _choice(model, settings)):
        if token == NO_TOKEN:
            return
        yield int(token)


def generate_many(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Sequence[int]],
    *,
    mask: Bool[np.ndarray, "N S"] | None = None,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    ends: Callable[[list[int]], bool] | None = None,
    **settings: Any,
) -> Iterator[list[int]]:
    """Returns the texts that follow prompts, in their order, each when its batch is done.

    A text does not depend on the other prompts: token n of prompt i depends on (seed, i, n), or on
    (seeds[i], n), as if `generate` wrote it with that seed.

    Args:
        model: As for `generate`.
        params: As for `generate`.
        prompts: Token ids of each prompt, at least one; or an array [N, S], with a mask.
        mask: Where an array of prompts holds tokens; padding may stand before or after them.
        seeds: A seed for each prompt, in the place of `seed`.
        batch_size: How many texts are written side by side; all if None.
        ends: Is given the tokens of a text after each that is added, and returns whether it ends.
        **settings: Fields of `Settings`.

    Raises:
        ValueError: As for `generate`, or if batch_size is below 1, or there are not as many seeds
            as prompts.
    """
    made = Settings(**settings)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; set it to 1 or more.")
    if mask is not None:
        prompts = [np.asarray(p)[m].tolist() for p, m in zip(prompts, mask, strict=True)]
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(
            f"seeds has {len(seeds)} numbers for {len(prompts)} prompts; give one for each, or set "
            "seed."
        )
    rows = []
    for i, ids in enumerate(prompts):
        limit = _limit(model, ids, made, f"Prompt {i}")
        seed = (made.seed, i) if seeds is None else (seeds[i], 0)
        rows.append(Prompt(ids, limit, *seed))
    batch_size = max(1, min(batch_size or len(rows), len(rows)))
    return _texts(model, params, rows, made, batch_size, ends)


def _texts(
    model: CausalLM,
    params: Nested,
    rows: Sequence[Prompt],
    settings: Settings,
    batch_size: int,
    ends: Callable[[list[int]], bool] | None,
) -> Iterator[list[int]]:
    choice = _choice(model, settings)
    model, params = unstacked(model, params)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        texts: list[list[int]] = [[] for _ in batch]
        unfinished = set(range(len(batch)))
        for tokens in tokens_of_rows(model, params, batch, choice, num_rows=batch_size):
            for i in list(unfinished):
                if tokens[i] == NO_TOKEN:
                    unfinished.remove(i)
                    continue
                texts[i].append(int(tokens[i]))
                if ends is not None and ends(texts[i]):
                    unfinished.remove(i)
            if not unfinished:
                break
        yield from texts


def _choice(model: CausalLM, settings: Settings) -> Choice:
    return Choice(
        settings.sampling(),
        jnp.array(settings.stop_ids, jnp.int32),
        jnp.int32(_vocab_size(model, settings)),
    )


def _vocab_size(model: CausalLM, settings: Settings) -> int:
    """Returns how many tokens may be drawn. Raises ValueError if the model has not as many."""
    wanted, of_model = settings.vocab_size, model.config.vocab_size
    if wanted is not None and not 1 <= wanted <= of_model:
        raise ValueError(
            f"vocab_size is {wanted}, and the model has {of_model} tokens; generate with the "
            "tokenizer that the model was trained with."
        )
    return of_model if wanted is None else wanted


def _limit(model: CausalLM, ids: Sequence[int], settings: Settings, place: str) -> int:
    """Returns how many tokens may follow a prompt. Raises ValueError if it cannot be continued."""
    vocab_size = _vocab_size(model, settings)
    if not len(ids):
        raise ValueError(f"{place} is empty; give it at least one token, such as end of text.")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{place} holds id {token}; the vocabulary is {vocab_size}.")
    if settings.max_length is None:
        return settings.max_new_tokens
    room = settings.max_length - len(ids)
    if room < 1:
        raise ValueError(
            f"{place} has {len(ids)} tokens, and max_length is {settings.max_length}, the prompt "
            "included; raise it, or cut the prompt."
        )
    return min(room, settings.max_new_tokens)
