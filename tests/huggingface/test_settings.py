"""Settings of a config.json have the type and range that the model needs, or are refused."""

import json
import math
import pathlib

import pytest

from moelib.core.errors import UserError
from moelib.huggingface.blocks import layers_of, moe_layers_of
from moelib.huggingface.families import (
    NoFamilyError,
    published_settings,
    read_model,
    settings_of,
)
from moelib.layers.moe.router import GroupScore
from moelib.layers.rope import RotaryEmbedding, YarnRotaryEmbedding

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())


PATTERN = {"layers_block_type": None, "hybrid_override_pattern": "ME*-"}


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
    if family == "dbrx" and name == "rms_norm_eps":
        pytest.skip("DBRX has no such setting.")
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
        ("granite", "attention_dropout", -0.1),
        ("granite", "embedding_multiplier", 0),
        ("granitemoe", "logits_scaling", math.inf),
        ("granitemoeshared", "shared_intermediate_size", -1),
        ("hunyuan_v1_moe", "moe_topk", [2, 0]),
        ("qwen2", "max_window_layers", -1),
        ("qwen2", "use_sliding_window", 1),
        ("smollm3", "no_rope_layers", [1.0, 0.0]),
        ("dbrx", "attn_config", [8]),
        ("glm4_moe", "use_qk_norm", 1),
        ("glm4_moe_lite", "mlp_layer_types", "dense"),
        ("minimax_m2", "rotary_dim", 0),
        ("ernie4_5_moe", "moe_k", "2"),
        ("ernie4_5_moe", "moe_num_shared_experts", -1),
        ("hy_v3", "router_scaling_factor", 0.0),
        ("exaone_moe", "sliding_window_pattern", 0),
        ("qwen3_vl_moe", "text_config", [1]),
        ("deepseek_v32", "index_topk", 0),
        ("nemotron_h", "hybrid_override_pattern", 3),
        ("nemotron_h", "moe_latent_size", 0),
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


def linear(**settings):
    """Returns the settings of the layers of Kimi Linear without positions."""
    return {"linear_attn_config": settings}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", {"use_sliding_window": False}, "use_sliding_window=False"),
        ("qwen2", {"sliding_window": None}, "layer_types='sliding_attention'"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias=True"),
        ("olmo3", {"rope_parameters": {"full_attention": {}, "x": {}}}, "rope_parameters='x'"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic'"),
        ("hunyuan_v1_dense", {"head_dim": 2}, "head_dim=2"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [8, 9]}, "moe_intermediate_size="),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2]}, "num_hidden_layers=2"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn="),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_.*=2.0"),
        ("dbrx", {"attn_config": {"alibi": True}}, "alibi=True"),
        ("dbrx", {"attn_config": {"rope_theta": 7.0}}, "rope_theta of the rotary embedding"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=None"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True"),
        ("glm_moe_dsa", {"index_topk_freq": 4}, "index_topk_freq=4"),
        ("nemotron_h", {"hybrid_override_pattern": "MEX"}, "hybrid_override_pattern='MEX'"),
        ("nemotron_h", PATTERN | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='X'"),
        ("nemotron_h", {"layers_block_type": ["mamba2"]}, "layers_block_type='mamba2'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts=2"),
        ("nemotron_h", {"time_step_limit": [0.01, 1.0]}, "time_step_limit="),
        ("nemotron_h", {"use_bias": True}, "use_bias=True"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types='shared'"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function="),
        ("exaone_moe", {"is_moe_layer": [True, True]}, "is_moe_layer="),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("minimax_m2", {"rope_parameters": {"partial_rotary_factor": 1.0}}, "rotary_dim=4"),
        ("hy_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("hy_v3", {"n_group": 2}, "n_group=2"),
        ("hy_v3", {"topk_group": 2}, "topk_group=2"),
        ("kimi_linear", {"norm_topk_prob": False}, "moe_renormalize=True and norm_topk_prob=False"),
        ("nemotron_h", {"rms_norm_eps": 1e-3}, "layer_norm_epsilon=.* and rms_norm_eps=0.001"),
        ("dbrx", {"hidden_size": 32}, "d_model=16 and hidden_size=32"),
        ("kimi_linear", linear(chunk_size=8), "chunk_size=8"),
        ("kimi_linear", linear(head_dim=4), "linear_head_dim=8"),
        ("kimi_linear", linear(num_heads="8"), "linear_num_heads="),
        ("kimi_linear", linear(full_attn_layers=[2]), "layer_types="),
        ("kimi_linear", linear(full_attn_layers=[4], kda_layers=[1]), "kda_layers="),
    ],
)
def test_what_no_layer_computes_is_refused(family, settings, message):
    with pytest.raises(UserError, match=rf"config\.json: .*{message}"):
        read(family, **settings)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("dots1", {"scoring_func": "noaux_tc"}),
        ("ernie4_5_moe", {"moe_capacity": [64, 64, 64], "moe_gate": "topk"}),
        ("exaone_moe", {"is_moe_layer": [False, True], "num_nextn_predict_layers": 1}),
        ("granitemoehybrid", {"init_method": "mup", "normalization_function": "rmsnorm"}),
        ("hy_v3", {"num_nextn_predict_layers": 1}),
        ("kimi_linear", {"norm_topk_prob": True}),
        ("kimi_linear", linear(head_dim=8, full_attn_layers=[4], kda_layers=[1, 2, 3])),
    ],
)
def test_published_settings_that_change_nothing_are_read(family, settings):
    assert read(family, **settings) == read(family)


