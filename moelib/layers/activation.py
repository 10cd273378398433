"""Activations of feed-forward layers, gated and plain."""

import enum
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from moelib.kernels.gmm import clamped_swiglu, swiglu


class Activation(enum.Enum):
    """What stands between the two matmuls of a feed-forward layer."""

    SWIGLU = "swiglu"  # silu(gate) * up. Source: Shazeer, arXiv:2002.05202.
    CLAMPED_SWIGLU = "clamped_swiglu"  # Of GPT-OSS; see `moelib.kernels.gmm.clamped_swiglu`.
    GEGLU = "geglu"  # gelu(gate) * up.
    GELU = "gelu"
    SILU = "silu"
    RELU = "relu"

    @property
    def num_projections(self) -> int:
        """2 for a gated activation (gate and up), else 1."""
        return 2 if self in _GATED else 1

    @property
    def function(self) -> Callable[..., Array]:
        """The elementwise function of as many arrays; the same object each time."""
        return _GATED[self] if self in _GATED else _PLAIN[self]


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


def _geglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    return _gelu(gate) * up


_GATED: dict[Activation, Callable[..., Array]] = {
    Activation.SWIGLU: swiglu,
    Activation.CLAMPED_SWIGLU: clamped_swiglu,
    Activation.GEGLU: _geglu,
}
_PLAIN: dict[Activation, Callable[..., Array]] = {
    Activation.GELU: _gelu,
    Activation.SILU: jax.nn.silu,
    Activation.RELU: jax.nn.relu,
}
