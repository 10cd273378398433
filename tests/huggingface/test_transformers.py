"""Our exports, loaded by transformers in a Python of its own: the same logits, the same text.

    pytest -m hf tests/models/huggingface

makes a Python for each of two versions once, in .cache/transformers-VERSION (2.3 GB, a few
minutes); `MOELIB_HF_PYTHON` and `MOELIB_HF4_PYTHON` name others that have torch, transformers and,
the first, peft.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import einops
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import flame_moe
from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.module import functional
from moelib.data.batches.lm_input import LMInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import train_bpe
from moelib.huggingface.families import read_model
from moelib.huggingface.peft import save_adapter
from moelib.huggingface.pretrained import load_pretrained, read_config, save_pretrained
from moelib.layers.adapter import is_adapter
from moelib.layers.initializers import normal
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train import convert
from moelib.train.adapters import add_adapters
from moelib.train.init_from import InitFrom
from tests.huggingface.parity_table import run
from tests.huggingface.test_parity import TEXT_PARTS

pytestmark = [pytest.mark.hf, pytest.mark.slow]

HERE = pathlib.Path(__file__).parent
FAMILIES = sorted({path.name for path in (HERE / "fixtures").iterdir()} - {*TEXT_PARTS})
NEWEST, OLDER = "5.24.0", "4.57.6"
# Families that the older version lacks.
NEW = (
    *("deepseek_v32", "exaone_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_linear"),
    *("minimax_m2", "mistral4", "nemotron_h", "qwen3_5_moe", "solar_open"),
)
VARIABLES = {NEWEST: "MOELIB_HF_PYTHON", OLDER: "MOELIB_HF4_PYTHON"}


def python_with(version):
    """Returns a Python that has torch and this version of transformers."""
    if given := os.environ.get(VARIABLES[version]):
        return given
    folder = HERE.parents[2] / f".cache/transformers-{version}"
    packages = ["torch==2.13.0", f"transformers=={version}", "safetensors", "numpy"]
    packages += ["peft==0.21.2"] if version == NEWEST else []
    done = folder / "done"
    if not done.exists() or done.read_text() != " ".join(packages):
        base = shutil.which("python3.11") or sys.executable
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
        done.write_text(" ".join(packages))
    return folder / "bin/python"


@pytest.fixture(scope="module")
def python():
    return python_with(NEWEST)


def in_transformers(python, folder, input_ids, *adapter):
    """Returns (class of the model, logits, greedy text) of a folder, with PEFT's adapter if any."""
    save_file({"input_ids": np.asarray(input_ids)}, folder / "asked.safetensors")
    out = folder / "answered.safetensors"
    command = [python, HERE / "with_transformers.py", folder, out, *adapter]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = load_file(out)
    return done.stdout.split()[-1], answer["logits"], answer["generated"]


def greedy(model, params, ids):
    """Returns the ids and 16 more, each the likeliest."""

    @jax.jit
    def logits(params, ids):
        return functional(
            model, None, params, ({"input_ids": ids},), is_training=False, method="logits"
        )[0]

    first = logits(params, ids)
    buffer = jnp.pad(ids, ((0, 0), (0, 16)))
    for at in range(ids.shape[1], buffer.shape[1]):
        best = jnp.argmax(logits(params, buffer)[:, at - 1], -1)
        buffer = buffer.at[:, at].set(best.astype(buffer.dtype))
    return first, buffer


def check(python, cfg, params, folder, architecture):
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, min(cfg.vocab_size, 40))
    logits, text = greedy(cfg.instantiate(parent=None), params, ids)
    name, theirs, generated = in_transformers(python, folder, ids)
    assert name == architecture
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))
    np.testing.assert_array_equal(text, generated)


SCALED = {"factor": 8.0, "mscale_all_dim": 0.707}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, **SCALED}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}


