"""The cache of a model, and the model run with it.

A cache is a tree of the arrays that each layer keeps of earlier tokens, with room for a number of
tokens. If some layer keeps none, the cache is the tokens themselves, and the model is run on all of
them at each step.

Letters: B batch, S tokens of a call, L tokens that the cache has room for, V vocabulary.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.tree import Nested
from moelib.layers.base import BaseLayer
from moelib.layers.moe.recording import RECORDING
from moelib.layers.moe.replay import recorded_experts
from moelib.layers.transformer import BaseStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.models.multi_token_prediction import MULTI_TOKEN
from moelib.parallel.sharding import constrain

logger = logging.getLogger(__name__)

Cache = Any  # A tree of arrays, or the tokens [B, L].


def new_cache(model: CausalLM, params: Nested, batch_size: int, length: int) -> Cache:
    """Returns a cache of zeros with room for `length` tokens of each sequence."""
    dtype = params["embedding"]["weight"].dtype  # The dtype of the activations.

    def zeros(spec: ParameterSpec) -> Array:
        return constrain(jnp.zeros(spec.shape, spec.dtype or dtype), spec.axes)

    return jax.tree.map(zeros, _specs(model, batch_size, length), is_leaf=is_spec)


def arrange_caches(
    model: CausalLM, caches: Sequence[Cache], length: int, rows: Int32[Array, "B"] | None = None
) -> Cache:
    """Returns a cache of some sequences of caches, with room for `length` tokens of each.

    Args:
        model: The model of the caches.
        caches: Caches with room for `length` tokens or fewer; one without `rows`.
        length: Number of tokens that the new cache has room for.
        rows: Index of each sequence in the joined sequences of the caches; None for all.
    """

    def arranged(spec: ParameterSpec, *parts: Array) -> Array:
        batch = spec.axes.index("batch")

        def grown(x: Array) -> Array:
            sizes = zip(x.shape, spec.shape, strict=True)
            more = [(0, 0 if i == batch else new - old) for i, (old, new) in enumerate(sizes)]
            return jnp.pad(x, more)

        if rows is None:
            (x,) = map(grown, parts)
        else:
            x = jnp.take(jnp.concatenate([*map(grown, parts)], batch), rows, batch)
        return constrain(x, spec.axes)

    return jax.tree.map(arranged, _specs(model, 1, length), *caches, is_leaf=is_spec)


def next_logits(
    model: CausalLM,
    params: Nested,
    cache: Cache,
    ids: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    mask: Bool[Array, "B S"],
    record: bool = False,
) -> tuple[Float32[Array, "B V"], Cache, Any]:
    """Returns the logits of the token after the last one of each sequence, and the new cache.

    The tokens are prompts, with the positions 0, 1, ..., or one token of each sequence. The mask is
    False for padding after a prompt and for sequences that have ended. The third value is the
    experts of the tokens, [B, S, L, K] of L MoE layers, if `record` asks for them, else None.

    Raises:
        ValueError: If a layer with cache specs returns no new values for it.
    """
    if not isinstance(cache, dict):
        if record:
            raise UserError(
                "A layer keeps no cache of earlier tokens, so that the experts of new tokens are "
                "not known; set replay_routing to False."
            )
        return *_from_all_tokens(model, params, cache, ids, positions, mask), None
    last = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    batch = {"input_ids": ids, "positions": positions, "segment_ids": mask.astype(jnp.int32)}
    state = tree.merge(params, cache)
    asked = {RECORDING: True} if record else {}
    logits, outputs = functional(
        model,
        None,
        state,
        (batch, last),
        is_training=False,
        method="logits_at",
        inherited=asked,
    )
    updates = tree.by_path(outputs.state_updates)

    def updated(path: str, spec: ParameterSpec) -> Array:
        if path not in updates:
            raise ValueError(
                f"{path.replace('/', '.')} has no new value, though its layer has cache specs: "
                "forward must read `self.cache` and call `self.put_cache`."
            )
        return constrain(updates[path], spec.axes)

    cache = tree.map_by_path(updated, _specs(model, len(ids), 1))
    experts = recorded_experts(model, outputs.module_outputs) if record else None
    return logits.astype(jnp.float32), cache, experts


def _from_all_tokens(
    model: CausalLM, params: Nested, tokens: Array, ids: Array, positions: Array, mask: Array
) -> tuple[Array, Array]:
    rows = jnp.arange(len(ids))[:, None]
    tokens = constrain(tokens.at[rows, positions].set(ids), ("batch", None))
    last = jnp.max(jnp.where(mask, positions, 0), axis=1)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    inside = (index <= last[:, None]) & jnp.any(mask, axis=1, keepdims=True)
    batch = {"input_ids": tokens, "positions": index, "segment_ids": inside.astype(jnp.int32)}
    logits, _ = functional(
        model, None, params, (batch, last), is_training=False, method="logits_at"
    )
    return logits.astype(jnp.float32), tokens


def _specs(model: CausalLM, batch_size: int, length: int) -> Any:
    if _has_cache(model):
        specs = model.create_cache_specs_recursively(batch_size, length)
        return {name: inside for name, inside in specs.items() if name != MULTI_TOKEN}
    return ParameterSpec((batch_size, length), ("batch", None), "int32")


def _mixes_nothing(layer: BaseLayer) -> bool:
    return isinstance(layer, TransformerLayer) and layer.config.self_attention is None


@functools.lru_cache(maxsize=8)
def _has_cache(model: CausalLM) -> bool:
    """Returns whether every layer caches the earlier tokens it needs; logs one that does not."""
    layers = [layer for layer, _ in model.walk()]
    blocks = [x for x in layers if isinstance(x.parent, BaseStack) and not _mixes_nothing(x)]
    attending = [layer for layer in layers if layer.sees_other_tokens]
    empty = [x for x in (*blocks, model) if not x.create_cache_specs_recursively(1, 1)]
    found = [*attending, *empty]
    for without in found[:1]:
        logger.warning(
            "%s (%s) has no cache: every token is computed from the whole text. Give the layer "
            "that attends _create_layer_cache_specs, or set token_by_token of an ExternalLayer.",
            without.path() or without.name,
            type(without).__qualname__,
        )
    return not found
