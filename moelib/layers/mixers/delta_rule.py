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

Shapes: H heads, K entries of a key, V entries of a value, A decays of a head: 1 or K. In chunks:
N chunks, C tokens of a chunk.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from moelib.core.varying import align, vary
from moelib.parallel import sharding

_CHUNK = 64  # C, a power of two.
_PART = 16  # Tokens of a part of a chunk, for decays per channel.
_GROUP = 16  # Chunks whose matrices are in memory at once; the backward pass recomputes them.

# Of sums that must be exact in float32; other matmuls have the default precision of the backend.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """The tokens of sequences, as the delta rule reads them."""

    q: Float[Array, "B S H K"]  # Queries.
    k: Float[Array, "B S H K"]  # Keys, of length 1 or less.
    v: Float[Array, "B S H V"]  # Values.
    log_decay: Float32[Array, "B S H A"]  # Logarithm of a_t, 0 or less; 0 for padding.
    beta: Float32[Array, "B S H"]  # b_t; 0 for padding.
    documents: Int[Array, "B S"]  # Number of each token's document in its sequence, from 0.

    def in_float32(self) -> "Tokens":
        """Returns the tokens with all but the documents in float32."""
        floats = jax.tree.map(lambda x: x.astype(jnp.float32), self)
        return floats._replace(documents=self.documents)


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
        SplitError: If the mesh splits sequences, or does not divide the batch or the heads.
    """
    batch, length, heads, key_dim = tokens.k.shape
    if state is None:
        state = jnp.zeros((batch, heads, key_dim, tokens.v.shape[-1]), jnp.float32)
    compute = functools.partial(sequential if length == 1 else chunked, corrected=corrected)
    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return compute(tokens, state)
    shape = dict(mesh.shape)
    if ring := sharding.mesh_axes("sequence", shape):
        raise sharding.SplitError(
            f"The delta rule passes its state from token to token, but the mesh splits sequences "
            f"over {', '.join(f'{axis}={shape[axis]}' for axis in ring)}; set that axis to 1, and "
            "split the batch or the heads instead (fsdp, model)."
        )
    axes = ("batch", None, "activation_heads", None)
    split = sharding.partition_spec(axes, shape, shape=tokens.v.shape, array="the delta rule")
    of_batch, _, of_heads, _ = split
    used = tuple(a for name in axes if name for a in sharding.mesh_axes(name, shape))

    def local(arrays: tuple[Tokens, Array]) -> Results:
        return compute(*vary(arrays, used))

    P = jax.sharding.PartitionSpec
    of_state = P(of_batch, of_heads, None, None)
    of_tokens = Tokens._make([*(split,) * 4, P(of_batch, None, of_heads), P(of_batch, None)])
    specs = (of_tokens, of_state)
    return jax.shard_map(local, in_specs=(specs,), out_specs=(split, of_state))((tokens, state))


def sequential(
    tokens: Tokens, state: Float32[Array, "B H K V"], *, corrected: bool = True
) -> Results:
    """Returns the results of `delta_rule` on one device, token by token."""
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
    num_chunks = -(-length // _CHUNK)
    num_groups = -(-num_chunks // _GROUP)
    groups = num_groups, -(-num_chunks // num_groups)
    padding = math.prod(groups) * _CHUNK - length

    def split(x: Array, mode: str = "constant") -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)), mode=mode)
        x = x.reshape(batch, *groups, _CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)  # [groups, N, B, C, ...]

    *floats, beta, documents = tokens.in_float32()
    chunks = [split(x).swapaxes(3, 4) for x in (*floats, beta[..., None])]
    documents = split(documents, mode="edge")[:, :, :, None]  # [groups, N, B, 1, C]
    ends = documents[..., -1].reshape(math.prod(groups), batch)
    before = jnp.pad(ends[:-1], ((1, 0), (0, 0))).reshape(*groups, batch, 1)
    state, arrays = align(state, (*chunks, documents, before))
    group = jax.checkpoint(functools.partial(_group, corrected=corrected))
    state, outputs = jax.lax.scan(group, state, arrays)
    outputs = jnp.moveaxis(outputs.swapaxes(3, 4), 2, 0)  # [B, groups, N, C, H, V]
    return outputs.reshape(batch, -1, heads, dim)[:, :length], state


def _group(
    state: Float32[Array, "B H K V"], arrays: tuple[Array, ...], *, corrected: bool
) -> tuple[Float32[Array, "B H K V"], Float32[Array, "N B H C V"]]:
    """Returns the state after a group of chunks, and their outputs."""
    q, k, v, log_decay, beta, documents, before = arrays
    same, is_later = documents[..., :, None] == documents[..., None, :], _is_later(_CHUNK)
    scores = jnp.where(same & ~is_later.mT, _products(q, k, log_decay), 0.0)
    # Decays since the state before the chunk, and until the state after it.
    from_start = jnp.exp(jnp.cumsum(log_decay, axis=-2))  # [N, B, H, C, A]
    kept = jnp.where(before[..., None] == documents[..., -1:], from_start[..., -1, :], 0.0)
    from_start = jnp.where((documents == before[..., None])[..., None], from_start, 0.0)
    to_end = jnp.exp(_sum_of_later(log_decay))
    to_end = jnp.where((documents == documents[..., -1:])[..., None], to_end, 0.0)
    writes = [beta * v]  # And by what of the state they are less.
    if corrected:
        inverse = _inverse(jnp.where(same & is_later, beta * _products(k, k, log_decay), 0.0))
        writes = [inverse @ writes[0], inverse @ (beta * k * from_start)]

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, scores, kept, new, *reads = chunk
        new = new - reads[0] @ state if reads else new
        output = q @ state + scores @ new
        return kept[..., None] * state + k.mT @ new, output

    return jax.lax.scan(step, state, (q * from_start, k * to_end, scores, kept, *writes))


def _is_later(size: int) -> Bool[Array, "1 1 1 c c"]:
    """Returns whether token i, of a row, is later than token j, of a column."""
    return jnp.tri(size, k=-1, dtype=bool)[None, None, None]


def _sum_of_later(x: Float32[Array, "*n C A"]) -> Float32[Array, "*n C A"]:
    """Returns the sum of the entries of later tokens."""
    x = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)
    return jax.lax.cumsum(x, axis=x.ndim - 2, reverse=True)


def _products(
    x: Float32[Array, "N B H C K"],
    k: Float32[Array, "N B H C K"],
    log_decay: Float32[Array, "N B H C A"],
) -> Float32[Array, "N B H C C"]:
    """Returns sum_c x_ic k_jc exp(sum of log_decay_c from j + 1 to i) for j <= i.

    Entries of j > i are arbitrary. Exponents are sums of decays from one token to a later one: none
    is above 0, and none is a difference of larger sums.
    """
    if log_decay.shape[-1] > 1:
        return _products_per_channel(x, k, log_decay)
    exponent = _matmul(jnp.tri(_CHUNK), jnp.where(_is_later(_CHUNK), log_decay, 0.0))
    return x @ k.mT * jnp.exp(exponent)


def _products_per_channel(
    x: Float32[Array, "N B H C K"],
    k: Float32[Array, "N B H C K"],
    log_decay: Float32[Array, "N B H C K"],
) -> Float32[Array, "N B H C C"]:
    """Returns `_products` by a matmul from each part of a chunk to all parts before it.

    There the decay is that from j to the end of the part before that of i, times that from there to
    i, both 1 or less. Within a part it is computed for each pair of tokens.
    """
    lead, (size, dim) = x.shape[:-2], x.shape[-2:]
    num = size // _PART
    x, k_part, decay_part = (y.reshape(*lead, num, _PART, dim) for y in (x, k, log_decay))
    total = jnp.cumsum(decay_part, axis=-2)  # [N, B, H, num, 16, K]
    part = jnp.arange(size) // _PART
    is_before = (part[None] < jnp.arange(num)[:, None])[None, None, None, :, :, None]
    to_part = _sum_of_later(jnp.where(is_before, log_decay[..., None, :, :], 0.0))
    across = (x * jnp.exp(total)) @ (k[..., None, :, :] * jnp.exp(to_part)).mT
    pairs = total[..., :, None, :] - total[..., None, :, :]  # [N, B, H, num, 16, 16, K]
    pairs = jnp.exp(jnp.where(_is_later(_PART)[..., None, :, :, None], pairs, 0.0))
    inside = jnp.sum(x[..., :, None, :] * k_part[..., None, :, :] * pairs, axis=-1)
    is_inside = (part[None] == jnp.arange(num)[:, None])[None, None, None, :, None]
    return jnp.where(is_inside, jnp.tile(inside, num), across).reshape(*lead, size, size)


@jax.custom_jvp
def _inverse(lower: Float32[Array, "N B H C C"]) -> Float32[Array, "N B H C C"]:
    """Returns (1 + lower)^-1 of matrices that are zero on and above the diagonal.

    The inverses A^-1 and D^-1 of two blocks on the diagonal give that of the block of both, whose
    lower left part is -D^-1 B A^-1. A series of powers would cancel.
    """
    size = lower.shape[-1]
    row = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for block in (1 << i for i in range(size.bit_length() - 1)):
        number = row // block
        is_corner = (number[:, None] == number[None] + 1) & (number[:, None] % 2 == 1)
        corner = jnp.where(is_corner[None, None, None], lower, 0.0)
        inverse = inverse - (_matmul(_matmul(inverse, corner), inverse) if block > 1 else corner)
    return inverse


@_inverse.defjvp
def _inverse_jvp(
    primals: tuple[Float32[Array, "N B H C C"]], tangents: tuple[Float32[Array, "N B H C C"]]
) -> tuple[Float32[Array, "N B H C C"], Float32[Array, "N B H C C"]]:
    inverse = _inverse(*primals)
    return inverse, -(inverse @ tangents[0] @ inverse)