@pytest.mark.parametrize("version", [NEWEST, OLDER])
@pytest.mark.parametrize(
    ("family", "rope"),
    [*((family, None) for family in FAMILIES), ("deepseek_v2", LINEAR), ("deepseek_v3", LLAMA3)],
    ids=lambda x: x["rope_type"] if isinstance(x, dict) else x,
)
def test_transformers_computes_the_same_and_both_read_what_the_other_writes(
    family, rope, version, tmp_path
):
    if family in NEW and version == OLDER:
        pytest.skip(f"transformers {OLDER} has no {family}")
    settings = json.loads((HERE / "fixtures" / family / "config.json").read_text())
    if family == "granitemoehybrid" and version == OLDER:  # Its norms are over all groups.
        settings["mamba_n_groups"] = 1
    if rope is not None:
        settings["rope_parameters"] = {**rope}
    if family.startswith("deepseek_v2") and version == OLDER:  # It does not scale the scores.
        settings["rope_parameters"].pop("mscale_all_dim")
    _, cfg = read_model(settings, family)
    model = cfg.clone(param_init=config_for_function(normal).set(std=0.3)).instantiate(parent=None)
    params = model.initialize_parameters_recursively(jax.random.key(0))
    architecture = save_pretrained(str(tmp_path), cfg, params)
    check(python_with(version), cfg, params, tmp_path, architecture)
    for folder in (tmp_path, tmp_path / "theirs"):
        back = load_pretrained(str(folder))
        assert back.cfg == cfg
        jax.tree.map(np.testing.assert_array_equal, back.params, params)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "glm4_moe", "minimax_m2"])
def test_twenty_steps_of_adamw_give_the_losses_of_transformers(family, python, tmp_path):
    shutil.copytree(HERE / "fixtures" / family, tmp_path, dirs_exist_ok=True)
    loaded = load_pretrained(str(tmp_path))
    model = loaded.cfg.instantiate(parent=None)
    # No token of this seed is where rounding chooses another expert: noise of 1e-7 in the
    # parameters of qwen3_next changes its losses by 6e-6. That of seed 0 does by 6e-3 at step 10.
    ids = np.random.default_rng(3).integers(0, 40, (4, 2, 80), np.int32)[np.arange(20) % 4]
    save_file({"input_ids": ids}, tmp_path / "asked.safetensors")
    run(python, "train", tmp_path)
    theirs = load_file(tmp_path / "answered.safetensors")["losses"]
    adamw = config_for_function(adamw_optimizer).set(learning_rate=1e-3)
    adamw.set(b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1)
    specs = model.create_parameter_specs_recursively()
    learner = Learner.default_config().set(name="learner", optimizer=adamw)
    learner = learner.instantiate(parent=None, param_specs=specs)

    @jax.jit
    def step(params, state, ids):
        batch = {
            "input_ids": ids,
            "target_labels": jnp.pad(ids, ((0, 0), (0, 1)), constant_values=-1)[:, 1:],
        }

        def loss(params):
            return functional(model, None, params, (batch,), is_training=True)[0][0].mean

        value, gradients = jax.value_and_grad(loss)(params)
        update = learner.update(gradients=gradients, state=state, params=params)
        return update.params, update.state, value

    params, ours = loaded.params, []
    state = learner.init(params)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes in its updates.
        for each in ids:
            params, state, loss = step(params, state, each)
            ours.append(float(loss))
    assert np.mean(ours[-4:]) < np.mean(ours[:4]) - 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scales_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_transformers_reads_the_same_from_deepseek_v3_in_fp8(
    scales_dtype, python, tmp_path, caplog
):
    settings = json.loads((HERE / "fixtures/deepseek_v3/config.json").read_text())
    _, cfg = read_model(settings | {"hidden_size": 256}, "deepseek_v3")
    cfg.param_init = config_for_function(normal).set(std=0.05)
    params = cfg.instantiate(parent=None).initialize_parameters_recursively(jax.random.key(0))
    save_pretrained(str(tmp_path), cfg, params)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        low, scales = in_float8(tensors[name])
        tensors |= {name: low, f"{name}_scale_inv": scales.astype(scales_dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    about = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    about |= {"scale_fmt": "float" if scales_dtype is np.float32 else "ue8m0"}
    settings = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": about}
    del settings["num_nextn_predict_layers"]  # The default in transformers is 1.
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "SHA256SUMS").unlink()
    params = load_pretrained(str(tmp_path)).params
    check(python, cfg, params, tmp_path, "DeepseekV3ForCausalLM")
    theirs = load_pretrained(str(tmp_path / "theirs"))
    assert theirs.settings["num_nextn_predict_layers"] == 1
    assert "not read" not in caplog.text  # It has no modules of multi-token prediction.
    jax.tree.map(np.testing.assert_array_equal, theirs.params, params)


def in_float8(values):
    """Returns (values, scales) of a matrix whose sizes are at most 128 or multiples of it."""
    sizes = {axis: min(128, size) for axis, size in zip("ab", values.shape, strict=True)}
    blocks = einops.rearrange(values, "(i a) (j b) -> i j a b", **sizes)
    scales = np.exp2(np.ceil(np.log2(np.abs(blocks).max((2, 3)) / 448)))
    low = (blocks / scales[..., None, None]).astype(ml_dtypes.float8_e4m3fn)
    return einops.rearrange(low, "i j a b -> (i a) (j b)"), scales


@pytest.mark.parametrize("name", ["flame-moe-tiny", "dense-77m"])
def test_transformers_computes_what_flame_moe_does(name, python, tmp_path):
    cfg = flame_moe.named_trainer_configs()[name]().model
    cfg.set(vocab_size=48, output_init=None, param_init=config_for_function(normal).set(std=0.05))
    params = cfg.instantiate(parent=None).initialize_parameters_recursively(jax.random.key(0))
    architecture = save_pretrained(str(tmp_path), cfg, params)
    check(python, cfg, params, tmp_path, architecture)


@pytest.mark.parametrize(
    "family", ["llama3", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"]
)
def test_peft_computes_the_same_with_the_adapters_of_a_model(family, python, tmp_path):
    shutil.copytree(HERE / "fixtures" / family, base := tmp_path / "base")
    (base / "expected.safetensors").unlink()
    loaded = load_pretrained(str(base))
    cfg = add_adapters(loaded.cfg.clone(), rank=4, alpha=4.0, rank_of_experts=3)
    model = cfg.instantiate(parent=None)

    def drawn(path, x):
        key = jax.random.key(len(path))
        return 0.3 * jax.random.normal(key, x.shape) if is_adapter(path) else x

    params = model.initialize_parameters_recursively(jax.random.key(0), prebuilt=loaded.params)
    params = tree.map_by_path(drawn, params)
    save_adapter(str(tmp_path / "adapter"), cfg, params)
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, 40)
    ours, text = greedy(model, params, ids)
    _, before, _ = in_transformers(python, base, ids)
    _, theirs, generated = in_transformers(python, base, ids, tmp_path / "adapter")
    assert np.abs(theirs - before).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, np.abs(theirs).max()))
    np.testing.assert_array_equal(text, generated)
    merged = convert.merged_adapters(model, params)
    save_pretrained(str(tmp_path / "merged"), loaded.cfg, merged)
    _, whole, _ = in_transformers(python, tmp_path / "merged", ids)
    np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-5 * max(1.0, np.abs(whole).max()))


