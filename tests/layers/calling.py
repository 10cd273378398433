"""Building a layer and calling it, in one line each."""

import functools
import inspect
from typing import Any

import jax
import numpy as np

from moelib.core.config import InstantiableConfig
from moelib.core.context import OutputCollection
from moelib.core.module import Module, functional


class _Caller(Module):
    """Calls any function."""

    def forward(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


def in_module(fn: Any) -> Any:
    """Returns a function as a module that runs calls it."""
    module = _Caller.default_config().instantiate(parent=None)
    return lambda *args: functional(module, None, {}, (fn, *args), is_training=True)[0]


def build(cfg: InstantiableConfig, **fields: Any) -> Any:
    """Returns the layer of a config, as a root."""
    return cfg.clone(name="layer", **fields).instantiate(parent=None)


def initial(layer: Any, seed: int = 0) -> Any:
    """Returns initial parameters, computed by one compiled program."""
    return _initialized(layer, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def _initialized(layer: Any, key: jax.Array) -> Any:
    return layer.initialize_parameters_recursively(key)


def call_and_collect(
    layer: Any,
    params: Any,
    *args: Any,
    method: str = "forward",
    is_training: bool = True,
    **kw: Any,
) -> tuple[Any, OutputCollection]:
    """Returns (output of a method, OutputCollection), computed by one compiled program.

    Single operations are programs too: twenty of them take longer to compile than one of twenty.
    """
    names = inspect.signature(getattr(layer, method)).parameters
    inputs = {**dict(zip(names, args, strict=False)), **kw}
    arrays = {name: value for name, value in inputs.items() if _is_arrays(value)}
    others = tuple((name, value) for name, value in inputs.items() if name not in arrays)
    return _called(layer, method, is_training, others, params, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # A layer is traced once per shape.
def _called(
    layer: Any,
    method: str,
    is_training: bool,
    others: tuple[tuple[str, Any], ...],
    params: Any,
    arrays: dict[str, Any],
) -> tuple[Any, OutputCollection]:
    inputs, key = {**arrays, **dict(others)}, jax.random.key(1)
    return functional(layer, key, params, inputs, is_training=is_training, method=method)


def _is_arrays(value: Any) -> bool:
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))


def call(layer: Any, params: Any, *args: Any, **kw: Any) -> Any:
    """Returns the output of a method."""
    return call_and_collect(layer, params, *args, **kw)[0]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Returns float32 draws from N(0, scale^2)."""
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def float64(tree: Any) -> Any:
    """Returns a tree of arrays as NumPy float64, for references."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
