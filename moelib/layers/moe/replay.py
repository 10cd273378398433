"""Replay: tokens go to the experts that they visited when they were generated.

Sampler and trainer round differently, so that routers disagree on some tokens, and a ratio of their
probabilities is far from 1 there. Combine weights are computed from the router's present logits.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370. Letters: B batch, S sequence, L MoE layers, K experts per token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.module import Module
from moelib.core.tree import Nested
from moelib.layers.base import BaseLayer
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import ROUTING
from moelib.layers.moe.router import REPLAYED, Router

Path = tuple[str, ...]


def moe_layers(module: Module) -> list[tuple[Path, tuple[int, ...]]]:
    """Returns (path, index among the copies of a scan) of each MoE layer, in the order of calls."""
    return list(_walk(module, (), ()))


def _walk(
    module: Module, path: Path, index: tuple[int, ...]
) -> Iterator[tuple[Path, tuple[int, ...]]]:
    if isinstance(module, MoELayer):
        yield path, index
        return
    copies = module.copies if isinstance(module, BaseLayer) else lambda name: None
    repeated = [name for name in module.children if copies(name) is not None]
    for name, child in module.children.items():
        if name not in repeated:
            yield from _walk(child, (*path, name), index)
    for i in range(len(copies(repeated[0]) or ()) if repeated else 0):
        for name in repeated:
            yield from _walk(module.children[name], (*path, name), (*index, i))


def recorded_experts(model: Module, outputs: Nested) -> Integer[Array, "B S L K"] | None:
    """Returns the experts that MoE layers recorded in a call; None of a model without such layers.

    An id of E or more is no expert's.

    Args:
        model: A model without scans.
        outputs: Module outputs of the call, with `RECORDING`.
    """
    found = []
    for path, _ in moe_layers(model):
        inside = outputs
        for name in path:
            inside = inside[name]
        found.append(inside[ROUTING].expert_ids)
    return jnp.stack(found, axis=2) if found else None


def with_replay(model: Module, state: Nested, expert_ids: Integer[Array, "B S L K"]) -> Nested:
    """Returns parameters of a model with the experts of each token, for one call.

    An id that is no expert's leaves the choice to the router.

    Args:
        model: The model.
        state: Its parameters.
        expert_ids: Experts in each MoE layer, in the order of calls.

    Raises:
        UserError: If the numbers of layers or experts differ, or a router cannot be told.
    """
    numbers: dict[Path, list[int]] = {}
    sizes: dict[Path, list[int]] = {}  # Copies along each scan around the layer.
    for number, (path, index) in enumerate(moe_layers(model)):
        numbers.setdefault(path, []).append(number)
        sizes[path] = [i + 1 for i in index]
    num_layers, top_k = expert_ids.shape[2:]
    found = sum(map(len, numbers.values()))
    if num_layers != found:
        raise UserError(f"expert_ids has {num_layers} MoE layers, but the model {found}.")
    for path, own in numbers.items():
        layer = _layer(model, path)
        router = layer.children["router"]
        if type(router).forward is not Router.forward or layer.config.local_experts is not None:
            raise UserError(
                f"{'.'.join(path)}: {type(router).__qualname__} cannot replay experts; set "
                "replay_routing to False."
            )
        if top_k != (wanted := layer.config.num_experts_per_token):
            raise UserError(
                f"{'.'.join(path)}: expert_ids has {top_k} experts per token, but the layer "
                f"{wanted}."
            )
        index = np.reshape(own, sizes[path])
        ids = jnp.moveaxis(expert_ids[:, :, index], (0, 1), (index.ndim, index.ndim + 1))
        nested: Any = {REPLAYED: ids}
        for name in reversed((*path, "router")):
            nested = {name: nested}
        state = tree.merge(state, nested)
    return state


def _layer(model: Module, path: Sequence[str]) -> Any:
    for name in path:
        model = model.children[name]
    return model
