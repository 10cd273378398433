"""Activations of feed-forward layers, gated and plain."""

import enum

import jax
from jaxtyping import Array, Float


class Activation(enum.Enum):
    """What stands between the two matmuls of a feed-forward layer."""

    SWIGLU = "swiglu"  # silu(gate) * up. Source: Shazeer, arXiv:2002.05202.
    GEGLU = "geglu"  # gelu(gate) * up.
    GELU = "gelu"
    SILU = "silu"
    RELU = "relu"

    @property
    def num_projections(self) -> int:
        """2 for a gated activation (gate and up), else 1."""
        return 2 if self in (Activation.SWIGLU, Activation.GEGLU) else 1


_FUNCTIONS = {
    Activation.SWIGLU: jax.nn.silu,
    Activation.GEGLU: lambda x: jax.nn.gelu(x, approximate=False),
    Activation.GELU: lambda x: jax.nn.gelu(x, approximate=False),
    Activation.SILU: jax.nn.silu,
    Activation.RELU: jax.nn.relu,
}


def activate(hidden: Float[Array, "... n F"], activation: Activation) -> Float[Array, "... F"]:
    """Returns f(hidden[0]) * hidden[1] of the last but one dimension, or f(hidden[0]) if n is 1."""
    gate = _FUNCTIONS[activation](hidden[..., 0, :])
    return gate * hidden[..., 1, :] if activation.num_projections == 2 else gate
