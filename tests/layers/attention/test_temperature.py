"""The temperature of attention: a scale of queries by their position."""

import math

import jax.numpy as jnp
import numpy as np

from moelib.core.module import functional
from moelib.layers.attention.temperature import AttentionTemperature


def test_the_scale_grows_by_beta_ln_of_the_number_of_contexts_up_to_the_position():
    cfg = AttentionTemperature.default_config().set(name="temperature", beta=0.5, context=4)
    layer = cfg.instantiate(parent=None)
    q = jnp.ones((1, 5, 2, 3))
    positions = jnp.array([[0, 3, 4, 11, 12]])
    scaled, _ = functional(layer, None, {}, (q, positions), is_training=False)
    scale = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3), 1 + 0.5 * math.log(4)]
    np.testing.assert_allclose(scaled[0, :, 1, 2], scale, rtol=1e-6)
