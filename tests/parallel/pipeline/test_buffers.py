"""Entries of buffers are read and written where they are."""

import jax.numpy as jnp
import numpy as np

from moelib.parallel.pipeline.buffers import Entry, entries, read, write

BUFFER = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)


def test_an_entry_is_read_and_written():
    entry = Entry(BUFFER, (1,)).inside(jnp.int32(2))
    np.testing.assert_array_equal(entry.read(), BUFFER[1, 2])
    np.testing.assert_array_equal(entry.write(jnp.ones(4)), BUFFER.at[1, 2].set(1))


def test_sums_have_the_dtype_of_the_buffer():
    x = jnp.full((3, 4), 2**-8, jnp.bfloat16)
    (found,) = write(entries([BUFFER], 1, adds=True), [x])
    np.testing.assert_array_equal(found, BUFFER.at[1].add(2.0**-8))  # Not exact in bfloat16.


def test_arrays_are_read_as_they_are():
    whole, part = read((BUFFER, Entry(BUFFER, (0,))))
    assert whole is BUFFER
    np.testing.assert_array_equal(part, BUFFER[0])
