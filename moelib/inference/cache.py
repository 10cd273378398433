"""The cache of a model, and the model run with it.

A cache is a tree of what each layer keeps of the tokens of each row, with room for a number of
tokens. A model with layers that keep nothing has as its cache the tokens themselves, and is run on
all of them each time.

Letters: B rows, S tokens of a call, L tokens that there is room for, V vocabulary.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from moelib.core.context import Nested
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec
from moelib.layers.base import BaseLayer
from moelib.layers.transformer import BaseStack
from moelib.models.causal_lm import CausalLM
from moelib.parallel.sharding import constrain

logger = logging.getLogger(__name__)

Cache = Any  # A tree of arrays, or the tokens [B, L].


def new_cache(model: CausalLM, params: Nested, batch_size: int, length: int) -> Cache:
    """Returns a cache of zeros with room for `length` tokens of each row."""
    dtype = params["embedding"]["weight"].dtype  # Of the activations.

    def zeros(spec: ParameterSpec) -> Array:
        return constrain(jnp.zeros(spec.shape, spec.dtype or dtype), spec.axes)

    return jax.tree.map(zeros, _specs(model, batch_size, length), is_leaf=is_spec)


def grow_cache(model: CausalLM, cache: Cache, batch_size: int, length: int) -> Cache:
    """Returns the cache with room for `length` tokens of each row."""

    def pad(spec: ParameterSpec, x: Array) -> Array:
        more = [(0, new - old) for old, new in zip(x.shape, spec.shape, strict=True)]
        return constrain(jnp.pad(x, more), spec.axes)

    return jax.tree.map(pad, _specs(model, batch_size, length), cache, is_leaf=is_spec)


def next_logits(
    model: CausalLM,
    params: Nested,
    cache: Cache,
    ids: Int32[Array, "B S"],
    positions: Int32[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> tuple[Float32[Array, "B V"], Cache]:
    """Returns the logits of the token after the last one of each row, and the cache with all in it.

    Args:
        model: A language model.
        params: Its parameters.
        cache: Holds the tokens before these.
        ids: Prompts, or one token of each row.
        positions: Their positions in the row; those of prompts are 0, 1, ...
        mask: False for what is no token: padding after a prompt, rows that are of no interest.

    Raises:
        ValueError: If a layer with a cache does not put it out.
    """
    if not isinstance(cache, dict):
        return _from_all_tokens(model, params, cache, ids, positions, mask)
    last = jnp.maximum(jnp.sum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    batch = {"input_ids": ids, "positions": positions, "segment_ids": mask.astype(jnp.int32)}
    state = _merged(params, cache)
    logits, outputs = functional(
        model, None, state, (batch, last), is_training=False, method="logits_at"
    )
    specs = _specs(model, ids.shape[0], 1)
    return logits.astype(jnp.float32), _updated(specs, outputs.state_updates)


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
    if _keeps_cache(model):
        return model.create_cache_specs_recursively(batch_size, length)
    return ParameterSpec((batch_size, length), ("batch", None), "int32")


@functools.lru_cache(maxsize=8)
def _keeps_cache(model: CausalLM) -> bool:
    """Returns whether every layer of the model's stacks keeps what it needs, and logs if not."""
    without = _layer_that_mixes(model) or _layer_without_cache(model)
    if without is not None:
        logger.warning(
            "%s (%s) keeps no cache: every token is computed from the whole text. Give the layer "
            "that attends _create_layer_cache_specs, or set token_by_token of an ExternalLayer.",
            without.path() or without.name,
            type(without).__qualname__,
        )
    return without is None


def _layer_that_mixes(layer: BaseLayer) -> BaseLayer | None:
    """Returns a layer that sees other tokens and keeps none, or None."""
    if layer.sees_other_tokens:
        return layer
    inside = (child for child in layer.children.values() if isinstance(child, BaseLayer))
    return next(filter(None, map(_layer_that_mixes, inside)), None)


def _layer_without_cache(layer: BaseLayer) -> BaseLayer | None:
    """Returns a layer of a stack that keeps no cache, or else a module without any, or None."""
    for child in layer.children.values():
        if not isinstance(child, BaseLayer):
            continue
        if isinstance(child, BaseStack) or child.create_cache_specs_recursively(1, 1):
            found = _layer_without_cache(child)
            if found is not None:
                return found
        elif isinstance(layer, BaseStack):
            return child
    return None if layer.create_cache_specs_recursively(1, 1) else layer


def _merged(params: Nested, cache: Nested) -> Nested:
    """Returns the parameters with each layer's cache beside its own."""
    inside = {
        name: _merged(params.get(name, {}), part) if isinstance(part, dict) else part
        for name, part in cache.items()
    }
    return {**params, **inside}


def _updated(specs: Any, updates: Any, place: str = "") -> Any:
    """Returns what layers with a cache have put out, split as their specs say."""
    if isinstance(specs, dict):
        updates = updates or {}
        inside = lambda name: f"{place}.{name}" if place else name
        return {n: _updated(part, updates.get(n), inside(n)) for n, part in specs.items()}
    if updates is None:
        raise ValueError(
            f"{place} was not put out, though the layer has cache specs: its forward must use "
            "`self.cache` and call `self.put_cache`, or it must have no such specs."
        )
    return constrain(updates, specs.axes)
