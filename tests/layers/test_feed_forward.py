"""The dense feed-forward layer against its formula."""

import numpy as np
import pytest

from moelib.layers.activation import Activation
from moelib.layers.feed_forward import FeedForward
from tests.layers.calling import build, call, float64, initial, normal
from tests.layers.test_activation import WANT


def layer(activation):
    return build(FeedForward.default_config(), input_dim=4, hidden_dim=6, activation=activation)


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.GELU])
def test_the_activation_of_one_or_two_projections_is_projected_down_whatever_the_mask(activation):
    made = layer(activation)
    params, x = initial(made), normal(2, 3, 4)
    p = float64(params)
    parts = np.einsum("bsd,ndf->nbsf", x.astype(np.float64), p["up"])
    got = call(made, params, x, mask=np.zeros((2, 3), bool))
    np.testing.assert_allclose(got, WANT[activation](*parts) @ p["down"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", Activation)
def test_flops_are_two_a_weight(activation):
    made = layer(activation)
    assert made.forward_flops_per_token(8) == 2 * made.active_parameters()
