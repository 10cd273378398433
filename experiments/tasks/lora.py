"""LoRA: low-rank changes of a frozen language model, exported merged and in PEFT's format.

python -m experiments.tasks.lora --trainer_dir=runs/lora --base=FOLDER

The text and the model are those of `causal_lm`. Source: Hu et al., arXiv:2106.09685.
"""

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import moelib
from moelib.core import tree
from moelib.huggingface.families import settings_of, tensor_mappings
from moelib.huggingface.tensor_mapping import slices, tensor_shape, to_parameter
from moelib.runs.loading import load_model
from moelib.runtime.storage import write_json

from . import causal_lm
from .command import run_as_command

logger = logging.getLogger(__name__)

RANK, ALPHA = 4, 8.0
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD)


def target(name):
    """Returns the module of a tensor, such as q_proj of layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]


def adapted(model):
    """Returns the mappings from the adapted matrices, as transformers names them, to parameters.

    In a model with experts, which transformers fuses, PEFT 0.21 reads the targets gate_proj,
    up_proj and down_proj as those of the experts alone; in Qwen2-MoE, as those of dense layers and
    shared experts alone. The others stay as they are.
    """
    family, _ = settings_of(model.config)
    found = [
        mapping
        for mapping in tensor_mappings(family, model)
        if mapping.tensor.endswith(".weight") and target(mapping.tensor) in TARGETS
    ]
    if not any(".experts." in mapping.tensor for mapping in found):
        return found
    of_experts = family.model_type != "qwen2_moe"
    held = [
        mapping
        for mapping in found
        if target(mapping.tensor) not in FEED_FORWARD
        or (".experts." in mapping.tensor) == of_experts
    ]
    if len(held) < len(found):
        logger.warning(
            "%d matrices of %s are not adapted: PEFT holds no change of them.",
            len(found) - len(held),
            "dense layers and shared experts" if of_experts else "experts",
        )
    return held


def make_adapter(key, mappings, shapes):
    """Returns the matrices A [RANK, inputs] and B [outputs, RANK]; B is 0, and changes nothing."""
    adapter = {}
    for mapping in mappings:
        key, of_a = jax.random.split(key)
        outputs, inputs = tensor_shape(mapping, shapes[mapping.path].shape)
        a = jax.random.normal(of_a, (RANK, inputs)) / inputs**0.5
        adapter[mapping.tensor] = {"lora_A": a, "lora_B": jnp.zeros((outputs, RANK))}
    return adapter


def merged(params, mappings):
    """Returns the parameters of the base with the changes added."""
    found = tree.by_path(params["base"])
    for mapping in mappings:
        matrices, weight = params["adapter"][mapping.tensor], found[mapping.path]
        change = ALPHA / RANK * matrices["lora_B"] @ matrices["lora_A"]
        change = to_parameter(change, mapping, weight.shape)
        part = slices(mapping.index, weight.shape)
        found[mapping.path] = weight.at[part].add(change.reshape(weight[part].shape))
    return tree.unflatten(found)


def lora_task(model, tokenizer, base):
    """Returns the task that trains the adapter alone."""
    mappings, whole = adapted(model), causal_lm.task_of(model.config, tokenizer)

    def init(key):
        return {"base": base, "adapter": make_adapter(key, mappings, tree.by_path(base))}

    def loss(params, batch, key, is_training):
        return whole.loss(merged(params, mappings), batch, key, is_training)

    return whole.clone(init=init, loss=loss, fixed=["base/.*"])


def save_adapter(folder, adapter, base_folder):
    """Writes an adapter for PEFT."""
    os.makedirs(folder, exist_ok=True)
    tensors = {
        f"base_model.model.{name.removesuffix('weight')}{matrix}.weight": np.asarray(value)
        for name, matrices in adapter.items()
        for matrix, value in matrices.items()
    }
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base_folder),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({target(name) for name in adapter}),
    }
    write_json(os.path.join(folder, "adapter_config.json"), settings)


def run(trainer_dir, *, base=None, base_steps=400, max_step=200, mesh="data=-1"):
    """Returns the bits per token of held-out topics: of the base, adapted, and of the export."""
    base = base or os.path.join(trainer_dir, "base")
    if not os.path.exists(base):
        causal_lm.make_base(base, max_step=base_steps, mesh=mesh)
    loaded = load_model(base)
    task = lora_task(loaded.model, loaded.tokenizer, loaded.parameters)
    examples, test = causal_lm.manual()
    result = causal_lm.train(
        task, examples, trainer_dir, max_step=max_step, learning_rate=1e-2, mesh=mesh
    )
    save_adapter(os.path.join(trainer_dir, "adapter"), result.params["adapter"], base)
    folder = os.path.join(trainer_dir, "merged")
    whole = merged(result.params, adapted(loaded.model))
    causal_lm.export(folder, loaded.model.config, whole, loaded.tokenizer, base)

    plain = causal_lm.task_of(loaded.model.config, loaded.tokenizer)
    models = {
        "base": (plain, loaded.parameters),
        "adapted": (task, result.params),
        "merged": (plain, load_model(folder).parameters),
    }
    return {
        name: moelib.evaluate(task, test, params=params, mesh=mesh)["bits_per_token"]
        for name, (task, params) in models.items()
    }


if __name__ == "__main__":
    run_as_command(run, __doc__)
