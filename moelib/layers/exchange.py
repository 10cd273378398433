"""Exchanges of layers that mix tokens, where a mesh splits sequences."""

from typing import NamedTuple


class Exchange(NamedTuple):
    """Numbers of each token that a layer sends in its forward pass, in the dtype of activations."""

    keys: int = 0  # Keys and values of attention, which go around a ring.
    queries: int = 0  # Queries and outputs, which a ring may deal in zigzag.
    window: int | None = None  # Tokens that a query sees; None for no limit.
    heads: int = 0  # Exchanged by all-to-alls: heads of a part for a part of the heads.
    heads_in_float32: int = 0
    gathered: int = 0  # Gathered by all devices of a sequence.
