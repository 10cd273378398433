"""Models of Hugging Face, read from folders and written to them."""

import json
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import flame_moe
from moelib.checkpoint.contents import CheckpointMismatchError
from moelib.checkpoint.safetensors import TensorFolder
from moelib.core.errors import UserError
from moelib.core.param import is_spec
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.huggingface import pretrained
from moelib.huggingface.families import NoFamilyError, read_model, settings_of
from moelib.huggingface.pretrained import (
    load_pretrained,
    read_config,
    read_settings,
    replaced_parameters,
    save_pretrained,
)
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.huggingface.quantized import Dequantized, dequantize, scaled
from moelib.huggingface.tensors import TensorMismatchError
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import LoopStack
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.runs.loading import load_model
from moelib.train.init_from import InitFrom
from tests.python_process import finish, free_port, start
from tests.tiny import assert_trees_equal, trainer_config
from tests.train import import_memory
from tests.two_processes import run_as_two

FIXTURES = pathlib.Path(__file__).parents[1] / "huggingface/fixtures"


def copy_of(family, folder):
    shutil.copytree(FIXTURES / family, folder)
    (folder / "expected.safetensors").unlink()
    return folder


def changed(settings, changes):
    """Returns settings with others; those that are `...` are absent."""
    return {name: x for name, x in (settings | changes).items() if x is not ...}


def change(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()), settings)))


def model_of(family, **settings):
    """Returns the model config of a family with other settings."""
    return read_model(changed(read_settings(str(FIXTURES / family)), settings), "config.json")[1]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures as Linux does")
def test_no_more_than_two_tensors_are_held_next_to_the_model(tmp_path):
    import_memory.write(tmp_path)
    for dtype in ("bfloat16", "float32"):
        [(out, _)] = finish(start("-m", "tests.train.import_memory", tmp_path, dtype))
        held, largest = json.loads(out), import_memory.LARGEST * jnp.dtype(dtype).itemsize
        assert held["model"] > 8 * largest  # Else all of it could be held.
        assert held["extra"] < 3 * largest, (dtype, held)  # Two, and compiled code.


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek_v2", "deepseek_v3", "qwen2_moe")
        ),
    ],
)
def test_a_mesh_holds_what_one_device_holds_and_writes_what_reads_back(family, tmp_path):
    mesh = create_device_mesh(mesh_shape_from_axes(expert=2, fsdp=2, model=2))
    one = load_pretrained(str(FIXTURES / family))
    many = load_pretrained(str(FIXTURES / family), mesh=mesh)
    assert_trees_equal(one.params, many.params)
    experts = many.params["decoder"]["repeated0"]["feed_forward"]["experts"]["up"]
    assert experts.sharding.spec[1] == "expert"
    assert all(leaf.committed for leaf in jax.tree.leaves(many.params))
    save_pretrained(
        str(tmp_path / "out"),
        many.cfg,
        many.params,
        tokenizer=(tokenizer := ByteTokenizer.default_config().instantiate()),
        more_settings={"eos_token_id": 7},
        generation={"eos_token_id": 7},
        max_file_bytes=20_000,
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 7}
    assert read_tokenizer(str(tmp_path / "out")).fingerprint == tokenizer.fingerprint
    back = load_pretrained(str(tmp_path / "out"))
    assert back.cfg == many.cfg
    assert back.settings["eos_token_id"] == 7
    assert_trees_equal(back.params, one.params)


def test_parameters_are_rounded_to_the_dtype_but_for_those_that_stay_in_float32(tmp_path):
    made = load_pretrained(str(FIXTURES / "deepseek_v3"), dtype=jnp.bfloat16)
    exact = load_pretrained(str(FIXTURES / "deepseek_v3"))
    q = made.params["decoder"]["repeated0"]["self_attention"]["q_up"]
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        q, exact.params["decoder"]["repeated0"]["self_attention"]["q_up"].astype(jnp.bfloat16)
    )
    router = made.params["decoder"]["repeated0"]["feed_forward"]["router"]
    assert router["bias_balancing"]["bias"].dtype == jnp.float32
    save_pretrained(str(tmp_path), exact.cfg, exact.params, dtype=jnp.bfloat16)
    written = load_file(tmp_path / "model.safetensors")
    biases = {key for key in written if "e_score_correction_bias" in key}
    assert biases  # They choose experts: rounded, they would choose others.
    for key, values in written.items():
        assert values.dtype == (np.float32 if key in biases else jnp.bfloat16), key


