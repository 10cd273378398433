"""Checksums of arrays, computed on their devices: the same on every mesh and number of processes.

The bits of each element are mixed with its index, and the results are summed modulo 2^32, twice.
A change of one element of up to 32 bits always changes the checksum; any other change, such as two
elements that are exchanged, remains undetected with a probability of about 2^-64.
"""

import functools
from collections import defaultdict
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
    alike: dict[jax.ShapeDtypeStruct, list[str]] = defaultdict(list)
    for name, x in arrays.items():
        alike[_struct(x)].append(name)
    # A program takes an array of each of its structs, of which the state has the same number.
    groups: dict[Any, list[jax.ShapeDtypeStruct]] = defaultdict(list)
    for like, names in alike.items():
        # The devices hold a copy of one array of the host's memory at a time.
        apart = like if _is_on_host(like) else None
        groups[_mesh_of(like) or like.sharding, len(names), apart].append(like)
    programs = [tuple(likes) for likes in groups.values()]
    if len(programs) > 1:
        with ThreadPoolExecutor() as pool:  # A TPU's compiler takes a second for each.
            list(pool.map(_program, programs))
    started = {}
    for likes in programs:
        for names in zip(*(alike[like] for like in likes), strict=True):
            sums = _program(likes)([arrays[name] for name in names])
            started.update(zip(names, sums, strict=True))
            if _is_on_host(likes[0]):
                jax.block_until_ready(sums)
    return {name: started[name] for name in arrays}


def finish_checksums(started: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksums that `start_checksums` computes, as 16 hexadecimal digits each."""
    sums = jax.device_get(dict(started))
    return {name: "".join(f"{int(half):08x}" for half in halves) for name, halves in sums.items()}


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _mesh_of(like: jax.ShapeDtypeStruct) -> jax.sharding.Mesh | None:
    mesh = getattr(like.sharding, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def _is_on_host(like: jax.ShapeDtypeStruct) -> bool:
    return getattr(like.sharding, "memory_kind", None) == "pinned_host"


@functools.cache
def _program(likes: tuple[jax.ShapeDtypeStruct, ...]) -> jax.stages.Compiled:
    """Returns the compiled checksums of some arrays, whose results are on all of their devices."""
    run = lambda arrays: [checksum(x) for x in arrays]
    mesh = _mesh_of(likes[0])
    if mesh is None:  # On one device.
        return jax.jit(run).lower(list(likes)).compile()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        return jax.jit(run, out_shardings=replicated).lower(list(likes)).compile()


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
