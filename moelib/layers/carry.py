"""Values that a transformer layer gives to the next one, besides the residual stream.

A layer declares them by `_create_layer_carry_specs`; they are zeros before the first transformer
layer. Inside, it reads them by `carried` and replaces them by `carry`. Stacks pass them from layer
to layer, through scans and recomputation, with their gradients.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from moelib.core.context import inherited, inheriting
from moelib.core.errors import UserError
from moelib.layers.base import BaseLayer
from moelib.parallel.sharding import constrain

CARRIED = "carried"  # The values of the transformer layer that runs, which contexts inherit.


def carried(layer: BaseLayer, name: str) -> jax.Array:
    """Returns a value from the layers before.

    Raises:
        UserError: If the layer runs outside of a stack.
    """
    return _values(layer)[name]


def carry(layer: BaseLayer, **values: jax.Array) -> None:
    """Replaces values for the layers after this one.

    Raises:
        UserError: If the layer runs outside of a stack.
        ValueError: If a value has another shape or dtype than its spec.
    """
    held = _values(layer)
    for name, value in values.items():
        if (value.shape, value.dtype) != (held[name].shape, held[name].dtype):
            raise ValueError(
                f"{layer._title()}: {name} is {value.dtype} {value.shape}; its spec in "
                f"_create_layer_carry_specs gives {held[name].dtype} {held[name].shape}."
            )
        held[name] = value


def carry_names(layer: BaseLayer) -> tuple[str, ...]:
    """Returns the names of the values that a layer carries, without those of layers inside."""
    return tuple(layer._create_layer_carry_specs(1, 1))


def initial_carry(stack: BaseLayer, x: jax.Array) -> dict[str, jax.Array]:
    """Returns the values before the first layer of a stack; those of a stack around it first.

    Args:
        stack: The stack.
        x: Its input [B, S, D].

    Raises:
        UserError: If two layers declare one name with different shapes or dtypes.
    """
    found = dict(inherited(CARRIED) or {})
    for layer, _ in stack.walk():
        for name, spec in layer._create_layer_carry_specs(*x.shape[:2]).items():
            dtype = jnp.dtype(spec.dtype or x.dtype)
            if name not in found:
                found[name] = constrain(jnp.zeros(spec.shape, dtype), spec.axes)
            if (found[name].shape, found[name].dtype) != (spec.shape, dtype):
                raise UserError(
                    f"{layer._title()} carries {name!r} of {dtype} {spec.shape}, and another layer "
                    f"of {found[name].dtype} {found[name].shape}; give the two different names."
                )
    return found


@contextlib.contextmanager
def carrying(values: dict[str, jax.Array]) -> Iterator[dict[str, jax.Array]]:
    """Yields a copy of the values, which layers inside the block read and replace."""
    held = dict(values)
    with inheriting(**{CARRIED: held}):
        yield held


def put_back(values: dict[str, jax.Array]) -> None:
    """Gives the values after a stack to the stack around it, if there is one."""
    if (around := inherited(CARRIED)) is not None:
        around.update({name: values[name] for name in around})


def _values(layer: BaseLayer) -> dict[str, jax.Array]:
    if (held := inherited(CARRIED)) is None:
        raise UserError(
            f"{layer._title()} ({type(layer).__qualname__}) carries {', '.join(carry_names(layer))}"
            " from layer to layer, and runs outside of a stack; put it into a LoopStack or "
            "ScanStack."
        )
    return held
