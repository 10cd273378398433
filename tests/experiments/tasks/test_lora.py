"""LoRA trains small matrices alone, which plain NumPy applies to the base."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.tasks import causal_lm, lora
from moelib.huggingface.pretrained import read_config


def test_adapter_is_the_difference_of_the_merged_model_and_the_base(tmp_path, monkeypatch):
    train, test = causal_lm.manual()
    monkeypatch.setattr(causal_lm, "manual", lambda: (train, test[:64]))
    model, tokenizer = causal_lm.small_model()
    params = jax.jit(causal_lm.task_of(model, tokenizer).init)(jax.random.key(0))
    causal_lm.export(str(tmp_path / "base"), model, params, tokenizer)
    found = lora.run(str(tmp_path), max_step=6)
    assert found["adapted"] < found["base"] - 0.02
    assert found["merged"] == pytest.approx(found["adapted"], rel=1e-5)
    base, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"]) == ("LORA", 4)
    scale, adapted = settings["lora_alpha"] / settings["r"], set()
    for name in adapter:
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
            b = adapter[name.replace("lora_A", "lora_B")]
            change = scale * b @ adapter[name]
            weight = module + ".weight"
            np.testing.assert_allclose(merged[weight] - base[weight], change, atol=1e-6)
            assert np.abs(change).max() > 1e-3
            adapted.add(weight)
    assert {name.split(".")[-2] for name in adapted} == set(settings["target_modules"])
    assert len(adapted) == len(adapter) / 2 == 14
    for name in base.keys() - adapted:
        np.testing.assert_array_equal(base[name], merged[name])


@pytest.mark.parametrize(
    ("family", "count"),
    [  # Matrices of attention, and those of experts or of dense layers and shared experts.
        ("gpt_oss", 2 * 4),  # With biases.
        ("deepseek_v3", 3 + 2 * 8 * 3),
        ("qwen2_moe", 3 * 4 + 3 + 2 * 3),
    ],
)
def test_matrices_that_peft_holds_are_adapted(family, count, caplog):
    cfg, _ = read_config(f"tests/huggingface/fixtures/{family}")
    assert len({mapping.tensor for mapping in lora.adapted(cfg.instantiate(parent=None))}) == count
    assert ("are not adapted" in caplog.text) == (family != "gpt_oss")


@pytest.mark.slow
def test_meshes_agree(tmp_path):
    settings = {"base_steps": 4, "max_step": 4}
    data = lora.run(str(tmp_path / "data"), mesh="data=8", **settings)
    model = lora.run(str(tmp_path / "model"), mesh="data=2,fsdp=2,model=2", **settings)
    assert model == pytest.approx(data, rel=1e-4)


@pytest.mark.slow
def test_score(tmp_path):
    found = lora.run(str(tmp_path))
    assert found["adapted"] < found["base"] - 0.3
