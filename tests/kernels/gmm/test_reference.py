import jax.numpy as jnp
import numpy as np

from moelib.kernels.gmm.reference import gmm, gmm_weight_gradient


def test_each_row_meets_its_own_groups_matrix():
    rhs = jnp.asarray([[[1.0]], [[10.0]], [[100.0]]])
    sizes = jnp.asarray([2, 0, 1], jnp.int32)
    lhs = jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
    out = gmm(lhs, rhs, sizes, transpose_rhs=False, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out[:, 0], [1, 2, 300, 0])


def test_the_weight_gradient_sums_over_a_groups_own_rows():
    sizes = jnp.asarray([2, 0, 1], jnp.int32)
    lhs = jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
    grad = jnp.asarray([[1.0], [10.0], [100.0], [1000.0]])
    out = gmm_weight_gradient(lhs, grad, sizes, out_dtype=jnp.float32)
    np.testing.assert_array_equal(out[:, 0, 0], [21, 0, 300])
