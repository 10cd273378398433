import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.gmm.xla import block_sizes, gmm


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "expected"),
    [
        (16384, 16, (256, 64)),
        (4096, 16, (256, 64)),
        (4096, 64, (64,)),
        (64, 64, (8,)),
        (5, 2, (5,)),
        (1, 1, (1,)),
    ],
)
def test_blocks_follow_the_mean_group(num_rows, num_groups, expected):
    assert block_sizes(num_rows, num_groups) == expected


def test_no_matrix_is_expanded_or_transposed():
    shapes = [(1024, 32), (16, 2, 32, 48)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)

    def run(lhs, rhs, sizes):
        return gmm(lhs, rhs, 1, sizes, None, transpose_rhs=False, out_dtype=jnp.float32)

    compiled = jax.jit(run).lower(*operands, sizes).compile()
    matrix_bytes, block_bytes = 4 * 32 * 48, 4 * 64 * (32 + 48)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * (matrix_bytes + block_bytes)
