"""Checksums of arrays, computed on their devices: the same on every mesh and number of processes.

The bits of each element are mixed with its index, and the results are summed modulo 2^32, twice.
A change of one element of up to 32 bits always changes the checksum; any other change, such as two
elements that are exchanged, remains undetected with a probability of about 2^-64.
"""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Its powers are the factors of the indices by dimension. With this one, the indices of different
# elements coincide least often. Source: Steele and Vigna, arXiv:2001.05304, table of 32 bits.
_FACTOR = 0x93D765DD


def start_checksums(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Starts to compute the checksum of each array by name; `finish_checksums` waits for them.

    All processes that hold shards of the arrays must call it. The arrays may be donated afterward.
    """
    structs = {name: _struct(x) for name, x in arrays.items()}
    unique = set(structs.values())
    if len(unique) > 1:
        with ThreadPoolExecutor() as pool:  # A TPU's compiler takes a second for each.
            list(pool.map(_program, unique))
    return {name: _start(structs[name], x) for name, x in arrays.items()}


def finish_checksums(started: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksums that `start_checksums` computes, as 16 hexadecimal digits each."""
    sums = jax.device_get(dict(started))
    return {name: "".join(f"{int(half):08x}" for half in halves) for name, halves in sums.items()}


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


@functools.cache
def _program(like: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """Returns the compiled checksum of an array, whose result is on all of its devices."""
    mesh = getattr(like.sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh):  # On one device.
        return jax.jit(checksum).lower(like).compile()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        return jax.jit(checksum, out_shardings=replicated).lower(like).compile()


def _start(like: jax.ShapeDtypeStruct, x: Any) -> tuple[jax.Array, jax.Array]:
    sums = _program(like)(x)
    if getattr(like.sharding, "memory_kind", None) == "pinned_host":
        jax.block_until_ready(sums)  # The devices hold a copy of one such array at a time.
    return sums


def checksum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves of an array's checksum, uint32 scalars.

    Both sums are one reduction: of two, XLA on CPUs writes the operands to memory, and takes four
    times as long.
    """
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        x = jax.device_put(x, jax.memory.Space.Device)
    words = _words(x)
    index = jnp.uint32(0)
    for dim in range(words.ndim):
        factor = jnp.uint32(pow(_FACTOR, dim + 1, 1 << 32))
        index += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * factor
    # The finalizer of MurmurHash3, and one more round for the second sum.
    first = words ^ index
    first = (first ^ (first >> 16)) * jnp.uint32(0x85EBCA6B)
    first = (first ^ (first >> 13)) * jnp.uint32(0xC2B2AE35)
    first = first ^ (first >> 16)
    second = first * jnp.uint32(0x9E3779B1)
    second = second ^ (second >> 15)
    zero = jnp.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    return lax.reduce((first, second), (zero, zero), add, tuple(range(words.ndim)))


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as uint32; of larger elements in one more dimension."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)