class OwnStack(LoopStack):
    """Might do anything with its layers."""


def random_parameters(cfg):
    """Returns draws of NumPy, which need no compiled program; what is not trained is 0."""
    specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    rng = np.random.default_rng(0)

    def values(spec):
        draws = rng.normal(scale=0.1 if spec.trainable else 0.0, size=spec.shape)
        return jnp.asarray(draws.astype(spec.dtype))

    return jax.tree.map(values, specs, is_leaf=is_spec)


@pytest.mark.slow
def test_flame_moe_is_a_qwen2_moe_whose_shared_experts_count_twice_behind_a_gate_of_a_half(
    tmp_path,
):
    cfg = flame_moe.tiny().model
    params = random_parameters(cfg)
    assert save_pretrained(str(tmp_path), cfg, params) == "Qwen2MoeForCausalLM"
    tensors = load_file(tmp_path / "model.safetensors")
    gate = tensors["model.layers.1.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(gate, np.zeros((1, 128), np.float32))
    shared = params["decoder"]["layer1"]["feed_forward"]["shared_experts"]["down"]
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.shared_expert.down_proj.weight"], 2 * np.asarray(shared).T
    )
    assert "model.layers.0.mlp.gate_proj.weight" in tensors  # The first layer is dense.


def test_a_model_that_no_architecture_computes_is_refused_with_the_differences():
    cfg = flame_moe.tiny().model
    for layer in cfg.decoder.block:
        layer.self_attention.logit_cap = 30.0
    message = r"Qwen2MoeForCausalLM.*logit_cap: 30\.0.*None.*qwen2_moe"
    with pytest.raises(NoFamilyError, match=message):
        settings_of(cfg)


def test_a_stack_of_ones_own_is_no_known_architecture():
    cfg = flame_moe.tiny().model
    layers = cfg.decoder
    cfg.decoder = OwnStack.default_config().set(
        num_layers=layers.num_layers, first_layers=layers.first_layers, block=layers.block
    )
    with pytest.raises(NoFamilyError, match=r"OwnStack"):
        settings_of(cfg)


def test_how_it_trains_changes_no_architecture():
    cfg = flame_moe.named_trainer_configs()["flame-moe-38m-100m"]().model
    assert cfg.decoder.remat is not None
    assert settings_of(cfg)[0].architecture == "Qwen2MoeForCausalLM"


# -- Training that begins with them ----------------------------------------------------------------


@pytest.mark.slow
def test_training_moves_no_balancing_bias_that_was_read(tmp_path):
    folder = str(FIXTURES / "deepseek_v3")
    cfg, _ = read_config(folder)
    start_here = InitFrom.default_config().set(run=folder)
    trainer = trainer_of(cfg, tmp_path, init_from=start_here, max_step=2)
    trainer.run()
    router = trainer.trainer_state.model["decoder"]["repeated0"]["feed_forward"]["router"]
    tensors = load_file(f"{folder}/model.safetensors")
    biases = [tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] for n in (1, 2)]
    np.testing.assert_array_equal(router["bias_balancing"]["bias"], biases)


def trainer_of(model, folder, **fields):
    return trainer_config(str(folder)).set(model=model, **fields).instantiate(parent=None)


