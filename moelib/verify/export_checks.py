"""Hugging Face folders: tensors by the names of transformers, and the parameters read back."""

import glob
import operator
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from moelib.core import tree
from moelib.core.tree import Nested
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import NoFamilyError, settings_of
from moelib.models.multi_token_prediction import MULTI_TOKEN
from moelib.train.pretrained import save_pretrained, state_from_hugging_face
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.plain import Plain
from moelib.verify.reference import Reference


def exported(known: Reference) -> Difference | str:
    """Compares the tensors of an export with parameters, and parameters with those read back.

    Tensors are compared with the layout of transformers, without the tables of the conversion.
    Returns the number of compared tensors if there is no difference.
    """
    cfg, probe, want = known.config.model, known.probe, known.start
    if not isinstance(cfg, CausalLM.Config):
        raise CheckSkippedError("not a CausalLM")
    try:
        family, _ = settings_of(cfg)
    except NoFamilyError as error:
        raise CheckSkippedError(str(error).partition(";")[0]) from None
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, cfg, jax.device_put(want.model, probe.shardings.model))
        tensors: dict[str, np.ndarray] = {}
        for path in glob.glob(f"{folder}/*.safetensors"):
            tensors |= load_file(path)
        expected = _expected(tensors, Plain(probe.trainer).layers_apart(want.model))
        if family.zeros(cfg):  # Gates of 0, which halve the output of shared experts.
            double = lambda name: 2.0 if ".shared_expert.down_proj" in name else 1.0
            expected = {name: double(name) * x for name, x in expected.items()}
        got = {name: tensors[name] for name in expected}
        if found := first_difference(expected, got, relative=0.0):
            return found
        done = f"{len(expected)} of {len(tensors)} tensors are known by name"
        if family.zeros(cfg):
            return f"{done}; {family.architecture} has parameters that the model lacks"
        empty = want._replace(model=jax.tree.map(np.zeros_like, want.model))
        empty = jax.device_put(empty, probe.shardings)
        read = state_from_hugging_face(folder, probe.trainer.model)(empty)
    keep = probe.trainer.learner.is_updated
    pair = tree.select(want.model, keep), tree.select(jax.device_get(read.model), keep)
    return first_bit_difference(*pair) or done


def _expected(tensors: dict[str, np.ndarray], params: Nested) -> dict[str, np.ndarray]:
    """Returns the expected values of the tensors that transformers has by these names."""
    found = {"model.embed_tokens.weight": params["embedding"]["weight"]}
    if "lm_head" in params:
        found["lm_head.weight"] = params["lm_head"]["weight"].T
    stack, further = params["decoder"], params.get(MULTI_TOKEN, {})
    layers = [stack[f"layer{i}"] for i in range(len(stack))]
    layers += [further[name] | further[name]["decoder"]["layer0"] for name in sorted(further)]
    for name, x in tensors.items():
        stem = name.removesuffix(".weight")
        parts = re.fullmatch(r"model\.layers\.(\d+)\.(?:(.*)\.)?(\w+)", stem)
        if parts is None or parts[3] not in _TENSORS:
            continue
        module = _module(parts[2], layers[int(parts[1])])
        found[name] = _TENSORS[parts[3]](module).reshape(x.shape)
    return found


def _module(name: str | None, layer: Nested) -> Nested:
    """Returns the parameters of a module of a layer, "mlp.experts.3" for example."""
    if name is None:
        return layer
    if name == "self_attn":
        return layer["self_attention"]
    inside: Any = layer["feed_forward"]
    for part in name.split(".")[1:]:
        if part.isdigit():
            inside = jax.tree.map(operator.itemgetter(int(part)), inside)
        else:
            inside = inside["shared_experts" if part == "shared_expert" else part]
    return inside


def _matrix(x: np.ndarray) -> np.ndarray:
    """Returns a projection from D to heads as a matrix of outputs and inputs."""
    return x.reshape(len(x), -1).T


def _paired(x: np.ndarray, p: Nested) -> np.ndarray:
    """Returns heads with the rotary pairs of latent attention next to each other."""
    start = x.shape[-1] - (p["k_rope"].shape[-1] if "k_rope" in p else 0)
    pairs = np.stack(np.split(x[..., start:], 2, -1), -1)
    return np.concatenate([x[..., :start], pairs.reshape(*x.shape[:-1], -1)], -1)


def _down(p: Nested) -> np.ndarray:
    return np.swapaxes(p["down"], -1, -2) if p["down"].ndim == 2 else p["down"]  # GPT-OSS.


# Last name of a tensor -> its values from the parameters of its module.
_TENSORS: dict[str, Callable[[Nested], np.ndarray]] = {
    "q_proj": lambda p: _matrix(_paired(p["q"], p)),
    "k_proj": lambda p: _matrix(p["kv"][:, 0]),
    "v_proj": lambda p: _matrix(p["kv"][:, 1]),
    "o_proj": lambda p: p["output"].reshape(-1, p["output"].shape[-1]).T,
    "q_a_proj": lambda p: p["q_down"].T,
    "q_b_proj": lambda p: _matrix(_paired(p["q_up"], p)),
    "kv_a_proj_with_mqa": lambda p: np.concatenate([p["kv_down"], _paired(p["k_rope"], p)], -1).T,
    "kv_b_proj": lambda p: _matrix(p["kv_up"]),
    "sinks": lambda p: p["sinks"],
    "q_norm": lambda p: p["q_norm"]["scale"],
    "k_norm": lambda p: p["k_norm"]["scale"],
    "input_layernorm": lambda p: p["attention_norm"]["scale"],
    "post_attention_layernorm": lambda p: p["feed_forward_norm"]["scale"],
    "enorm": lambda p: p["embedding_norm"]["scale"],
    "hnorm": lambda p: p["hidden_norm"]["scale"],
    "eh_proj": lambda p: p["projection"]["weight"].T,
    "gate": lambda p: p["router"]["weight"].T,
    "router": lambda p: p["router"]["weight"].T,
    **dict.fromkeys(("gate_proj", "w1"), lambda p: p["up"][0].T),
    **dict.fromkeys(("up_proj", "w3"), lambda p: p["up"][1].T),
    **dict.fromkeys(("down_proj", "w2"), _down),
    "gate_up_proj": lambda p: np.stack([p["up"][:, 0], p["up"][:, 1]], -1),  # Interleaved.
}
