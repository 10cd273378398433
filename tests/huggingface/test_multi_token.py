"""Multi-token prediction of DeepSeek-V3: losses and gradients of the paper, and its tensors.

The fixture is made by make_multi_token.py.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moelib.core.module import functional
from moelib.core.param import is_spec
from moelib.huggingface.families import read_model, tensor_mappings
from moelib.huggingface.pretrained import load_pretrained, read_config, save_pretrained
from moelib.huggingface.tensors import TensorMismatchError, checkpoint_tensors
from moelib.runs.loading import load_model
from moelib.train import convert
from tests.huggingface.test_parity import batch, logits_of
from tests.huggingface.test_pretrained import random_parameters

FOLDER = pathlib.Path(__file__).parent / "multi_token"


@functools.cache
def loaded():
    return load_pretrained(str(FOLDER), multi_token_prediction=True)


@functools.partial(jax.jit, static_argnums=0)
def computed(model, params, inputs):
    """Returns ((objective, summaries), gradients)."""

    def objective(params):
        (loss, _), found = functional(model, None, params, (inputs,), is_training=False)
        return loss.mean + found.total_aux_loss(), found.summaries

    return jax.value_and_grad(objective, has_aux=True)(params)


@pytest.mark.slow
def test_losses_and_every_gradient_are_those_of_the_papers_equations():
    cfg, params, settings = loaded()
    model, want = cfg.instantiate(parent=None), load_file(FOLDER / "expected.safetensors")
    (_, summaries), grads = computed(model, params, batch(want))
    for depth in (1, 2):
        found = summaries["multi_token_prediction"][f"depth{depth}_cross_entropy"]
        np.testing.assert_allclose(found.mean, want[f"loss.{depth}"], rtol=1e-6)
    family, _ = read_model(settings, "config.json")
    got = dict(checkpoint_tensors(grads, tensor_mappings(family, model)))
    names = [key for key in want if key.startswith("grad.")]
    assert len(names) > 80
    for name in names:
        grad = want[name]
        assert np.any(grad) or ".experts." in name, name
        actual, atol = got[name.removeprefix("grad.")], 1e-4 * np.max(np.abs(grad))
        np.testing.assert_allclose(actual, grad, rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
def test_logits_do_not_depend_on_the_modules(caplog):
    want = batch(load_file(FOLDER / "expected.safetensors"))
    without = load_pretrained(str(FOLDER))
    assert "convert --multi_token_prediction reads modules" in caplog.text
    assert without.cfg.multi_token_prediction is None
    models = [(each.cfg.instantiate(parent=None), each.params) for each in (loaded(), without)]
    np.testing.assert_array_equal(*(logits_of(*each, want) for each in models))


def test_every_tensor_and_its_copies_are_written_again(tmp_path):
    cfg, params, _ = loaded()
    assert cfg.multi_token_prediction.num_depths == 2
    save_pretrained(str(tmp_path), cfg, params)
    want, got = (load_file(each / "model.safetensors") for each in (FOLDER, tmp_path))
    assert want.keys() == got.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values)
    assert read_config(str(tmp_path), multi_token_prediction=True)[0] == cfg


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_other_families_with_the_modules_come_back(family, tmp_path):
    values = json.loads((FOLDER.parent / "fixtures" / family / "config.json").read_text())
    values["num_nextn_predict_layers"] = 1
    cfg = read_model(values, "config.json", multi_token_prediction=True)[1]
    params = random_parameters(cfg)
    save_pretrained(str(tmp_path), cfg, params)
    further = f"model.layers.{cfg.decoder.num_layers}"
    assert f"{further}.shared_head.head.weight" in load_file(tmp_path / "model.safetensors")
    again = load_pretrained(str(tmp_path), multi_token_prediction=True)
    assert (again.settings["model_type"], again.cfg) == (family, cfg)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.slow
def test_a_converted_run_keeps_the_modules(tmp_path):
    run, back = str(tmp_path / "run"), tmp_path / "back"
    convert.from_hugging_face(str(FOLDER), run, multi_token_prediction=True)
    assert "multi_token_prediction" in load_model(run, require_tokenizer=False).parameters
    convert.to_hugging_face(run, str(back))
    want, got = (load_file(each / "model.safetensors") for each in (FOLDER, back))
    assert want.keys() == got.keys()


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_differs_is_refused(copy, tmp_path):
    tensors = load_file(FOLDER / "model.safetensors")
    tensors[f"model.layers.4.{copy}"] = tensors[f"model.layers.4.{copy}"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(TensorMismatchError, match=rf"model\.layers\.4\.{copy} differs from"):
        load_pretrained(str(tmp_path), multi_token_prediction=True)
    load_pretrained(str(tmp_path))


def test_a_folder_without_the_tensors_of_the_modules_is_refused(tmp_path):
    tensors = load_file(FOLDER / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".layers.4." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(TensorMismatchError, match=r"missing: model\.layers\.4\.eh_proj\.weight"):
        load_pretrained(str(tmp_path), multi_token_prediction=True)


def test_a_model_of_another_family_is_written_without_the_modules(tmp_path, caplog):
    cfg, _ = read_config(str(FOLDER.parent / "fixtures" / "qwen3_moe"))
    plain = cfg.clone()
    further = loaded().cfg.multi_token_prediction.clone()
    further.module.layer = cfg.decoder.block[0]
    cfg.multi_token_prediction = further
    specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs, is_leaf=is_spec)
    save_pretrained(str(tmp_path), cfg, zeros)
    assert "multi_token_prediction is not written: Qwen3MoeForCausalLM" in caplog.text
    assert load_pretrained(str(tmp_path)).cfg == plain