@pytest.mark.slow
def test_a_run_may_train_with_other_settings_than_the_folder(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "qwen3_moe"))
    folder = str(FIXTURES / "qwen3_moe")
    loop = LoopStack.default_config().set(
        num_layers=cfg.decoder.num_layers,
        block=[layer.clone() for layer in cfg.decoder.block] * cfg.decoder.num_layers,
    )
    for layer in loop.block:
        layer.feed_forward.load_balance_loss = LoadBalanceLoss.default_config().set(
            weight=0.1, scope=BalanceScope.GLOBAL_BATCH
        )
    start_here = InitFrom.default_config().set(run=folder)
    trainer = trainer_of(cfg.clone(decoder=loop), tmp_path, init_from=start_here)
    trainer.init()
    made = trainer.trainer_state.model["decoder"]["layer1"]
    want = load_pretrained(folder).params["decoder"]["repeated0"]
    assert_trees_equal(made["self_attention"], jax.tree.map(lambda x: x[1], want["self_attention"]))
    assert not made["feed_forward"]["load_counter"]["counts"].any()


def test_kimi_k2_is_a_deepseek_v3_under_another_name(tmp_path):
    folder = copy_of("deepseek_v3", tmp_path / "model")
    yarn = json.loads((folder / "config.json").read_text())["rope_parameters"]
    yarn |= {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0}  # As published.
    change(folder, model_type="kimi_k2", rope_parameters=yarn)
    loaded = load_pretrained(str(folder))
    out = str(tmp_path / "out")
    assert save_pretrained(out, loaded.cfg, loaded.params, files_of=str(folder)) == (
        "DeepseekV3ForCausalLM"
    )
    again = load_pretrained(out)
    assert again.settings["model_type"] == "deepseek_v3"
    assert again.cfg == loaded.cfg
    assert_trees_equal(again.params, loaded.params)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen3_vl_moe", "Qwen3MoeForCausalLM"),
        ("ernie4_5_vl_moe", "Ernie4_5_MoeForCausalLM"),
        ("qwen3_5_vl_moe", "Qwen3NextForCausalLM"),
    ],
)
def test_a_text_part_is_written_as_a_model_of_text(family, architecture, tmp_path, caplog):
    folder = copy_of(family, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    change(folder, text_config={**settings["text_config"], "eos_token_id": 7})
    loaded = load_pretrained(str(folder))
    assert "logits of text do not depend on them" in caplog.text
    served = load_model(str(folder), require_tokenizer=False)
    assert (served.max_length, list(served.stop_ids)) == (64, [7])
    out = str(tmp_path / "out")
    assert save_pretrained(out, loaded.cfg, loaded.params, files_of=str(folder)) == architecture
    assert f"model_type='{settings['model_type']}' is written as" in caplog.text
    again = load_pretrained(out)
    assert (again.cfg, again.settings["eos_token_id"]) == (loaded.cfg, 7)
    assert_trees_equal(again.params, loaded.params)


def test_fused_experts_of_both_generations_are_read(tmp_path):
    folder = copy_of("qwen3_vl_moe", tmp_path / "model")
    want = load_pretrained(str(folder)).params
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    assert tensors["model.language_model.layers.0.mlp.experts.down_proj"].shape == (4, 8, 16)
    tensors = {n: x for n, x in tensors.items() if "gate_up" not in n}  # Square: as transformers 5.
    fused = load_file(FIXTURES / "qwen3_vl_moe/model.safetensors")
    tensors |= {n: x for n, x in fused.items() if "gate_up" in n}
    save_file(tensors, folder / "model.safetensors")
    assert_trees_equal(load_pretrained(str(folder)).params, want)


def test_a_tied_model_may_hold_its_head_twice(tmp_path):
    folder = copy_of("qwen3", tmp_path / "model")
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    want = load_pretrained(str(folder)).params
    assert "lm_head" not in want
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert_trees_equal(load_pretrained(str(folder)).params, want)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=r"lm_head\.weight .*model\.embed_tokens"):
        load_pretrained(str(folder))
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=r"1 missing: model\.embed_tokens\.weight"):
        load_pretrained(str(folder))