def test_a_published_dbrx_is_written_with_the_base_where_transformers_reads_it():
    values = json.loads((FIXTURES / "dbrx/config.json").read_text())
    del values["rope_parameters"]
    written = published_settings(values, read("dbrx", rope_parameters=None)[1])[1]
    assert written["rope_parameters"]["rope_theta"] == 500.0
    assert written["attn_config"] == values["attn_config"]


def test_a_rate_of_dropout_is_read_with_a_warning(caplog):
    assert read("granite", attention_dropout=0.1) == read("granite")
    assert "attention_dropout=0.1" in caplog.text


@pytest.mark.parametrize(
    "spelling",
    [
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        PATTERN,
    ],
    ids=str,
)
def test_the_parts_of_nemotron_h_have_other_spellings(spelling):
    assert read("nemotron_h", **spelling) == read("nemotron_h")


def test_no_architecture_has_layers_of_one_part_and_layers_of_both():
    _, cfg = read("nemotron_h")
    first = cfg.decoder.first_layers or cfg.decoder.block
    first[0].feed_forward = layers_of(cfg.decoder)[-1].feed_forward.clone()
    with pytest.raises(NoFamilyError):
        settings_of(cfg)


@pytest.mark.parametrize(
    "changes",
    [
        {"renormalize": False},
        {"num_groups": 2, "num_groups_per_token": 1, "group_score": GroupScore.SUM_OF_TOP_2},
    ],
    ids=str,
)
def test_no_architecture_has_a_router_that_hy_3_lacks(changes):
    _, cfg = read("hy_v3")
    for layer in moe_layers_of(cfg):
        layer.router.set(**changes)
    with pytest.raises(NoFamilyError):
        settings_of(cfg)


def test_one_rotary_embedding_of_olmo_3_is_that_of_layers_without_a_window():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    want = read("olmo3", rope_parameters={"full_attention": {"rope_theta": 7.0, **yarn}})[1]
    for spelling in (
        {"rope_parameters": {"rope_theta": 7.0, **yarn}},
        {"rope_parameters": None, "rope_theta": 7.0, "rope_scaling": yarn},
    ):
        assert read("olmo3", **spelling)[1] == want
    windowed, *_, full = (layer.self_attention for layer in layers_of(want.decoder))
    assert (windowed.window, windowed.rope.klass) == (5, RotaryEmbedding)
    assert (full.window, full.rope.klass) == (None, YarnRotaryEmbedding)
    assert windowed.rope.theta == full.rope.theta == 7.0


def test_more_heads_than_the_width_are_refused():
    with pytest.raises(UserError, match=r"num_attention_heads=1000.*hidden_size"):
        read("mixtral", num_attention_heads=1000, head_dim=None)


@pytest.mark.parametrize("family", ["kimi_linear", "granitemoehybrid", "qwen3_next"])
def test_what_is_written_has_the_names_and_values_of_the_published_settings(family):
    published = json.loads((FIXTURES / family / "config.json").read_text())
    _, written = settings_of(read_model(published, "config.json")[1])
    names = [name for name in written if "expert" in name or name.startswith("moe_")]
    assert len(names) > 1
    for name in names:
        assert written[name] == published[name], name
