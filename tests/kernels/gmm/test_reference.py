import jax.numpy as jnp
import numpy as np

from moelib.kernels.gmm.reference import forward, input_gradient, weight_gradient

SIZES = jnp.asarray([2, 0, 1], jnp.int32)
LHS = jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
GRADS = (jnp.asarray([[1.0], [10.0], [100.0], [1000.0]]),)
RHS = jnp.asarray([1.0, 10.0, 100.0]).reshape(3, 1, 1, 1)


def test_each_row_meets_the_matrices_of_its_own_group():
    out, products = forward(LHS, RHS, SIZES, None, activation=lambda x: x + 1, save=True)
    np.testing.assert_array_equal(out[:, 0], [2, 3, 301, 0])
    np.testing.assert_array_equal(products[0][:, 0], [1, 2, 300, 0])
    np.testing.assert_array_equal(input_gradient(GRADS, RHS, SIZES)[:, 0], [1, 10, 10_000, 0])


def test_weight_gradients_sum_over_the_rows_of_each_group():
    weights, sums = weight_gradient(LHS, GRADS, SIZES, with_sums=True)
    np.testing.assert_array_equal(weights.ravel(), [21, 0, 300])
    np.testing.assert_array_equal(sums.ravel(), [11, 0, 100])
