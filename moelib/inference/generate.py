"""Generation of text that follows prompts, in batches, streamed token by token.

Letters: N prompts, S tokens of a padded prompt.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from moelib.core.config_types import refuse_unknown
from moelib.core.errors import UserError, refuse_single_strings
from moelib.core.tree import Nested
from moelib.inference.decode import NO_TOKEN, Decoding, Prompt, decode
from moelib.inference.sampling import Sampling
from moelib.inference.text import TextStream, text_of
from moelib.inference.unstack import unstacked
from moelib.models.causal_lm import CausalLM


class PromptError(UserError):
    """A prompt that cannot be continued.

    Attributes:
        index: Index of the prompt, from 0.
        reason: The message without the index.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"Prompt {index} {reason}")
        self.index, self.reason = index, reason


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of generation. Without temperature the text is deterministic.

    Raises:
        UserError: If a value is out of its range.
    """

    max_new_tokens: int = 200  # Maximum number of generated tokens, 1 to 2147483647.
    # Maximum number of tokens of prompt and text, 2 to 2147483647; None for no limit.
    max_length: int | None = None
    # Divisor of the logits, up to 1e9; 0 selects the most likely token, and top_k, top_p and min_p
    # have no effect.
    temperature: float = 0.8
    top_k: int | None = None  # Number of most likely tokens to draw from; None for all.
    top_p: float = 0.95  # Probability mass of the most likely tokens to draw from, 1e-30 to 1.
    # Minimum probability of a drawn token, relative to the most likely one, 0 to 1.
    min_p: float = 0.0
    # Divisor of positive logits, and factor of negative ones, of tokens that occur in the prompt or
    # the text, 1e-9 to 1e9; 1 has no effect.
    repetition_penalty: float = 1.0
    seed: int = 0  # Seed of the draws.
    stop_ids: Sequence[int] = ()  # Ids of tokens that end a text and are not part of it.
    # Number of tokens to draw from, where the model's vocabulary is padded; None for the model's.
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, is_valid, words) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("max_length", "top_k", "vocab_size"):
                continue
            if not (isinstance(value, kind) and is_valid(value)):
                raise UserError(f"{name} is {value!r}; set it to {words}.")
        # Values of the same effect, which float32 and int32 hold.
        if self.temperature:
            object.__setattr__(self, "temperature", max(self.temperature, 1e-6))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", min(self.top_k, _INT32_MAX))

    def sampling(self) -> Sampling:
        """Returns the steps that select a token, without those that have no effect."""
        plain = self.repetition_penalty == 1
        penalty = None if plain else jnp.float32(self.repetition_penalty)
        if self.temperature == 0:
            return Sampling(penalty)
        return Sampling(
            penalty,
            jnp.float32(self.temperature),
            None if self.top_k is None else jnp.int32(self.top_k),
            None if self.top_p == 1 else jnp.float32(self.top_p),
            None if self.min_p == 0 else jnp.float32(self.min_p),
        )


_INT32_MAX = (1 << 31) - 1

_INTEGER, _NUMBER = (int, np.integer), (int, float, np.integer, np.floating)
# Types, range, and both in words.
_RANGES: dict[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "max_new_tokens": (
        _INTEGER,
        lambda x: 1 <= x <= _INT32_MAX,
        f"an integer from 1 to {_INT32_MAX}",
    ),
    "max_length": (_INTEGER, lambda x: 2 <= x <= _INT32_MAX, f"an integer from 2 to {_INT32_MAX}"),
    "temperature": (_NUMBER, lambda x: 0 <= x <= 1e9, "0 to 1e9"),
    "top_k": (_INTEGER, lambda x: x >= 1, "an integer of 1 or more"),
    "top_p": (_NUMBER, lambda x: 1e-30 <= x <= 1, "1e-30 to 1"),
    "min_p": (_NUMBER, lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (_NUMBER, lambda x: 1e-9 <= x <= 1e9, "1e-9 to 1e9; 1 has no effect"),
    "seed": (_INTEGER, lambda x: True, "an integer"),
    "vocab_size": (_INTEGER, lambda x: True, "an integer"),
}


# -- Texts ---------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """A generated text, without the prompt, and its tokens."""

    text: str
    tokens: list[int]


def generate(
    model: Any,
    prompts: Sequence[str | Sequence[int]],
    *,
    stop: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    batch_size: int = 16,
    on_text: Callable[[int, str], None] | None = None,
    **settings: Any,
) -> Iterator[Completion]:
    """Returns the texts that follow prompts, in their order, each when its batch is done.

        model = moelib.load_model("runs/flame")
        for completion in moelib.generate(model, ["Once upon a time"], max_new_tokens=50):
            print(completion.text)

    Args:
        model: A `moelib.runs.loading.LoadedModel`, from `moelib.load_model`.
        prompts: Texts to continue, or their token ids.
        stop: Strings that end a text and are not part of it.
        seeds: A seed per prompt, instead of the one of the settings.
        batch_size: Number of texts generated together.
        on_text: Function called with the index of a prompt and the next piece of its text, as soon
            as it is certain.
        **settings: Fields of `Settings`; max_length is by default the model's.

    Raises:
        PromptError: If a prompt is empty, too long, or neither text nor token ids.
        UserError: If `model` is no loaded model, `prompts` or `stop` is a single string, a setting
            is out of its range, or a stop string is empty.
    """
    _check_arguments(model, prompts, stop)
    fields = {field.name for field in dataclasses.fields(Settings)}
    refuse_unknown("generate", settings, fields)
    if settings.get("max_length") is None:
        settings["max_length"] = model.max_length
    decode_ids, vocab_size = model.tokenizer.decode, model.tokenizer.vocab_size
    encoded = iter(model.tokenizer.encode_prompts([p for p in prompts if isinstance(p, str)]))
    ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    streams: dict[int, TextStream] = {}

    def on_token(i: int, token: int) -> bool:
        if i not in streams:
            streams[i] = TextStream(ids[i], decode_ids, stop)
        piece = streams[i].add(token)
        if on_text is not None:
            on_text(i, piece)
        return streams[i].ended

    def texts() -> Iterator[Completion]:
        for i in range(len(ids)):
            with model.on_mesh():  # Left while the caller has the text.
                tokens = next(generated)
            stream = streams.pop(i, None)
            if stream is not None and on_text is not None:
                on_text(i, stream.rest)
            yield Completion(text_of(tokens, ids[i], decode_ids, stop), tokens)

    with model.on_mesh():
        generated = generate_tokens(
            model.model,
            model.parameters,
            ids,
            Settings(**{"stop_ids": model.stop_ids, "vocab_size": vocab_size, **settings}),
            seeds=seeds,
            batch_size=batch_size,
            on_token=on_token if stop or on_text else None,
        )
    return texts()


def check_model(model: Any) -> None:
    """Raises UserError if an argument is no model from `moelib.load_model`."""
    if not hasattr(model, "on_mesh"):
        raise UserError(f"model is {model!r:.80}; pass a model from moelib.load_model.")


def _check_arguments(model: Any, prompts: Sequence[Any], stop: Sequence[str]) -> None:
    refuse_single_strings(prompts=prompts, stop=stop)
    check_model(model)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence | np.ndarray):
            raise PromptError(i, f"is {prompt!r}; pass a text, or its token ids.")
    if "" in stop:
        raise UserError("stop has an empty string; set it to at least one character (--stop).")


# -- Tokens --------------------------------------------------------------------------------------


def generate_tokens(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    mask: Bool[np.ndarray, "N S"] | None = None,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    on_token: Callable[[int, int], bool] | None = None,
) -> Iterator[list[int]]:
    """Returns the tokens that follow prompts, in their order, each text when its batch is done.

    A text does not depend on the other prompts: token n of prompt i depends on (seed, i, n), or on
    (seeds[i], n), and on the tokens before it.

    Args:
        model: A language model. Under `jax.set_mesh`, the sharding table splits the batch and the
            heads of its cache.
        params: The model's parameters. Those of a `ScanStack` are copied, see `unstacked`.
        prompts: Token ids of each prompt, at least one; or an array [N, S], with a mask.
        settings: Settings of generation.
        mask: Positions of an array of prompts that hold tokens; padding may precede or follow them.
        seeds: A seed per prompt, instead of the one of the settings.
        batch_size: Number of texts generated together; None for all.
        on_token: Function called with the index of a prompt and its next token; returns whether the
            text ends with that token.

    Raises:
        PromptError: If a prompt is empty, too long, or has an id outside the vocabulary.
        UserError: If batch_size is below 1, the number of seeds differs from that of prompts,
            vocab_size exceeds the model's, or logits are not finite.
    """
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; set it to 1 or more.")
    if mask is not None:
        prompts = [np.asarray(p)[m].tolist() for p, m in zip(prompts, mask, strict=True)]
    if seeds is not None and len(seeds) != len(prompts):
        raise UserError(
            f"seeds has {len(seeds)} numbers for {len(prompts)} prompts; set one per prompt."
        )
    if seeds is not None and not all(isinstance(seed, _INTEGER) for seed in seeds):
        raise UserError(f"seeds is {seeds!r:.80}; set it to integers.")
    vocab_size = drawn_vocab_size(model, settings)
    draws = [(settings.seed, i) if seeds is None else (seeds[i], 0) for i in range(len(prompts))]
    begun = [
        Prompt(ids, limit_of(i, ids, settings, vocab_size), *draws[i])
        for i, ids in enumerate(prompts)
    ]
    decoding = Decoding(
        settings.sampling(), jnp.array(settings.stop_ids, jnp.int32), jnp.int32(vocab_size)
    )
    batch_size = max(1, min(batch_size or len(begun), len(begun)))
    return _generate_batches(model, params, begun, decoding, batch_size, on_token)


def _generate_batches(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    batch_size: int,
    on_token: Callable[[int, int], bool] | None,
) -> Iterator[list[int]]:
    model, params = unstacked(model, params)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts: list[list[int]] = [[] for _ in batch]
        unfinished = set(range(len(batch)))
        for tokens, *_ in decode(model, params, batch, decoding, batch_size=batch_size):
            for i in list(unfinished):
                if tokens[i] != NO_TOKEN:
                    texts[i].append(int(tokens[i]))
                    if on_token is None or not on_token(start + i, texts[i][-1]):
                        continue
                unfinished.remove(i)
            if not unfinished:
                break
        yield from texts


def drawn_vocab_size(model: CausalLM, settings: Settings) -> int:
    """Returns the number of tokens to draw from."""
    wanted, available = settings.vocab_size, model.config.vocab_size
    if wanted is not None and not 1 <= wanted <= available:
        raise UserError(
            f"vocab_size={wanted}, but the model has vocab_size={available}; use the tokenizer "
            "that the model was trained with."
        )
    return available if wanted is None else wanted


def limit_of(index: int, ids: Sequence[int], settings: Settings, vocab_size: int) -> int:
    """Returns the maximum number of tokens after a prompt. Raises PromptError."""
    if not len(ids):
        raise PromptError(index, "has no tokens; write at least one character.")
    if not all(isinstance(token, _INTEGER) for token in ids):
        raise PromptError(index, f"is {ids!r:.80}; pass a text, or token ids, which are integers.")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise PromptError(
                index, f"has id {token}, outside the vocabulary of {vocab_size} tokens."
            )
    if settings.max_length is None:
        return settings.max_new_tokens
    room = settings.max_length - len(ids)
    if room < 1:
        raise PromptTooLongError(
            index,
            f"has {len(ids)} tokens, which leaves no room in max_length={settings.max_length}, "
            "by default the length that the model was trained with; shorten the prompt.",
        )
    return min(room, settings.max_new_tokens)
