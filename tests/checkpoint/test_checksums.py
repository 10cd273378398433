"""Checksums of arrays: their definition, and what they depend on."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moelib.checkpoint.checksums import finish_checksums, start_checksums


def checksum(x):
    return finish_checksums(start_checksums({"x": x}))["x"]


def reference(x):
    """The definition in NumPy."""
    bits = np.ascontiguousarray(x).view(f"u{min(x.dtype.itemsize, 4)}")
    words = bits.reshape(*x.shape, -1) if x.dtype.itemsize == 8 else bits.reshape(x.shape)
    with np.errstate(over="ignore"):
        index = np.zeros(words.shape, np.uint32)
        for dim, size in enumerate(words.shape):
            shape = [size if i == dim else 1 for i in range(words.ndim)]
            factor = np.uint32(0x93D765DD ** (dim + 1) & 0xFFFFFFFF)
            index += np.arange(size, dtype=np.uint32).reshape(shape) * factor
        h = words.astype(np.uint32) ^ index
        h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
        h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
        h = h ^ h >> 16
        g = h * np.uint32(0x9E3779B1)
        g = g ^ g >> 15
        return f"{h.sum(dtype=np.uint32):08x}{g.sum(dtype=np.uint32):08x}"


def random_bits(dtype, shape):
    """Elements with any bits: NaN with payloads, infinities and subnormal numbers included."""
    if dtype == np.bool_:
        return np.random.default_rng(0).integers(0, 2, shape).astype(bool)
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(0).bytes(num_bytes), dtype).reshape(shape)


@pytest.mark.parametrize(
    "dtype",
    [np.bool_, np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16, np.int32]
    + [np.uint32, np.float32],
)
@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (0, 3)])
def test_equals_its_definition(dtype, shape):
    x = random_bits(dtype, shape)
    assert checksum(jnp.asarray(x)) == reference(x)


def test_elements_of_64_bits():
    x = random_bits(np.float64, (3, 5))
    with jax.enable_x64():
        assert checksum(jnp.asarray(x)) == reference(x)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("spec", [(), ("a", "b"), ("b", "a"), (None, ("a", "b"))], ids=str)
def test_same_on_every_mesh_and_in_host_memory(spec, kind):
    x = random_bits(np.float32, (8, 16))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)
    on_mesh = jax.device_put(x, sharding)
    assert checksum(on_mesh) == reference(x)
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        assert checksum(on_mesh) == reference(x)


def test_array_that_is_donated_afterward():
    x = jnp.asarray(random_bits(np.float32, (64, 64)))
    expected = reference(np.asarray(x))
    started = start_checksums({"x": x})
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert finish_checksums(started)["x"] == expected


def flip_top_bits(x):
    x[3] ^= 1 << 31
    x[10] ^= 1 << 31


def exchange(x):
    x[[3, 10]] = x[[10, 3]]


def exchange_halves(x):
    x[:] = np.roll(x, 32)


def move_one(x):
    x[3] += 1
    x[10] -= 1


@pytest.mark.parametrize("change", [flip_top_bits, exchange, exchange_halves, move_one])
def test_changes_that_cancel_in_a_plain_sum_change_it(change):
    x = np.random.default_rng(0).integers(0, 1 << 32, 64, np.uint32)
    before = checksum(jnp.asarray(x))
    change(x)
    after = checksum(jnp.asarray(x))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_every_flipped_bit_changes_it():
    x = np.zeros((5, 7), np.float32)
    sums = {checksum(jnp.asarray(x))}
    for i in range(x.size):
        for bit in range(32):
            y = x.copy()
            y.view(np.uint32).reshape(-1)[i] ^= np.uint32(1 << bit)
            sums.add(reference(y))
    assert len(sums) == 1 + x.size * 32
