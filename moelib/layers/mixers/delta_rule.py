"""The delta rule: a matrix per head that maps keys to values, corrected by each token.

S_t = diag(a_t) S_{t-1} + b_t k_t (v_t - k_t^T diag(a_t) S_{t-1})^T;  o_t = S_t^T q_t

with decays a_t in (0, 1], of the head or of each key channel, and strengths b_t. The state S is 0
where a document begins. `sequential` is the definition, a loop over tokens. `chunked` computes
chunks of C tokens by matmuls: the values that the tokens of a chunk write solve a triangular
system, whose inverse needs no state, so that only four matmuls per chunk remain in the loop.

Without correction, as `corrected=False` has it, it is the recurrence of Mamba-2:

S_t = diag(a_t) S_{t-1} + b_t k_t v_t^T

Sources: Yang et al., arXiv:2406.06484 (chunks) and arXiv:2412.06464 (decay per head); Kimi Linear,
arXiv:2510.26692 (decay per channel); Dao and Gu, arXiv:2405.21060 (Mamba-2).

Shapes: H heads, G that share queries and keys among R each, K entries of a key, V entries of a
value, A decays of a head: 1 or K. In chunks: N chunks, C tokens of a chunk.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from moelib.core.param import Axes
from moelib.core.varying import align, vary
from moelib.parallel import sharding

# Logical axes [B, S, H, .] of whole sequences: all-to-alls split heads where a mesh splits
# sequences, as Jacobs et al., arXiv:2309.14509, section 3.1, for attention.
_HEADS = ("activation_heads", "sequence")
_WHOLE = ("batch", None, _HEADS, None)

_CHUNK = 64  # C, a power of two.
_PART = 16  # Tokens of a part of a chunk, for decays per channel.
_GROUP = 16  # Chunks whose matrices are in memory at once; the backward pass recomputes them.

# Of sums that must be exact in float32; other matmuls have the default precision of the backend.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """The tokens of sequences, as the delta rule reads them."""

    q: Float[Array, "B S G K"]  # Queries. Heads 0 to R - 1 have the first, and so on.
    k: Float[Array, "B S G K"]  # Keys, of length 1 or less.
    v: Float[Array, "B S H V"]  # Values.
    log_decay: Float32[Array, "B S H A"]  # Logarithm of a_t, 0 or less; 0 for padding.
    beta: Float32[Array, "B S H"]  # b_t; 0 for padding.
    documents: Int[Array, "B S"]  # Number of each token's document in its sequence, from 0.

    def in_float32(self) -> "Tokens":
        """Returns the tokens with all but the documents in float32."""
        floats = jax.tree.map(lambda x: x.astype(jnp.float32), self)
        return floats._replace(documents=self.documents)

    def with_key_heads(self, number: int) -> "Tokens":
        """Returns the tokens with queries and keys repeated up to a number of heads."""
        repeat = lambda x: jnp.repeat(x, number // x.shape[2], axis=2)
        return self._replace(q=repeat(self.q), k=repeat(self.k))


Results = tuple[Float32[Array, "B S H V"], Float32[Array, "B H K V"]]


def delta_rule(
    tokens: Tokens, state: Float32[Array, "B H K V"] | None = None, *, corrected: bool = True
) -> Results:
    """Returns (outputs, state after the last token), sharded over the current mesh.

    Args:
        tokens: The tokens.
        state: State before the first token, of document 0; None for zeros.
        corrected: Whether a token writes what its value differs by from that of the state.

    Raises:
        SplitError: If the mesh does not divide the batch or the heads.
    """
    batch, length, heads, value_dim = tokens.v.shape
    if state is None:
        state = jnp.zeros((batch, heads, tokens.k.shape[-1], value_dim), jnp.float32)
    compute = functools.partial(sequential if length == 1 else chunked, corrected=corrected)
    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return compute(tokens, state)
    shape = dict(mesh.shape)
    split = sharding.partition_spec(_WHOLE, shape, shape=tokens.v.shape, array="the delta rule")
    of_batch, _, of_heads, _ = split
    used = tuple(a for name in ("batch", *_HEADS) for a in sharding.mesh_axes(name, shape))
    parts = math.prod(shape[a] for name in _HEADS for a in sharding.mesh_axes(name, shape))
    tokens = tokens.with_key_heads(math.lcm(parts, tokens.k.shape[2]))

    def local(arrays: tuple[Tokens, Array]) -> Results:
        return compute(*vary(arrays, used))

    P = jax.sharding.PartitionSpec
    of_state = P(of_batch, of_heads, None, None)
    of_tokens = Tokens._make([*(split,) * 4, P(of_batch, None, of_heads), P(of_batch, None)])
    specs = (of_tokens, of_state)
    return jax.shard_map(local, in_specs=(specs,), out_specs=(split, of_state))((tokens, state))


def split_axes(length: int) -> Axes:
    """Returns the logical axes [B, S, H, .] outside of `delta_rule`; one token is never split."""
    return "batch", "sequence" if length > 1 else None, "activation_heads", None


def whole_sequences(x: Float[Array, "B S ... H K"]) -> Float[Array, "B S ... H K"]:
    """Returns projections with the sharding of `delta_rule`: sequences are whole, heads split."""
    between = (None,) * (x.ndim - 4)
    for batch, tokens, *of_heads in (split_axes(x.shape[1]), _WHOLE):
        x = sharding.constrain(x, (batch, tokens, *between, *of_heads))
    return x


def sequential(
    tokens: Tokens, state: Float32[Array, "B H K V"], *, corrected: bool = True
) -> Results:
    """Returns the results of `delta_rule` on one device, token by token."""
    tokens = tokens.with_key_heads(tokens.v.shape[2])
    begins = jnp.diff(tokens.documents, axis=1, prepend=0)

    def step(state: Array, token: Tokens) -> tuple[Array, Array]:
        q, k, v, log_decay, beta, begins = token
        state = jnp.where(begins[:, None, None, None] > 0, 0.0, state)
        state = state * jnp.exp(log_decay)[..., None]
        new = v - jnp.sum(state * k[..., None], axis=-2) if corrected else v
        state = state + (beta[..., None] * k)[..., None] * new[..., None, :]
        return state, jnp.sum(state * q[..., None], axis=-2)

    tokens = tokens._replace(documents=begins).in_float32()
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
    state, tokens = align(state, tokens)
    state, outputs = jax.lax.scan(step, state, tokens)
    return outputs.swapaxes(0, 1), state


def chunked(tokens: Tokens, state: Float32[Array, "B H K V"], *, corrected: bool = True) -> Results:
    """Returns the results of `delta_rule` on one device, chunk by chunk.

    The backward pass saves the state before each group of chunks, and recomputes the group.
    """
    batch, length, heads, dim = tokens.v.shape
    key_heads, key_dim = tokens.k.shape[2:]
    num_chunks = -(-length // _CHUNK)
    num_groups = -(-num_chunks // _GROUP)
    groups = num_groups, -(-num_chunks // num_groups)
    padding = math.prod(groups) * _CHUNK - length

    def split(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)), mode=mode)
        x = x.reshape(batch, *groups, _CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)  # [groups, N, B, C, ...]

    def of_heads(x: Array) -> Array:
        x = split(x.reshape(batch, length, key_heads, -1, x.shape[-1]))
        return jnp.moveaxis(x, 3, 5)  # [groups, N, B, G, R, C, ...]

    *floats, beta, documents = tokens.in_float32()
    chunks = [of_heads(x) for x in (*floats, beta[..., None])]
    documents = split(documents, mode="edge")[:, :, :, None, None]  # [groups, N, B, 1, 1, C]
    ends = documents[..., -1].reshape(math.prod(groups), batch)
    before = jnp.pad(ends[:-1], ((1, 0), (0, 0))).reshape(*groups, batch, 1, 1)
    state = state.reshape(batch, key_heads, -1, key_dim, dim)
    state, arrays = align(state, (*chunks, documents, before))
    group = jax.checkpoint(functools.partial(_group, corrected=corrected))
    state, outputs = jax.lax.scan(group, state, arrays)
    outputs = jnp.moveaxis(outputs, (2, 5), (0, 3))  # [B, groups, N, C, G, R, V]
    outputs = outputs.reshape(batch, -1, heads, dim)[:, :length]
    return outputs, state.reshape(batch, heads, key_dim, dim)


def _group(
    state: Float32[Array, "B G R K V"], arrays: tuple[Array, ...], *, corrected: bool
) -> tuple[Float32[Array, "B G R K V"], Float32[Array, "N B G R C V"]]:
    """Returns the state after a group of chunks, and their outputs."""
    q, k, v, log_decay, beta, documents, before = arrays
    same, is_later = documents[..., :, None] == documents[..., None, :], _is_later(_CHUNK)
    scores = jnp.where(same & ~is_later.mT, _products(q, k, log_decay), 0.0)
    # Decays since the state before the chunk, and until the state after it.
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-2))  # [N, B, G, R, C, A]
    kept = jnp.where(before[..., None] == documents[..., -1:], from_start[..., -1, :], 0.0)
    from_start = jnp.where((documents == before[..., None])[..., None], from_start, 0.0)
    to_end = jnp.exp(_sum_of_later(log_decay))
    to_end = jnp.where((documents == documents[..., -1:])[..., None], to_end, 0.0)
    writes = [beta * v]  # And by what of the state they are less.
    if corrected:
        inverse = _inverse(jnp.where(same & is_later, beta * _products(k, k, log_decay), 0.0))
        writes = [inverse @ writes[0], _times(inverse, beta * from_start, k)]
    if log_decay.shape[-1] > 1:
        q, k, from_start, to_end = q * from_start, k * to_end, *[jnp.ones((len(q), *(1,) * 5))] * 2

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, from_start, to_end, scores, kept, new, *reads = chunk
        new = new - reads[0] @ state if reads else new
        output = from_start * (q @ state) + scores @ new
        return kept[..., None] * state + k.mT @ (to_end * new), output

    return jax.lax.scan(step, state, (q, k, from_start, to_end, scores, kept, *writes))


def _times(
    matrix: Float32[Array, "*n C C"], decay: Float32[Array, "*n C A"], x: Float32[Array, "*m C K"]
) -> Float32[Array, "*n C K"]:
    """Returns matrix (decay x), without decayed values of shared x if there is one per head."""
    if decay.shape[-1] > 1:
        return matrix @ (decay * x)
    return (matrix * decay.mT) @ x


def _is_later(size: int) -> Bool[Array, "1 1 1 1 c c"]:
    """Returns whether token i, of a row, is later than token j, of a column."""
    return jnp.tri(size, k=-1, dtype=bool)[None, None, None, None]


def _sum_of_later(x: Float32[Array, "*n C A"]) -> Float32[Array, "*n C A"]:
    """Returns the sum of the entries of later tokens."""
    x = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)
    return jax.lax.cumsum(x, axis=x.ndim - 2, reverse=True)


def _products(
    x: Float32[Array, "N B G 1 C K"],
    k: Float32[Array, "N B G 1 C K"],
    log_decay: Float32[Array, "N B G R C A"],
) -> Float32[Array, "N B G R C C"]:
    """Returns sum_c x_ic k_jc exp(sum of log_decay_c from j + 1 to i) for j <= i.

    Entries of j > i are arbitrary. Exponents are sums of decays from one token to a later one: none
    is above 0, and none is a difference of larger sums.
    """
    if log_decay.shape[-1] > 1:
        return _products_per_channel(x, k, log_decay)
    exponent = _matmul(jnp.tri(_CHUNK), jnp.where(_is_later(_CHUNK), log_decay, 0.0))
    return x @ k.mT * jnp.exp(exponent)


def _products_per_channel(
    x: Float32[Array, "N B G 1 C K"],
    k: Float32[Array, "N B G 1 C K"],
    log_decay: Float32[Array, "N B G R C K"],
) -> Float32[Array, "N B G R C C"]:
    """Returns `_products` by a matmul from each part of a chunk to all parts before it.

    There the decay is that from j to the end of the part before that of i, times that from there to
    i, both 1 or less. Within a part it is computed for each pair of tokens.
    """
    x, k, log_decay = jnp.broadcast_arrays(x, k, log_decay)
    lead, (size, dim) = x.shape[:-2], x.shape[-2:]
    num = size // _PART
    x, k_part, decay_part = (y.reshape(*lead, num, _PART, dim) for y in (x, k, log_decay))
    total = jnp.cumsum(decay_part, axis=-2)  # [N, B, G, R, num, 16, K]
    part = jnp.arange(size) // _PART
    is_before = (part[None] < jnp.arange(num)[:, None])[None, None, None, None, :, :, None]
    to_part = _sum_of_later(jnp.where(is_before, log_decay[..., None, :, :], 0.0))
    across = (x * jnp.exp(total)) @ (k[..., None, :, :] * jnp.exp(to_part)).mT
    pairs = total[..., :, None, :] - total[..., None, :, :]  # [.., num, 16, 16, K]
    pairs = jnp.exp(jnp.where(_is_later(_PART)[..., None, :, :, None], pairs, 0.0))
    inside = jnp.sum(x[..., :, None, :] * k_part[..., None, :, :] * pairs, axis=-1)
    is_inside = (part[None] == jnp.arange(num)[:, None])[None, None, None, None, :, None]
    return jnp.where(is_inside, jnp.tile(inside, num), across).reshape(*lead, size, size)


@jax.custom_jvp
def _inverse(lower: Float32[Array, "*n C C"]) -> Float32[Array, "*n C C"]:
    """Returns (1 + lower)^-1 of matrices that are zero on and above the diagonal.

    The inverses X^-1 and Y^-1 of two blocks on the diagonal give that of the block of both, whose
    lower left part Z becomes -Y^-1 Z X^-1; a series of powers would cancel. The matrices lie along
    the last dimension: products of single small ones fill no matrix unit, and are exact so.
    """
    *lead, size, _ = lower.shape
    lower = jnp.moveaxis(lower.reshape(-1, size, size), 0, 2)  # [C, C, n]
    inverse = jnp.ones((size, 1, 1, lower.shape[-1]), lower.dtype)  # Of blocks, [C / b, b, b, n].
    for block in (1 << i for i in range(size.bit_length() - 1)):
        first, second = inverse[::2], inverse[1::2]
        corners = lower.reshape(size // block, block, size // block, block, -1)
        pair = jnp.arange(size // (2 * block))
        corner = -_product(_product(second, corners[2 * pair + 1, :, 2 * pair]), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=2)], axis=1)
    return jnp.moveaxis(inverse[0], 2, 0).reshape(*lead, size, size)


def _product(x: Float32[Array, "m b b n"], y: Float32[Array, "m b b n"]) -> Array:
    """Returns the products of the matrices [b, b]."""
    return jnp.sum(x[:, :, :, None] * y[:, None], axis=2)


@_inverse.defjvp
def _inverse_jvp(
    primals: tuple[Float32[Array, "*n C C"]], tangents: tuple[Float32[Array, "*n C C"]]
) -> tuple[Float32[Array, "*n C C"], Float32[Array, "*n C C"]]:
    inverse = _inverse(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)