@pytest.mark.parametrize(
    ("family", "rope", "factor"),
    [  # (0.1 x 0.707 x ln 40 + 1)^2, for every type but the default.
        ("deepseek_v2", {"rope_type": "yarn", "mscale": 0.707}, 1.589626),
        ("deepseek_v3", {"rope_type": "yarn", "mscale": 0.707}, 1.589626),
        ("deepseek_v3", {"rope_type": "yarn"}, 1.589626),
        ("deepseek_v3", {"rope_type": "linear"}, 1.589626),
        ("deepseek_v3", {"rope_type": "llama3"}, 1.589626),
        ("deepseek_v3", {"rope_type": "default"}, 1.0),
    ],
    ids=str,
)
def test_mscale_all_dim_multiplies_the_scores(family, rope, factor, caplog):
    sizes = {"original_max_position_embeddings": 16, "factor": 40.0, "mscale_all_dim": 0.707}
    cfg = model_of(family, rope_parameters={**rope, **sizes})
    assert cfg.decoder.block[0].self_attention.score_factor == pytest.approx(factor, rel=1e-6)
    assert ("'mscale_all_dim'" in caplog.text) == (rope["rope_type"] == "default")
    assert settings_of(cfg)[0].model_type == family


def test_a_float16_that_would_be_infinite_is_refused(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "llama3"))
    params = random_parameters(cfg)
    params["output_norm"]["scale"] = params["output_norm"]["scale"] + 1e5
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*float16"):
        save_pretrained(str(tmp_path), cfg, params, dtype="float16")


def test_what_transformers_does_not_compute_is_logged(tmp_path, caplog):
    cfg = model_of("mixtral").set(quantization=Quantization.FP8_BLOCK)
    for layer in cfg.decoder.block:
        layer.feed_forward.dispatcher = CapacityDispatcher.default_config().set(capacity_factor=1.0)
    save_pretrained(str(tmp_path), cfg, random_parameters(cfg))
    assert "capacity_factor" in caplog.text
    assert "quantization is not written" in caplog.text


@pytest.mark.slow
def test_a_run_of_another_model_is_told_what_differs(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "olmoe"))
    start_here = InitFrom.default_config().set(run=str(FIXTURES / "olmoe"))
    cfg.decoder.num_layers = 3
    trainer = trainer_of(cfg, tmp_path, init_from=start_here)
    message = r"olmoe/config.json.*decoder.num_layers: 3.*2"
    with pytest.raises(CheckpointMismatchError, match=message):
        trainer.init()


