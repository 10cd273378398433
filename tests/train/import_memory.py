"""Reads a model of Hugging Face in a process of its own, and prints the memory that it took."""

import json
import os
import sys
import threading
import time

import jax
import ml_dtypes
import numpy as np

from moelib.checkpoint.safetensors import write_tensors
from moelib.core import tree
from moelib.core.param import is_spec
from moelib.huggingface.families import read_model, tensor_mappings
from moelib.huggingface.pretrained import load_pretrained
from moelib.huggingface.tensor_mapping import tensor_shape

LARGEST = 8192 * 512  # Entries of the largest tensor, the embedding.
SETTINGS = {
    "model_type": "mixtral",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def write(folder):
    """Writes a model with bfloat16 weights, of which stacked experts are the largest here."""
    family, cfg = read_model(SETTINGS, "settings")
    model = cfg.instantiate(parent=None)
    specs = dict(tree.flatten_items(model.create_parameter_specs_recursively(), is_spec))
    draw = np.random.default_rng(0).random

    def tensors():
        for mapping in tensor_mappings(family, model):
            shape = tensor_shape(mapping, specs[mapping.path].shape)
            yield mapping.tensor, draw(shape, np.float32).astype(ml_dtypes.bfloat16)

    write_tensors(str(folder), tensors(), max_file_bytes=100 << 20)
    (folder / "config.json").write_text(json.dumps(SETTINGS))


def main():
    """Prints, as JSON, the bytes of the model and the most that was held next to it."""
    jax.block_until_ready(jax.numpy.zeros(8))
    before, most, done = _held(), 0, threading.Event()

    def watch():
        nonlocal most
        while not done.is_set():
            most = max(most, _held())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = jax.block_until_ready(load_pretrained(sys.argv[1], dtype=sys.argv[2]).params)
    done.set()
    watcher.join()
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(json.dumps({"model": size, "extra": most - before - size}))


def _held():
    """Returns the bytes of memory of this process that are no files' pages."""
    with open("/proc/self/status", encoding="ascii") as lines:
        found = next(line for line in lines if line.startswith("RssAnon"))
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
