"""Fields of layers that do not fit are refused by their names and values."""

import math
import re

import pytest

from moelib.core.errors import UserError
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher, RingDispatcher
from moelib.layers.moe.router import GroupScore, Router
from moelib.layers.norm import RMSNorm
from moelib.layers.rope import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    yarn_mscale,
)
from tests import tiny
from tests.layers.calling import build, call, normal

GROUPED = GroupedQueryAttention.default_config().set(input_dim=8, num_heads=4)
LATENT = LatentAttention.default_config().set(
    input_dim=8, num_heads=4, kv_lora_rank=4, nope_head_dim=6, rope_head_dim=4, v_head_dim=3
)
ROUTER = Router.default_config().set(
    input_dim=8,
    num_experts=12,
    num_experts_per_token=3,
    num_groups=4,
    num_groups_per_token=2,
    group_score=GroupScore.SUM_OF_TOP_2,
)
NORM = RMSNorm.default_config().set(dim=6)
LINEAR = LinearRotaryEmbedding.default_config()
YARN = YarnRotaryEmbedding.default_config().set(theta=1e4, factor=32.0, original_context=4096)
LLAMA3 = Llama3RotaryEmbedding.default_config().set(theta=5e5, factor=8.0, original_context=8192)
STACK = tiny.stacked(
    *[tiny.transformer_layer()] * 2, first_layers=[tiny.transformer_layer()], input_dim=8
)

# The config, its fields, and further parts of the error.
REFUSED = [
    (GROUPED, {"num_heads": 3}, "input_dim=8", "head_dim"),
    (GROUPED, {"num_kv_heads": 3}, "num_heads=4"),
    *((GROUPED, {name: 0}) for name in ("num_heads", "num_kv_heads", "window")),
    (GROUPED, {"head_dim": -4}),
    (GROUPED, {"logit_cap": -1.0}),
    *((LATENT, {name: 0}) for name in ("num_heads", "q_lora_rank", "nope_head_dim", "v_head_dim")),
    *((LATENT, {"rope_head_dim": dim}) for dim in (0, 3)),
    (LATENT, {"kv_lora_rank": -1}),
    (LATENT, {"score_factor": 0.0}),
    *((NORM, {"eps": eps}) for eps in (0.0, -1.0, math.nan, math.inf)),
    (LINEAR, {"factor": 0.5}),
    (YARN, {"factor": 0.5}),
    (YARN, {"beta_fast": 0.5}),
    (YARN, {"beta_slow": 0.0}, "beta_fast="),
    *((YARN, {"attention_factor": 1.0, n: 0.707}) for n in ("mscale", "mscale_all_dim")),
    *((LLAMA3, {"factor": factor}) for factor in (0.5, math.nan)),
    *((LLAMA3, {"theta": theta}) for theta in (0.0, math.nan)),
    (LLAMA3, {"original_context": 0}),
    (LLAMA3, {"high_freq_factor": 1.0}),
    (ROUTER, {"num_groups": None}, "num_groups_per_token=2"),
    (ROUTER, {"num_groups_per_token": None}, "num_groups=4"),
    *((ROUTER, {"num_groups": number}, "num_experts=12") for number in (0, 5)),
    *((ROUTER, {"num_groups_per_token": number}, "num_groups=4") for number in (0, 5)),
    (ROUTER, {"num_groups": 12, "num_groups_per_token": 4}, "'sum_of_top_2'"),
    (ROUTER, {"num_experts_per_token": 7}),
    *((ROUTER, {"num_experts_per_token": number}, "num_experts=12") for number in (0, 13)),
    (STACK, {"num_layers": 4}, "1 first", "2"),
    (STACK, {"num_layers": 0}),
    (STACK, {"num_layers": 1_000_000_001}, "10000"),  # Else hours of building.
    (tiny.plain_moe(input_dim=8), {"shared_gate": True}, "shared_experts"),
    (tiny.plain_moe(input_dim=8), {"num_experts_per_token": 5}, "router", "num_experts=4"),
]


@pytest.mark.parametrize(("cfg", "fields", "more"), [(c, f, more) for c, f, *more in REFUSED])
def test_fields_that_do_not_fit_are_named_with_their_values(cfg, fields, more):
    with pytest.raises(UserError) as error:
        build(cfg, **fields)
    assert re.match(r"layer: |router: |\w+\.Config\.", str(error.value))
    for named in (*more, *(f"{name}={value}" for name, value in fields.items())):
        assert named in str(error.value)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(LoadBalanceLoss, -0.1), (LoadBalanceLoss, math.nan), (RouterZLoss, math.inf)],
)
def test_weights_of_losses_are_finite_and_not_negative(loss, weight):
    with pytest.raises(ValueError, match=f"{loss.__name__}.Config.weight={weight}"):
        loss.default_config().set(weight=weight)


@pytest.mark.parametrize("rotary_dim", [3, 10])
def test_a_rotated_dimension_beyond_that_of_heads_or_odd_is_refused(rotary_dim):
    layer = build(RotaryEmbedding.default_config(), rotary_dim=rotary_dim)
    with pytest.raises(ValueError, match=f"layer: rotary_dim={rotary_dim}; .* head_dim=8"):
        call(layer, {}, normal(2, 4, 3, 8), normal(2, 4).astype(int))


def test_a_factor_of_yarn_below_one_is_refused():
    with pytest.raises(ValueError, match=r"yarn_mscale: factor=0\.5"):
        yarn_mscale(factor=0.5)


@pytest.mark.parametrize(
    ("dispatcher", "field", "factor"),
    [
        (CapacityDispatcher, "capacity_factor", 0.0),
        (RaggedDispatcher, "round_factor", -1.0),
        (RaggedDispatcher, "round_factor", math.inf),
        (RingDispatcher, "round_factor", math.nan),
    ],
)
def test_factors_that_are_not_finite_and_above_zero_are_refused(dispatcher, field, factor):
    message = f"^{dispatcher.__name__}.Config.{field}={factor}: .*float > 0 and < inf"
    with pytest.raises(ValueError, match=message):
        dispatcher.default_config().set(**{field: factor})
