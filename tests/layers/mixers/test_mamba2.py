"""Mamba-2 against its formulas in float64."""

import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.layers import initializers
from moelib.layers.mixers.mamba2 import Mamba2
from tests.layers.calling import build, call, float64, initial, normal
from tests.layers.mixers.test_delta_net import (
    POSITIONS,
    SEGMENTS,
    check_split_sequences,
    convolved,
    silu,
)
from tests.oracles.delta_rule import delta_rule

D, H, G, N, P, S = 8, 4, 2, 6, 5, 9
X = normal(2, S, D)


def layer_of(**fields):
    sizes = {"num_heads": H, "num_groups": G, "state_dim": N, "head_dim": P}
    init = config_for_function(initializers.normal).set(std=0.7)
    return build(Mamba2.default_config(), input_dim=D, param_init=init, **{**sizes, **fields})


def by_hand(params, segment_ids, num_groups):
    """Returns the layer's output in float64."""
    p, x = float64(params), X.astype(np.float64)
    u = convolved(np.einsum("bsd,dhp->bshp", x, p["x"]), p["x_conv"]["weight"], segment_ids)
    bc = np.einsum("bsd,digk->bsigk", x, p["bc"])
    b, c = np.moveaxis(convolved(bc, p["bc_conv"]["weight"], segment_ids), 2, 0)
    b, c = (y[:, :, np.arange(H) // (H // num_groups)] for y in (b, c))
    step = np.log1p(np.exp(x @ p["time_step"] + p["time_step_bias"]))
    decay = -np.exp(p["log_decay_rate"]) * step
    out, _ = delta_rule(c, b, u, decay[..., None], step, segment_ids, corrected=False)
    out = out + p["skip"][:, None] * u
    out = out * silu(np.einsum("bsd,dhp->bshp", x, p["gate"]))
    grouped = out.reshape(2, S, num_groups, -1)
    grouped = grouped / np.sqrt(np.mean(grouped**2, -1, keepdims=True) + 1e-6)
    out = (grouped.reshape(2, S, -1) * p["norm"]["scale"]).reshape(out.shape)
    return np.einsum("bshp,hpd->bsd", out, p["output"])


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("fields", [{}, {"num_groups": 1, "conv_width": 2}], ids=str)
def test_the_output_is_that_of_the_formulas(fields, segment_ids):
    layer = layer_of(conv_bias=False, **fields)
    params = initial(layer)
    params["norm"]["scale"] = params["norm"]["scale"] + np.linspace(0, 1, H * P, dtype=np.float32)
    got = np.asarray(call(layer, params, X, positions=POSITIONS, segment_ids=segment_ids))
    valid = np.ones((2, S, 1)) if segment_ids is None else segment_ids[..., None] > 0
    segments = np.ones((2, S), int) if segment_ids is None else segment_ids
    want = by_hand(params, segments, fields.get("num_groups", G))
    np.testing.assert_allclose(got * valid, want * valid, rtol=1e-5, atol=2e-5)


def test_a_mesh_that_splits_sequences_gives_the_numbers_of_one_device():
    check_split_sequences(layer_of())


def test_parameters_and_flops_are_counted_by_hand():
    layer = layer_of()
    matrices = 3 * D * H * P + 2 * D * G * N + D * H
    convolutions = (4 + 1) * (H * P + 2 * G * N)
    assert layer.active_parameters() == matrices + 3 * H + H * P + convolutions
    assert layer.forward_flops_per_token(S) == 2 * matrices + 2 * 2 * H * N * P


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match=r"num_heads=4.*num_groups=3"):
        layer_of(num_groups=3)
