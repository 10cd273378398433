"""Optimizer state in fewer bits: bfloat16, or codes of 8 bits with a scale per block.

The state is decoded before each update of an optimizer and encoded after it; the update itself is
computed in float32. Small arrays, those of narrow rows in 8 bits, and state that is no moment, stay
as they are.
"""

import enum
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float32, UInt8

from moelib.learner.factored import FactoredState

_MIN_SIZE = 4096  # Elements from which on an array is encoded, as in arXiv:2110.02861, section 2.
_MAX_BLOCK, _MIN_BLOCK = 256, 32  # Elements along the last dimension that share a scale.
# Fields that hold means of gradients, with a sign, and means of squares, 0 or more, by the class of
# an optimizer's state. Sums that only grow would stop growing in fewer bits, and centered RMSProp
# would take the root of a difference below 0: both are excluded.
_MOMENTS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    FactoredState: ((), ("row", "col", "full")),
    optax.EmaState: (("ema",), ()),
    optax.FactoredState: ((), ("v_row", "v_col", "v")),
    optax.ScaleByAdaDeltaState: ((), ("e_g", "e_x")),
    optax.ScaleByAdamState: (("mu",), ("nu",)),
    optax.ScaleByAdanState: (("m", "v"), ("n",)),
    optax.ScaleByAmsgradState: (("mu",), ("nu", "nu_max")),
    optax.ScaleByBeliefState: (("mu",), ("nu",)),
    optax.ScaleByLionState: (("mu",), ()),
    optax.ScaleByNovogradState: (("mu",), ()),
    optax.ScaleByRmsState: ((), ("nu",)),
    type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())): ((), ("nu",)),
    optax.ScaleBySM3State: (("nu",), ()),
    optax.TraceState: (("trace",), ()),
    optax.contrib.DAdaptAdamWState: (("exp_avg",), ("exp_avg_sq",)),
    optax.contrib.MomoAdamState: (("exp_avg",), ("exp_avg_sq",)),
    optax.contrib.MomoState: (("exp_avg",), ()),
    optax.contrib.MuonState: (("mu",), ()),
    optax.contrib.ProdigyState: (("exp_avg",), ("exp_avg_sq",)),
    optax.contrib.ScaleByAdemamixState: (("m1", "m2"), ("nu",)),
    optax.contrib.ScaleBySimplifiedAdEMAMixState: (("m",), ("n",)),
    optax.contrib.SophiaState: (("mu",), ()),
}


class MomentFormat(enum.Enum):
    """Storage of the means that an optimizer keeps of gradients and of their squares."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    EIGHT_BIT = "8-bit"  # Block-wise dynamic quantization, Dettmers et al., arXiv:2110.02861.


class QuantizedMoment(NamedTuple):
    """An array in 8 bits: each code is a share of its block's largest magnitude."""

    codes: UInt8[Array, "... N"]
    scales: Float32[Array, "... M"]  # Largest magnitude of each block of ceil(N / M) elements.


