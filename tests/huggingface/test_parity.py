"""Every family against what transformers computes: logits, loss, gradients, experts, tensors.

The fixtures are made by make_fixtures.py.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from moelib.core.module import functional
from moelib.huggingface.families import read_model, settings_of, tensor_mappings
from moelib.huggingface.tensor_mapping import layer_numbers
from moelib.huggingface.tensors import checkpoint_tensors, load_parameters
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss
from moelib.layers.moe.layer import MoELayer

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())


class Tensors(dict):
    """Arrays as a source of tensors."""

    def shape(self, key):
        return self[key].shape

    read = dict.__getitem__


@functools.cache
def fixture(family):
    """Returns (family, our config, its tensors, what transformers computes)."""
    folder = FIXTURES / family
    settings = json.loads((folder / "config.json").read_text())
    found, cfg = read_model(settings, "config.json")
    tensors, want = load_file(folder / "model.safetensors"), expected(folder)
    for name in [n for n in tensors if any(re.fullmatch(p, n) for p in found.ignored(cfg))]:
        del tensors[name], want[f"grad.{name}"]  # Of images.
    return found, cfg, Tensors(tensors), want


def expected(folder):
    return load_file(folder / "expected.safetensors")


@functools.cache
def loaded(family):
    """Returns (model, mappings, parameters)."""
    found, cfg, tensors, _ = fixture(family)
    model = cfg.instantiate(parent=None)
    mappings = tensor_mappings(found, model)
    targets = jax.eval_shape(
        model.initialize_parameters_recursively, jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    )
    return model, mappings, load_parameters(tensors, mappings, targets)


def batch(want, rows=slice(None), tokens=slice(None)):
    """Returns our batch; labels are shifted, as transformers does inside."""
    labels = np.full_like(want["labels"], -100)
    labels[:, :-1] = want["labels"][:, 1:]
    arrays = {
        "input_ids": want["input_ids"],
        "positions": want["position_ids"],
        "segment_ids": want["segment_ids"],
        "target_labels": labels,
    }
    return {name: jnp.asarray(x[rows, tokens], jnp.int32) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, inputs):
    return functional(model, None, params, (inputs,), is_training=False, method="logits")[0]


@functools.partial(jax.jit, static_argnums=0)
def computed(model, params, inputs):
    """Returns (loss, its gradients, module outputs, auxiliary loss)."""

    def loss(params):
        (value, _), outputs = functional(model, None, params, (inputs,), is_training=False)
        return value.mean, (outputs.module_outputs, outputs.total_aux_loss())

    (value, outputs), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads, *outputs


def put_out(self, routing, num_dropped):
    """Puts out the routing instead of metrics, and adds the balance loss of transformers."""
    assert num_dropped.shape == ()
    self.add_module_output("ids", routing.expert_ids)
    balance = LoadBalanceLoss.default_config().set(
        weight=float(self.config.num_experts_per_token), scope=BalanceScope.ALL_LAYERS
    )
    self._add_balance_loss(routing, balance, jnp.sum(routing.mask, dtype=jnp.float32))


@functools.cache
def results(family):
    """Returns (loss, gradients, {layer: ids [B, S, K]}, auxiliary loss)."""
    model, _, params = loaded(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoELayer, "_report", put_out)
        loss, grads, outputs, aux_loss = computed(model, params, batch(fixture(family)[3]))
    routing = {}
    for name, numbers in layer_numbers(model.children["decoder"]):
        made = outputs.get("decoder", {}).get(name)
        for i, number in enumerate(numbers if made else []):
            ids = made["feed_forward"]["ids"]
            routing[number] = ids[i] if ids.ndim == 4 else ids
    return loss, grads, routing, aux_loss


# Gradients of the others are computed among the slow tests.
IN_EVERY_RUN = ("llama3", "deepseek_v2_lite", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    model, _, params = loaded(family)
    want = fixture(family)[3]
    logits = logits_of(model, params, batch(want))
    # The rounding of float32 grows with the largest logits, and depends on the processor.
    largest = np.abs(want["logits"]).max()
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=5e-6 * largest)


SOME = [f if f in IN_EVERY_RUN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
# Families whose balance loss is that of all layers.
POOLED = (
    *(
        "dbrx",
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "granitemoeshared",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_5_moe",
    ),
    *("qwen3_moe", "qwen3_next"),
)


@pytest.mark.parametrize("family", SOME)
def test_losses_experts_and_every_gradient_are_those_of_transformers(family):
    _, mappings, _ = loaded(family)
    _, _, tensors, want = fixture(family)
    value, grads, routing, aux_loss = results(family)
    np.testing.assert_allclose(value, want["loss"], rtol=1e-6)
    if family in POOLED:
        # Counts of transformers are not divided by K; the weight is K here.
        np.testing.assert_allclose(aux_loss, want["aux_loss"], rtol=1e-6)
    choices = {key for key in want if key.startswith("choices.")}
    assert choices == {f"choices.{number}" for number in routing}
    for number, ids in routing.items():
        np.testing.assert_array_equal(np.sort(ids, -1), want[f"choices.{number}"])
    got = dict(checkpoint_tensors(grads, mappings))
    names = {key.removeprefix("grad.") for key in want if key.startswith("grad.")}
    buffers = {key for key in tensors if key.endswith(("e_score_correction_bias", "expert_bias"))}
    assert names == got.keys() - buffers
    for name in names:
        grad = want[f"grad.{name}"]
        # Some experts get no token, and indexers learn from a loss of their own.
        assert np.any(grad) or ".experts." in name or ".indexer." in name, name
        atol = 1e-4 * np.max(np.abs(grad))
        np.testing.assert_allclose(got[name], grad, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("family", POOLED)
def test_the_weight_of_the_pooled_loss_is_exported_per_expert_of_a_token(family):
    cfg = fixture(family)[1].clone()
    layers = [layer.feed_forward for layer in (*cfg.decoder.first_layers, *cfg.decoder.block)]
    layers = [layer for layer in layers if isinstance(layer, MoELayer.Config)]
    for layer in layers:
        layer.load_balance_loss = LoadBalanceLoss.default_config().set(
            weight=0.02 * layer.num_experts_per_token, scope=BalanceScope.ALL_LAYERS
        )
    assert coefficient(cfg) == pytest.approx(0.02)
    layers[-1].load_balance_loss.scope = BalanceScope.MICRO_BATCH  # Of another loss.
    assert coefficient(cfg) is None


def coefficient(cfg):
    """Returns the coefficient of the balance loss that is written, None for none."""
    settings = settings_of(cfg)[1]
    if "ffn_config" in settings:  # Of DBRX.
        return settings["ffn_config"].get("moe_loss_weight")
    return settings.get("router_aux_loss_coef")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_they_are_alone(family):
    model, _, params = loaded(family)
    want = fixture(family)[3]
    (cut,) = np.flatnonzero(np.diff(want["segment_ids"][1])) + 1
    for tokens in (slice(0, cut), slice(cut, None)):
        alone = batch(want, slice(1, 2), tokens)
        del alone["segment_ids"]
        logits = logits_of(model, params, alone)
        np.testing.assert_allclose(logits, want["logits"][1:, tokens], rtol=0, atol=1e-5)


# Families that are written as another one.
TEXT_PARTS = ("ernie4_5_vl_moe", "qwen3_5_vl_moe", "qwen3_vl_moe")
# Of which the other one's settings differ.
WRITTEN_AS = {"qwen3_5_moe": "qwen3_next", "glm_moe_dsa": "deepseek_v32"}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*TEXT_PARTS}))
def test_tensors_and_settings_come_back_as_they_were(family):
    _, mappings, params = loaded(family)
    found, cfg, tensors, _ = fixture(family)
    back = dict(checkpoint_tensors(params, mappings))
    assert back.keys() == tensors.keys()
    for key, values in tensors.items():
        np.testing.assert_array_equal(back[key], values)
    again, settings = settings_of(cfg)
    if family in WRITTEN_AS:
        assert again.model_type == WRITTEN_AS[family]
        again, settings = found, found.settings(cfg)
    assert (again.model_type, again.architecture) == (found.model_type, found.architecture)
    theirs = json.loads((FIXTURES / family / "config.json").read_text())
    if not theirs.get("mlp_only_layers", [0]):  # It is of no layer.
        theirs.pop("intermediate_size")
    if (theirs.get("rope_parameters") or {}).get("alpha"):  # Only the stretched base is written.
        theirs.pop("rope_parameters")
    for name in settings.keys() & theirs.keys():
        ours = settings[name]
        if name == "rope_parameters":  # What is not written has its default.
            ours = {key: ours[key] for key in theirs[name]}
        elif name == "layer_types":  # Granite 4 as transformers 4 reads it, too.
            newer_names = {"mamba": "linear_attention", "attention": "full_attention"}
            ours = [newer_names.get(kind, kind) for kind in ours]
        elif name in ("attn_config", "ffn_config"):
            ours = {**theirs[name], **ours}
        assert theirs[name] in (ours, None), name
    settings["model_type"] = found.model_type
    older = {name: x for name, x in settings.items() if name != "rope_parameters"}
    newer = {name: x for name, x in older.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = settings.get("rope_parameters")
    for spelling in (settings, older, newer):  # All, and what transformers 4 and 5 read.
        assert read_model(spelling, "again")[1] == cfg
