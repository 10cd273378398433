"""Rollouts: answers drawn from a model as it is, with what training on them needs.

Letters: n tokens of a prompt and its answer, L MoE layers, K experts per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import UInt

from moelib.core.tree import Nested
from moelib.inference.decode import NO_TOKEN, Decoding, Prompt, Record, decode
from moelib.inference.generate import Settings, drawn_vocab_size, limit_of
from moelib.inference.sampling import Sampling
from moelib.inference.unstack import unstacked
from moelib.models.causal_lm import CausalLM


class Rollout(NamedTuple):
    """An answer to a prompt."""

    ids: list[int]  # Tokens of the answer, with the one that ends it.
    log_probs: list[float]  # Log probability of each under the model that drew it, in nats.
    # Experts of the prompt's tokens and of the answer's but the last; None if they are not known.
    expert_ids: UInt[npt.NDArray, "n L K"] | None = None


def rollouts(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    seeds: Sequence[int],
    vocab_size: int | None = None,
    with_experts: bool = False,
) -> list[Rollout]:
    """Returns an answer to each prompt, drawn from the model's own probabilities.

    The probabilities of tokens from `vocab_size` on count in `log_probs`, as in training, but none
    of these tokens is drawn.

    Args:
        model: The model, under the mesh in context.
        params: Its parameters, cast as in training.
        prompts: Token ids of each prompt; equal ones may repeat.
        stop_ids: Tokens that end an answer.
        max_new_tokens: Maximum number of tokens of an answer.
        seeds: Seed of each answer.
        vocab_size: Number of tokens to draw from; None for the model's.
        with_experts: Whether to record the experts of the tokens.

    Raises:
        PromptError: If a prompt is empty, or has an id outside the vocabulary.
        UserError: If logits are not finite, or a layer without cache hides the experts.
    """
    settings = Settings(max_new_tokens=max_new_tokens, vocab_size=vocab_size)
    drawn_from = drawn_vocab_size(model, settings)
    begun = [
        Prompt(ids, limit_of(i, ids, settings, drawn_from), seed)
        for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    sampling = Sampling(temperature=jnp.float32(1.0))
    decoding = Decoding(sampling, jnp.array(stop_ids, jnp.int32), jnp.int32(drawn_from))
    model, params = unstacked(model, params)
    answers: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    experts: list[list[np.ndarray]] = [[] for _ in prompts]
    ended = np.zeros(len(prompts), bool)
    record: Record = "experts" if with_experts else "log_probs"
    for drawn in decode(model, params, begun, decoding, record=record):
        for i in np.flatnonzero(~ended).tolist():
            if drawn.expert_ids is not None:  # Of the prompt first, then of the last token.
                size = 1 if answers[i] else len(prompts[i])
                experts[i].append(drawn.expert_ids[i, :size])
            answers[i].append(int(drawn.drawn[i]))
            log_probs[i].append(float(drawn.log_prob[i]))
        ended |= drawn.token == NO_TOKEN
        if ended.all():
            break
    return [
        Rollout(ids, log_probs[i], np.concatenate(experts[i]) if experts[i] else None)
        for i, ids in enumerate(answers)
    ]
