"""A kernel's operands: checks of shapes by letters, and of dtypes; zeros to one width; masks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def check_shapes(kernel: str, operands: Mapping[str, tuple[Any, str]]) -> None:
    """Raises ValueError unless sizes of one letter are equal and above 0.

    Operands are pairs (array or None, a letter per dimension) by name.
    """
    given = {name: (x.shape, dims) for name, (x, dims) in operands.items() if x is not None}
    sizes: dict[str, int] = {}
    fits = all(
        len(shape) == len(dims)
        and all(0 < size == sizes.setdefault(d, size) for d, size in zip(dims, shape, strict=True))
        for shape, dims in given.values()
    )
    if not fits:
        found = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in given.items())
        want = ", ".join(f"[{', '.join(dims)}]" for _, dims in given.values())
        raise ValueError(f"{kernel}: {found} are not {want} with sizes above 0.")


def check_dtypes(kernel: str, floats: Mapping[str, Any], integers: Mapping[str, Any]) -> None:
    """Raises ValueError unless the floats are of one dtype, and the integers are integers."""
    dtypes = {name: x.dtype for name, x in floats.items() if x is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{kernel}: {found} are of several dtypes; cast them to one.")
    for name, x in integers.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{kernel}: {name} are {x.dtype}; they must be integers.")


def of_one_width(*arrays: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """Returns the arrays with zeros after their last axis, up to the widest.

    Of attention's operands, zeros add nothing to scores, and can be cut off the output.
    """
    width = max(x.shape[-1] for x in arrays)
    pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    return tuple(x if x.shape[-1] == width else pad(x) for x in arrays)


def keep_where(mask: Bool[Array, "..."], x: Array) -> Array:
    """Returns `x` where the mask, which may be broadcast, is set, and zeros elsewhere.

    Of a constant, `jnp.where` would make an array of zeros, which JAX moves out of a scan over
    layers and keeps in memory. This zero depends on the mask, and compilers know it.
    """
    return jnp.where(mask, x, (jnp.any(mask) & False).astype(x.dtype))