# -- What cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["read_settings", "TensorFolder"])
def test_what_one_process_cannot_read_is_an_error_of_all(name, monkeypatch):
    folder = str(FIXTURES / "llama3")
    cfg, _ = read_config(folder)
    params = random_parameters(cfg)
    real = getattr(pretrained, name)

    def fail(folder):
        if jax.process_index() == 1:
            raise OSError("planted")
        return real(folder)

    monkeypatch.setattr(pretrained, name, fail)
    model = cfg.instantiate(parent=None)
    found = run_as_two(monkeypatch, lambda _: replaced_parameters(params, folder, model))
    assert ["planted" in str(error) for error in found] == [True, True], found


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama3", {"model_type": "lama"}, r"model_type='lama'; .*llama"),
        ("llama3", {"model_type": "jamba"}, r"='jamba'; moelib supports"),
        ("llama3", {"model_type": ...}, r"model_type=None; .*deepseek_v3"),
        ("llama3", {"intermediate_size": ...}, r"config\.json: intermediate_size"),
        ("llama3", {"hidden_act": "gelu"}, r"hidden_act='gelu'; .*'silu'"),
        ("llama3", {"new_thing": 3}, r"new_thing=3.*--ignore_settings=new_thing"),
        ("llama3", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("qwen3_moe", {"num_experts_per_tok": "2"}, r"(?s)config\.json: .*'2'"),
        ("llama3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "high_freq_factor"),
        ("llama3", {"rope_theta": 1e4}, r"rope_theta .*500000\.0 .*10000\.0"),
        ("llama3", {"rope_parameters": {"type": "linear", "rope_type": "yarn"}}, "yarn.*linear"),
        ("mixtral", {"sliding_window": 8}, r"sliding_window=8; .*None"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, r"layer_types='sliding_att"),
        ("llama3", {"rope_parameters": {"rope_type": "longrope"}}, r"='longrope'; .*yarn"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, r"num_local_experts=4; .*8"),
        ("gpt_oss", {"experts_per_token": 3}, r"experts_per_token=3; .*2"),
        ("deepseek_v2", {"topk_method": "best"}, r"topk_method='best'; .*greedy"),
        ("gpt_oss", {"layer_types": ["half_attention"] * 2}, r"layer_types='half_attention'"),
        ("dots1", {"use_sliding_window": True}, r"use_sliding_window=True; .*False"),
        ("dots1", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("glm4_moe", {"scoring_func": "softmax"}, r"scoring_func='softmax'; .*'sigmoid'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["half"] * 3}, r"mlp_layer_types='half'; .*'dense'"),
        ("glm4_moe_lite", {"mlp_layer_types": ..., "first_k_dense_replace": 2}, "replace=2; .*1"),
        ("minimax_m2", {"rotary_dim": 6}, "rotary_dim=6; .*4"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False; .*True"),
        ("mistral4", {"rope_parameters": {"rope_type": "yarn"}}, "llama_4_scaling_beta .*missing"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True; .*False"),
        ("ernie4_5_vl_moe", {"new_thing": 3}, "new_thing=3.*--ignore_settings=new_thing"),
    ],
    ids=str,
)
def test_settings_that_are_not_known_are_named(family, settings, message):
    with pytest.raises(ValueError, match=message):
        model_of(family, **settings)


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "rope_parameters", "settings", "want"),
    [
        ("llama3", ..., {}, {"theta": 1e4}),  # Llama 2, TinyLlama.
        ("llama3", {"rope_type": "default"}, {"rope_theta": 5e5}, {"theta": 5e5}),
        ("mixtral", ..., {"rope_theta": ...}, {"theta": 1e6}),
        ("gpt_oss", ..., {}, {"theta": 150000.0, "factor": 32.0}),
        ("gpt_oss", ..., {"rope_scaling": LINEAR}, {"theta": 150000.0, "factor": 4.0}),
        (
            "llama3",
            {**LINEAR, "rope_theta": 1e4},
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 10000},
            {"theta": 1e4, "factor": 4.0},
        ),
        (
            "llama3",
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
            {"max_position_embeddings": 64},
            {"original_context": 64, "factor": 4.0},
        ),
        (
            "llama3",
            {"rope_type": "default", "rope_theta": 1e4, "wave": 2},
            # SmolLM and unsloth.
            {"is_llama_config": True, "rope_interleaved": False, "unsloth_fixed": True},
            {"theta": 1e4},
        ),
    ],
    ids=str,
)
def test_absent_and_neutral_settings_mean_what_they_mean_in_transformers(
    family, rope_parameters, settings, want
):
    cfg = model_of(family, rope_parameters=rope_parameters, **settings)
    rope = cfg.decoder.block[0].self_attention.rope.to_flat_dict()
    assert {name: rope[name] for name in want} == want


def test_an_absent_dimension_of_heads_is_that_of_transformers():
    assert model_of("qwen3", head_dim=...).decoder.block[0].self_attention.head_dim == 128


def test_a_setting_can_be_declared_to_change_nothing(tmp_path):
    folder = copy_of("llama3", tmp_path / "model")
    want, _ = read_config(str(folder))
    change(folder, new_thing=3)
    found = load_pretrained(str(folder), ignore_settings=["new_thing"])
    assert found.cfg == want
    assert (
        save_pretrained(str(tmp_path / "out"), found.cfg, found.params, files_of=folder)
        == "LlamaForCausalLM"
    )
    assert read_settings(str(tmp_path / "out"))["new_thing"] == 3


def round_trip(cfg, folder, **fields):
    """Writes a model; returns its config.json and the config read from it."""
    save_pretrained(str(folder), cfg, random_parameters(cfg), **fields)
    return read_settings(str(folder)), read_config(str(folder))[0]


def test_token_ids_that_are_not_given_are_null(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "olmoe"))
    settings, _ = round_trip(cfg, tmp_path / "out", more_settings={"eos_token_id": [7, 8]})
    assert settings["pad_token_id"] is None  # Of the class: 1, an embedding that never trains.
    assert settings["eos_token_id"] == [7, 8]


