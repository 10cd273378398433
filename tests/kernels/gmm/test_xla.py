import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.gmm import gmm, xla
from tests.kernels.comparing import assert_close


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "expected"),
    [
        (16384, 16, (256, 128, 64, 16)),
        (4096, 16, (256, 128, 64, 16)),
        (4096, 32, (128, 64, 16)),
        (4096, 64, (64, 16)),
        (4096, 65, (32,)),
        (4096, 128, (16,)),
        (64, 64, (8,)),
        (5, 2, (5,)),
        (1, 1, (1,)),
    ],
)
def test_blocks_follow_the_mean_group(num_rows, num_groups, expected):
    assert xla.block_sizes(num_rows, num_groups) == expected


def test_accelerators_take_fewer_sizes_of_blocks(monkeypatch):
    monkeypatch.setattr(xla, "current_device", lambda: SimpleNamespace(platform="gpu"))
    assert xla.block_sizes(4096, 16) == (256, 64)
    assert xla.block_sizes(4096, 32) == (64,)
    assert xla.block_sizes(4096, 64) == (32,)


@pytest.mark.parametrize("save", [True, False])
def test_matrices_that_the_cache_cannot_hold_together_give_the_same(monkeypatch, save):
    rng = np.random.default_rng(0)
    shapes = ((40, 6), (3, 2, 6, 10), (3, 2, 10))
    lhs, rhs, bias = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sizes = np.array([7, 0, 25], np.int32)
    options = {"activation": lambda gate, up: gate * up + 1, "save": save}
    run = lambda: jax.jit(functools.partial(xla.forward, **options))(lhs, rhs, sizes, bias)
    together = run()
    monkeypatch.setattr(xla, "_CACHE_BYTES", 0)
    assert_close(run(), together)
    assert not np.any(together[0][32:])


def compiled(run, *shapes):
    """Returns a program of float32 arrays of these shapes and the sizes of 16 groups."""
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(run).lower(*operands, jax.ShapeDtypeStruct((16,), jnp.int32)).compile()


def test_no_matrix_is_expanded_or_transposed():
    def run(lhs, rhs, sizes):
        return xla.forward(lhs, rhs, sizes, None, activation=jnp.multiply, save=False)[0]

    program = compiled(run, (1024, 32), (16, 2, 32, 48))
    matrix_bytes, block_bytes = 4 * 32 * 48, 4 * 64 * (32 + 48)
    assert program.memory_analysis().temp_size_in_bytes < 4 * (matrix_bytes + block_bytes)


def test_gradients_of_several_matrices_are_written_to_one_array():
    def run(lhs, gate, up, sizes):
        return xla.weight_gradient(lhs, (gate, up), sizes, with_sums=False)[0]

    program = compiled(run, (1024, 32), (1024, 48), (1024, 48))
    matrix_bytes, block_bytes = 4 * 32 * 48, 4 * 256 * (32 + 48 + 48)
    assert program.memory_analysis().temp_size_in_bytes < 4 * matrix_bytes + 2 * block_bytes


def test_no_zeros_are_copied_for_the_loops():
    def loss(rows, matrices, sizes):
        for _ in range(2):
            rows = jnp.sin(gmm(rows, matrices, sizes))
        return jnp.sum(rows)

    program = compiled(jax.grad(loss, (0, 1)), (24, 8), (16, 8, 8)).as_text() or ""
    assert "f32[24,8]" in program
    assert not re.findall(r"copy\(%\S*broadcast", program)