def quantize_moment(
    x: Float32[Array, "... N"], block: int, *, signed: bool, key: jax.Array | None = None
) -> QuantizedMoment:
    """Returns an array in 8 bits.

    Code 2^i + j stands for the share (0.1 + 0.9 (j + 1) / 2^i) * 10^(i - n) of the scale, for i up
    to n: 7 decades of up to 64 steps with a sign, or 8 of up to 128 steps without. The error is at
    most half a step, 0.45 / 2^n of the scale, or a step where it is rounded at random. Shares are
    the ends of the intervals of the paper, not their middles, so that the largest element is exact.

    Args:
        x: Array.
        block: Largest number of elements along the last dimension that share a scale.
        signed: Whether elements may be negative. Positive elements of others never become 0, so
            that an update is not divided by 0: those below 10^-n of the scale are rounded up.
        key: Random key for stochastic rounding; None rounds to the nearest.
    """
    blocks = _in_blocks(jnp.abs(x), -(-x.shape[-1] // block))
    scales = jnp.max(blocks, -1)
    share = _joined(blocks / jnp.where(scales > 0, scales, 1.0)[..., None], x.shape)
    top = 6 if signed else 7
    above = (share >= 10.0 ** (i - top - 1) for i in range(1, top + 1))
    decade = sum((a.astype(jnp.int32) for a in above), jnp.zeros(x.shape, jnp.int32))
    steps = jnp.left_shift(1, decade).astype(jnp.float32)
    within = share * _power_of_10(top - decade, top)  # From 0.1 to 1; from 0 in the lowest decade.
    lowest = jnp.where(decade > 0, 0.1, 0.0)
    place = steps - 1 + (within - lowest) / (1 - lowest) * steps
    noise = 0.5 if key is None else jax.random.uniform(key, x.shape)
    codes = jnp.minimum(jnp.floor(place + noise).astype(jnp.int32), 2 ** (top + 1) - 1)
    if signed:
        codes = jnp.where((x < 0) & (codes > 0), codes + 128, codes)
    else:
        codes = jnp.where(x > 0, jnp.maximum(codes, 1), codes)
    return QuantizedMoment(codes.astype(jnp.uint8), scales)


def dequantize_moment(x: QuantizedMoment, *, signed: bool) -> Float32[Array, "... N"]:
    """Inverse of `quantize_moment`, but for rounding."""
    top = 6 if signed else 7
    codes = x.codes.astype(jnp.int32)
    size = codes % 128 if signed else codes
    decade = 31 - jax.lax.clz(jnp.maximum(size, 1))
    steps = jnp.left_shift(1, decade)
    share = 0.1 + 0.9 * (size - steps + 1).astype(jnp.float32) / steps.astype(jnp.float32)
    share = jnp.where(size > 0, share / _power_of_10(top - decade, top), 0.0)
    if signed:
        share = jnp.where(codes >= 128, -share, share)
    return _joined(_in_blocks(share, x.scales.shape[-1]) * x.scales[..., None], share.shape)


def _in_blocks(x: jax.Array, num: int) -> jax.Array:
    """Returns x with the last dimension split into blocks of one size, the last padded by zeros."""
    block = -(-x.shape[-1] // num)
    pads = [(0, 0)] * (x.ndim - 1) + [(0, num * block - x.shape[-1])]
    return jnp.pad(x, pads).reshape(*x.shape[:-1], num, block)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse of `_in_blocks`."""
    return blocks.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _power_of_10(exponent: jax.Array, most: int) -> jax.Array:
    """Returns 10^exponent for integers from 0 to `most`, without a table to gather from."""
    powers = jnp.ones(exponent.shape, jnp.float32)
    for i in range(1, most + 1):
        powers = jnp.where(exponent == i, 10.0**i, powers)
    return powers


def round_to_bfloat16(x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Returns x in bfloat16; with a key, one of the two nearest values, equal to x on average."""
    if key is None:
        return x.astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def apply_updates(params: Any, updates: Any, key: jax.Array | None = None) -> Any:
    """Returns the sums of parameters and updates; with a key, bfloat16 is rounded at random."""
    if key is None:
        return optax.apply_updates(params, updates)

    def add(path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
        if param.dtype != jnp.bfloat16:
            return optax.apply_updates(param, update)
        return round_to_bfloat16(param.astype(jnp.float32) + update, _key_of(path, key))

    return jax.tree_util.tree_map_with_path(add, params, updates)


def stored_as(
    inner: optax.GradientTransformation, first: MomentFormat, second: MomentFormat
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that stores its state in fewer bits.

    The update takes `rounding_key`, a random key for stochastic rounding, or None.

    Args:
        inner: The optimizer.
        first: Format of means of gradients.
        second: Format of means of squared gradients.
    """
    inner = optax.with_extra_args_support(inner)

    def decode(state: Any) -> Any:
        def decoded(path: Any, x: Any, is_second: bool) -> Any:
            if isinstance(x, QuantizedMoment):
                return dequantize_moment(x, signed=not is_second)
            low = (second if is_second else first) is MomentFormat.BFLOAT16
            return x.astype(jnp.float32) if low and x.dtype == jnp.bfloat16 else x

        return _map_moments(decoded, state)

    def encode(state: Any, key: jax.Array | None) -> Any:
        def encoded(path: Any, x: jax.Array, is_second: bool) -> Any:
            format_ = second if is_second else first
            if x.size < _MIN_SIZE or x.dtype != jnp.float32 or format_ is MomentFormat.FLOAT32:
                return x
            own = None if key is None else _key_of(path, key)
            if format_ is MomentFormat.BFLOAT16:
                return round_to_bfloat16(x, own)
            if x.shape[-1] < _MIN_BLOCK:
                return x
            # Blocks that fill the last dimension are sharded with it.
            sizes = range(_MIN_BLOCK, _MAX_BLOCK + 1)
            block = max((n for n in sizes if x.shape[-1] % n == 0), default=_MAX_BLOCK)
            return quantize_moment(x, block, signed=not is_second, key=own)

        return _map_moments(encoded, state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        key = extra.pop("rounding_key", None)
        updates, state = inner.update(updates, decode(state), params, **extra)
        return updates, encode(state, key)

    return optax.GradientTransformationExtraArgs(lambda p: encode(inner.init(p), None), update)


def moments_in(state: Any) -> tuple[bool, bool, list[str]]:
    """Returns whether a state has means of gradients, and of squares, and paths of other arrays."""
    found: dict[Any, bool] = {}
    _map_moments(lambda path, x, is_second: found.setdefault(path, is_second), state)
    others = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_quantized)
        if not _is_quantized(x) and x.size >= _MIN_SIZE and x.dtype == jnp.float32
        if path not in found
    ]
    return False in found.values(), True in found.values(), others


def _map_moments(f: Callable[[Any, Any, bool], Any], state: Any) -> Any:
    """Returns a state with each moment replaced by f(path, moment, whether it is of squares)."""

    def node(path: Any, x: Any) -> Any:
        means, squares = _MOMENTS.get(type(x), ((), ()))

        def leaf(inner: Any, y: Any) -> Any:
            field = getattr(next(iter(inner), None), "name", None)
            return f((*path, *inner), y, field in squares) if field in means + squares else y

        return jax.tree_util.tree_map_with_path(leaf, x, is_leaf=_is_quantized)

    return jax.tree_util.tree_map_with_path(node, state, is_leaf=lambda x: type(x) in _MOMENTS)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedMoment)


def _key_of(path: Any, key: jax.Array) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