def test_gpt_oss_of_full_layers_has_a_window_that_no_layer_uses(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "gpt_oss"))
    for layer in [*cfg.decoder.first_layers, *cfg.decoder.block]:
        layer.self_attention.window = None
    settings, back = round_trip(cfg, tmp_path / "out")
    assert isinstance(settings["sliding_window"], int)
    assert set(settings["layer_types"]) == {"full_attention"}
    assert {layer.self_attention.window for layer in back.decoder.block} == {None}


def test_heads_that_do_not_divide_the_width_are_named():
    cfg, _ = read_config(str(FIXTURES / "deepseek_v2"))
    for layer in [*cfg.decoder.first_layers, *cfg.decoder.block]:
        layer.self_attention.num_heads = 6
    with pytest.raises(NoFamilyError, match=rf"num_heads=6.*dim={cfg.dim}"):
        settings_of(cfg)


def test_a_llama_whose_heads_do_not_divide_the_width_is_a_mistral(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "llama3"))
    for layer in cfg.decoder.block:
        layer.self_attention.set(num_heads=6, num_kv_heads=2, head_dim=4)
    settings, back = round_trip(cfg, tmp_path / "out")
    assert settings["architectures"] == ["MistralForCausalLM"]
    assert back == cfg


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0}
YARN |= {"original_max_position_embeddings": 16, "mscale_all_dim": 0.707}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_moe", {"head_dim": 6}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("deepseek_v2", {"first_k_dense_replace": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
    ],
    ids=str,
)
def test_what_is_read_can_be_written(family, settings):
    cfg = model_of(family, **settings)
    found, written = settings_of(cfg)
    assert read_model(written | {"model_type": found.model_type}, "config.json")[1] == cfg


def test_the_published_config_is_written_back_while_it_describes_the_model(tmp_path, caplog):
    folder = copy_of("olmoe", tmp_path / "model")
    change(folder, eos_token_id=[7, 8], router_aux_loss_coef=0.02, torch_dtype="bfloat16")
    made = load_pretrained(str(folder))
    published = read_settings(str(folder))
    settings, _ = round_trip(made.cfg, tmp_path / "same", files_of=str(folder))
    older = {"rope_theta": 10000.0, "rope_scaling": None}  # As earlier versions read it.
    published.pop("torch_dtype")
    assert settings == published | {"dtype": "float32"} | older
    change(folder, text_config=None)
    save_pretrained(str(tmp_path / "null"), made.cfg, made.params, files_of=str(folder))
    assert read_settings(str(tmp_path / "null"))["eos_token_id"] == [7, 8]
    made.cfg.decoder.num_layers += 1
    settings, back = round_trip(made.cfg, tmp_path / "other", files_of=str(folder))
    assert settings["num_hidden_layers"] == back.decoder.num_layers == made.cfg.decoder.num_layers
    assert "decoder.num_layers" in caplog.text


def test_modules_that_were_not_read_are_not_in_the_config_that_is_written(tmp_path):
    folder = copy_of("deepseek_v3", tmp_path / "model")
    change(folder, num_nextn_predict_layers=1)
    made = load_pretrained(str(folder))
    settings, _ = round_trip(made.cfg, tmp_path / "out", files_of=str(folder))
    assert settings["num_nextn_predict_layers"] == 0


def test_initial_parameters_are_freed_before_weights_are_read(tmp_path):
    cfg, _ = read_config(str(FIXTURES / "llama3"))
    model = cfg.instantiate(parent=None)
    before = random_parameters(cfg)
    after = replaced_parameters(before, str(FIXTURES / "llama3"), model)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert_trees_equal(after, load_pretrained(str(FIXTURES / "llama3")).params)


_READER = """
import sys
import jax
from moelib.checkpoint.safetensors import TensorFolder
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.huggingface.pretrained import load_pretrained

folder, port, process = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
names, read = [], TensorFolder.read
TensorFolder.read = lambda self, key: names.append(key) or read(self, key)
load_pretrained(folder, mesh=create_device_mesh(mesh_shape_from_axes(expert=4)))
print(",".join(sorted({name.split(".")[5] for name in names if ".experts." in name})))
"""


