import jax.numpy as jnp
import numpy as np

from moelib.kernels.cross_entropy.reference import cross_entropy


def test_it_is_the_sum_of_minus_log_probabilities():
    head = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    labels = jnp.asarray([0, 2, -1], jnp.int32)
    hidden = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    loss, nll, lse = cross_entropy(hidden, head, labels, z_loss=0.0)
    np.testing.assert_allclose(nll, [np.log(2), -np.log(0.8), 0], rtol=1e-6)
    np.testing.assert_allclose(lse, 0, atol=1e-6)
    np.testing.assert_allclose(loss, np.log(2) - np.log(0.8), rtol=1e-6)
