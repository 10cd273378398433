"""Activations of feed-forward layers, gated and plain."""

import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Activation(enum.Enum):
    """The function between the two matmuls of a feed-forward layer."""

    SWIGLU = "swiglu"  # silu(gate) * up. Source: Shazeer, arXiv:2002.05202.
    CLAMPED_SWIGLU = "clamped_swiglu"  # Clamped, as in GPT-OSS, arXiv:2508.10925.
    GEGLU = "geglu"  # gelu(gate) * up.
    GELU = "gelu"
    SILU = "silu"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"  # relu(x)^2. Source: So et al., arXiv:2109.08668.

    @property
    def num_projections(self) -> int:
        """2 for a gated activation (gate and up), else 1."""
        return 2 if self in _GATED else 1

    @property
    def function(self) -> Callable[..., Array]:
        """The elementwise function of one or two arrays; the same object at each access."""
        return _GATED[self] if self in _GATED else _PLAIN[self]


def _clamped_swiglu(gate: Float[Array, "*n"], up: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns (up + 1) * gate * sigmoid(1.702 * gate), gate clamped from above and up from both."""
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return (up + 1) * (gate * jax.nn.sigmoid(1.702 * gate))


def _swiglu(gate: Float[Array, "*n"], up: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jax.nn.silu(gate) * up


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    # As in PyTorch. JAX takes erfc in float32, which Pallas for TPUs lacks.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def _geglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    return _gelu(gate) * up


def _squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.square(jax.nn.relu(x))


_GATED: dict[Activation, Callable[..., Array]] = {
    Activation.SWIGLU: _swiglu,
    Activation.CLAMPED_SWIGLU: _clamped_swiglu,
    Activation.GEGLU: _geglu,
}
_PLAIN: dict[Activation, Callable[..., Array]] = {
    Activation.GELU: _gelu,
    Activation.SILU: jax.nn.silu,
    Activation.RELU: jax.nn.relu,
    Activation.SQUARED_RELU: _squared_relu,
}