@pytest.mark.slow
def test_a_process_reads_only_tensors_of_which_it_holds_a_part():
    port = free_port()
    outputs = finish(*(start("-c", _READER, FIXTURES / "mixtral", port, i) for i in range(2)))
    experts = [set(out.split()[-1].split(",")) for out, _ in outputs]
    assert experts[0].isdisjoint(experts[1])
    assert len(experts[0] | experts[1]) == 8


def test_missing_and_unknown_tensors_and_other_shapes_are_listed(tmp_path):
    folder = copy_of("llama3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][:-1])
    save_file(tensors, folder / "model.safetensors")
    message = (
        r"1 missing: model\.norm\.weight.*model\.extra.*lm_head\.weight \[39, 16\].*\[40, 16\]"
    )
    with pytest.raises(TensorMismatchError, match=message):
        load_pretrained(str(folder))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda x: (x * 1000).astype(np.int32), "is of dtype int32"),
        (lambda x: (x * 255).astype(np.uint8), "is of dtype uint8"),
        (lambda x: x > 0, "is of dtype bool"),
        (lambda x: x.astype(np.float64) * 1e300, "not finite in float32"),
        (lambda x: np.where(x == x.max(), np.nan, x), "not finite in float32"),
        (lambda x: np.where(x == x.max(), -np.inf, x), "not finite in float32"),
    ],
)
def test_values_that_are_no_weights_are_refused(changed, message, tmp_path):
    folder = copy_of("llama3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = changed(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=rf"{folder}: model\.norm\.weight .*{message}"):
        load_pretrained(str(folder))


def test_layers_of_deepseek_that_predict_a_second_token_are_skipped_with_a_warning(
    tmp_path, caplog
):
    folder = copy_of("deepseek_v3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    made = load_pretrained(str(folder))
    assert "1 tensors in" in caplog.text
    assert "model.layers.3.eh_proj.weight, are not read" in caplog.text
    caplog.clear()
    change(folder, num_nextn_predict_layers=1)
    tensors.pop("model.layers.3.eh_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    assert_trees_equal(made.params, load_pretrained(str(folder)).params)
    assert "not read" not in caplog.text  # transformers 5 writes the setting without modules.


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "config.json"))):
        load_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json.*JSON"):
        load_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json.*JSON"):
        load_pretrained(str(tmp_path))


# -- Quantized weights -----------------------------------------------------------------------------


def in_float8(values):
    """Returns (values, scales) [m / 128, n / 128] of a matrix in FP8, and what they stand for."""
    scales = np.empty([-(-size // 128) for size in values.shape], np.float32)
    low, exact = np.empty_like(values, ml_dtypes.float8_e4m3fn), np.empty_like(values)
    for i, j in np.ndindex(*scales.shape):
        part = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scales[i, j] = np.abs(values[part]).max() / 448
        low[part] = values[part] / scales[i, j]
        exact[part] = low[part].astype(np.float32) * scales[i, j]
    return low, scales, exact


def test_deepseek_v3_is_read_from_fp8(tmp_path):
    folder = copy_of("deepseek_v3", tmp_path / "model")
    change(folder, hidden_size=160, q_lora_rank=136)
    cfg, _ = read_config(str(folder))
    shutil.rmtree(folder)
    save_pretrained(str(folder), cfg, random_parameters(cfg))
    tensors = load_file(folder / "model.safetensors")
    stored, exact = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        stored[name], stored[name + "_scale_inv"], exact[name] = in_float8(tensors[name])
    assert stored["model.layers.0.self_attn.q_b_proj.weight_scale_inv"].shape == (1, 2)
    (folder / "SHA256SUMS").unlink()
    save_file(exact, folder / "model.safetensors")
    want = load_pretrained(str(folder)).params
    save_file(stored, folder / "model.safetensors")
    about = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    change(folder, quantization_config=about | {"scale_fmt": "ue8m0"})
    assert_trees_equal(load_pretrained(str(folder)).params, want)

    change(folder, quantization_config=about | {"activation_scheme": "static"})
    with pytest.raises(ValueError, match=r"quantization_config=.*'static'"):
        load_pretrained(str(folder))
    ignore = ["quantization_config"]
    assert_trees_equal(load_pretrained(str(folder), ignore_settings=ignore).params, want)

    name = "model.layers.0.self_attn.q_b_proj.weight"
    dequantized = stored | {name: exact[name]}
    stored.pop(name + "_scale_inv")
    for tensors in (dequantized, stored):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(TensorMismatchError, match=rf"{name} .* {name}_scale_inv"):
            load_pretrained(str(folder), ignore_settings=ignore)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2), np.float32), ((2, 2), np.uint8)], ids=["shape", "dtype"]
)
def test_scales_of_another_shape_or_dtype_are_refused(shape, dtype):
    with pytest.raises(ValueError, match=r"w \(160, 200\).*scales \(.*, 2\)"):
        scaled(np.ones((160, 200)), np.ones(shape, dtype), "w")