def run_of(folder, *, model=None, **fields):
    """Returns a trainer of a small FLAME-MoE on a store of text, and trains it."""
    texts = [f"document number {i} of many" for i in range(200)]
    store = folder / "store"
    if not store.exists():
        tokenizer = train_bpe(texts, 280, str(folder / "tokenizer.json"))
        source = InMemorySource.default_config().set(texts=texts).instantiate()
        prepare(source, tokenizer, str(store))
    cfg = flame_moe.tiny().set(
        mesh_shape=mesh_shape_from_axes(data=1), log_every_n_steps=1, evalers={}, **fields
    )
    cfg.model = model or cfg.model.set(vocab_size=320)
    cfg.input = LMInput.default_config().set(
        source=TokenStore.default_config().set(path=str(store)), seq_len=32, global_batch_size=8
    )
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes dtypes.
        trainer.run()
    return trainer


def losses(trainer):
    """Returns {step: loss} of a run."""
    lines = (pathlib.Path(trainer.config.dir) / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def test_a_trained_run_writes_the_same_in_transformers_and_goes_on_from_there(python, tmp_path):
    first = run_of(tmp_path, dir=str(tmp_path / "first"), max_step=60)
    assert losses(first)[60] < losses(first)[1] - 1
    architecture = convert.to_hugging_face(str(tmp_path / "first"), str(tmp_path / "hf"))
    cfg, params = first.config.model, first.trainer_state.model
    assert architecture == "Qwen2MoeForCausalLM"
    check(python, cfg, params, tmp_path / "hf", "Qwen2MoeForCausalLM")

    start = InitFrom.default_config().set(run=str(tmp_path / "hf"))
    fields = {"model": read_config(str(tmp_path / "hf"))[0], "init_from": start}
    again = run_of(tmp_path, dir=str(tmp_path / "again"), max_step=60, **fields)
    batch = jax.tree.map(jnp.asarray, next(iter(first.input.iterator())))
    (loss, _), _ = functional(first.model, None, params, (batch,), is_training=False)
    np.testing.assert_allclose(losses(again)[1], loss.mean, rtol=1e-5)
    assert losses(again)[60] < losses(first)[1] - 1
