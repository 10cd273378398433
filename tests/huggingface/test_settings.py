"""Settings of a config.json have the type and range that the model needs, or are refused."""

import json
import math
import pathlib

import pytest

from moelib.core.errors import UserError
from moelib.huggingface.families import read_model

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())


def read(family, **settings):
    values = json.loads((FIXTURES / family / "config.json").read_text())
    text = values.get("text_config", values)  # Of a text part.
    for name, value in settings.items():
        (values if name in values else text)[name] = value
    return read_model(values, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rms_norm_eps", math.nan, "1e-12 to 0.1"),
        ("rms_norm_eps", -1, "1e-12 to 0.1"),
        ("rms_norm_eps", "32", "1e-12 to 0.1"),
        ("rms_norm_eps", 10**400, "1e-12 to 0.1"),
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("num_hidden_layers", 10**18, "from 1 to 1000"),
        ("num_hidden_layers", 0, "from 1"),
        ("num_hidden_layers", True, "from 1"),
        ("hidden_size", 10**18, "from 1 to 1000000000"),
        ("vocab_size", 1.5, "integer"),
        ("num_attention_heads", 0, "from 1"),
        ("rope_scaling", [1], "an object"),
        ("model_type", ["llama"], "supports"),
    ],
)
def test_a_setting_of_every_family_is_checked(family, name, value, allowed):
    with pytest.raises(UserError, match=rf"config\.json: {name}=.*{allowed}"):
        read(family, **{name: value})


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("qwen3", "head_dim", 0),
        ("qwen3", "num_key_value_heads", -2),
        ("llama3", "intermediate_size", -1),
        ("llama3", "attention_bias", "no"),
        ("deepseek_v3", "routed_scaling_factor", math.nan),
        ("deepseek_v3", "n_group", 0),
        ("deepseek_v3", "first_k_dense_replace", -1),
        ("deepseek_v2", "q_lora_rank", "16"),
        ("qwen2_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "decoder_sparse_step", math.nan),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("qwen3_moe", "num_experts_per_tok", None),
        ("gpt_oss", "sliding_window", -8),
        ("gpt_oss", "layer_types", [3]),
        ("olmoe", "clip_qkv", -1.0),
        ("glm4_moe", "use_qk_norm", 1),
        ("glm4_moe_lite", "mlp_layer_types", "dense"),
        ("minimax_m2", "rotary_dim", 0),
        ("ernie4_5_moe", "moe_k", "2"),
        ("ernie4_5_moe", "moe_num_shared_experts", -1),
        ("hy_v3", "router_scaling_factor", 0.0),
        ("exaone_moe", "sliding_window_pattern", 0),
        ("qwen3_vl_moe", "text_config", [1]),
    ],
)
def test_a_setting_of_a_family_is_checked(family, name, value):
    with pytest.raises(UserError, match=rf"config\.json: {name}=.*must be"):
        read(family, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", 0), ("factor", "8"), ("rope_theta", math.inf), ("low_freq_factor", math.nan)],
)
def test_parameters_of_rotary_embeddings_are_checked(name, value):
    parameters = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, name: value}
    with pytest.raises(UserError, match=rf"config\.json: {name}=.*above 0"):
        read("llama3", rope_parameters=parameters, rope_scaling=None)


def test_more_heads_than_the_width_are_refused():
    with pytest.raises(UserError, match=r"num_attention_heads=1000.*hidden_size"):
        read("mixtral", num_attention_heads=1000, head_dim=None)