def test_scales_that_are_exponents_are_powers_of_two(tmp_path):
    """Codes of a byte each: 1.0 and -1.5 in E4M3; 2^-3 and 2^4 in E8M0, whose bias is 127."""
    codes = np.repeat(np.array([[0x38], [0xBC]], np.uint8), 200, axis=1)
    tensors = {"w": codes.view(ml_dtypes.float8_e4m3fn)}
    tensors["w_scale_inv"] = np.array([[124, 131]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    with TensorFolder(str(tmp_path)) as folder:
        values = Dequantized(folder).read("w")
    np.testing.assert_array_equal(values[:, 127:129], [[0.125, 16.0], [-0.1875, -24.0]])


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, table 5.


def quantized(values):
    """Returns (blocks, scales) of values [E, n, 32 G] in MXFP4, and what they are rounded to."""
    grouped = values.reshape(*values.shape[:-1], -1, 32)
    scales = np.floor(np.log2(np.abs(grouped).max(-1))) - 2
    scaled = grouped / np.exp2(scales)[..., None]
    codes = np.argmin(np.abs(np.abs(scaled)[..., None] - np.array(E2M1)), -1)
    exact = np.sign(scaled) * np.array(E2M1)[codes] * np.exp2(scales)[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    return blocks, (scales + 127).astype(np.uint8), exact.reshape(values.shape)


def test_mxfp4_reads_as_the_numbers_it_stands_for():
    values = np.random.default_rng(0).normal(size=(2, 6, 64)) * np.exp2(np.arange(6))[None, :, None]
    blocks, scales, exact = quantized(values)
    assert blocks.shape == (2, 6, 2, 16)
    got = dequantize(blocks, scales)
    assert str(got.dtype) == "bfloat16"
    np.testing.assert_array_equal(got.astype(np.float64), exact.swapaxes(-1, -2))


@pytest.mark.slow
def test_gpt_oss_is_read_from_mxfp4(tmp_path):
    folder = copy_of("gpt_oss", tmp_path / "model")
    change(folder, hidden_size=32, quantization_config={"quant_method": "mxfp4"})
    cfg, _ = read_config(str(folder))
    cfg.decoder.block[0].feed_forward.hidden_dim = 32
    cfg.decoder.block[1].feed_forward.hidden_dim = 32
    change(folder, intermediate_size=32)
    params = random_parameters(cfg)
    shutil.rmtree(tmp_path / "model")
    save_pretrained(str(folder), cfg, params)
    tensors = load_file(folder / "model.safetensors")
    want = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, exact = quantized(tensors.pop(name).swapaxes(-1, -2))
        tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        want[name] = exact.swapaxes(-1, -2)
    save_file(tensors, folder / "model.safetensors")
    (folder / "SHA256SUMS").unlink()
    experts = load_pretrained(str(folder)).params["decoder"]["repeated1"]["feed_forward"]["experts"]
    np.testing.assert_array_equal(
        experts["down"][0], want["model.layers.1.mlp.experts.down_proj"].astype(np.float32)
    )
    np.testing.assert_array_equal(
        experts["up"][0, :, 0],
        want["model.layers.1.mlp.experts.gate_up_proj"][..., ::2].astype(np.float32),
    )
