"""Models with loops instead of scans, and stacked weights as separate arrays, to generate faster.

A scan copies each layer's weights out of the stack for each token, and its cache out and back. CPUs
and GPUs copy even a slice at a constant index.
"""

import functools
from typing import Any

import jax

from moelib.core.config_modifier import replace_layer_config_recursively
from moelib.core.module import Module
from moelib.core.tree import Nested
from moelib.layers.feed_forward import FeedForward
from moelib.layers.transformer import BaseStack, LoopStack, ScanStack
from moelib.models.causal_lm import CausalLM


@jax.tree_util.register_pytree_node_class
class _Parts(tuple[Any, ...]):
    """An array as the slices along its first axis, for a layer that iterates over them."""

    def astype(self, dtype: Any) -> "_Parts":
        return _Parts(part.astype(dtype) for part in self)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: Any) -> "_Parts":
        del aux
        return cls(parts)


def unstacked(model: CausalLM, params: Nested) -> tuple[CausalLM, Nested]:
    """Returns the same model with loops instead of scans, and its parameters as separate arrays.

    The arrays are copies, so release the stacked parameters if memory is short. A model without
    scans and its parameters are returned as they are.
    """
    return _with_loops(model), _unstacked(model, params)


@functools.lru_cache(maxsize=8)  # The same object, so that its programs are compiled once.
def _with_loops(model: CausalLM) -> CausalLM:
    while _has_scan(model):  # Once per level of nested scans.
        cfg = model.config.clone()
        replace_layer_config_recursively(cfg, ScanStack, _loop)
        model = cfg.instantiate(parent=None)
    return model


def _has_scan(module: Module) -> bool:
    return type(module) is ScanStack or any(map(_has_scan, module.children.values()))


def _loop(cfg: BaseStack.Config) -> LoopStack.Config:
    fields = {name: value for name, value in cfg.items() if name != "klass"}
    return LoopStack.default_config().set(**fields | {"remat": None})


@functools.partial(jax.jit, static_argnums=0)
def _unstacked(module: Module, params: Nested) -> Nested:
    if type(module) is FeedForward:
        is_quantized = module.create_parameter_specs_recursively()["up"].quantization is not None
        return params if is_quantized else params | {"up": _Parts(params["up"])}
    if type(module) is ScanStack:
        return _as_loop(module, params)
    inside = module.children.keys() & params.keys()
    return params | {name: _unstacked(module.children[name], params[name]) for name in inside}


def _as_loop(stack: ScanStack, params: Nested) -> Nested:
    """Returns the parameters of a ScanStack under the names of a LoopStack."""
    layers = {}
    for name, part in params.items():
        layer, copies = stack.children[name], stack.copies(name)
        if copies is None:
            layers[name] = _unstacked(layer, part)
        for i, copy in enumerate(copies or ()):
            layers[copy] = _unstacked(layer, jax.tree.map(lambda x, i=i: x[i], part))
    return layers
