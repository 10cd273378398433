"""Largest differences from transformers over random models of each family.

    MOELIB_HF_PYTHON=PYTHON python -m tests.huggingface.parity_table [FAMILY ...]

prints a row per family: of the logits, the loss, the gradient of each tensor, and the logits that a
cache gives, over the largest value of each; and whether an export of the weights loads in
transformers, computes the same logits there, and comes back bit-equal.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from moelib.huggingface.families import read_model, tensor_mappings
from moelib.huggingface.pretrained import load_pretrained, save_pretrained
from moelib.huggingface.tensors import checkpoint_tensors
from moelib.inference.cache import new_cache, next_logits
from tests.huggingface.test_parity import batch, computed, logits_of

FAMILIES = (
    *("llama3", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2"),
    *("deepseek_v3", "glm4_moe_lite", "glm4_moe", "solar_open", "dots1", "exaone_moe", "hy_v3"),
    *("minimax_m2", "mistral4", "ernie4_5_moe", "ernie4_5_vl_moe", "qwen3_vl_moe", "gpt_oss"),
    *("qwen2", "mistral", "smollm3", "olmo2", "olmo3", "granite", "hunyuan_v1_dense"),
    *("flex_olmo", "granitemoe", "granitemoeshared", "granitemoehybrid", "hunyuan_v1_moe", "dbrx"),
    *(
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5_vl_moe",
        "kimi_linear",
        "nemotron_h",
        "deepseek_v32",
        "glm_moe_dsa",
    ),
)
# Families that compute what another does: they are written by their config.json.
BY_FILE = ("glm_moe_dsa",)
ROOT = pathlib.Path(__file__).parents[2]
NUM_IN_PROMPT = 5  # Tokens that are stored in the cache at once; the others one by one.


class Differences(NamedTuple):
    """Largest differences from transformers, relative to the largest value or to 1 if it is less.

    Those of gradients are relative to the largest value of the tensor.
    """

    logits: float
    loss: float
    gradient: float
    cached: float  # Logits of a cache, and those of the whole text.
    exported: float  # Logits in transformers of the model that moelib writes.


def differences(python, family, folder):
    """Returns the differences of each random model of a family.

    Raises:
        AssertionError: If weights do not come back bit-equal.
    """
    made, exports = folder / "made", folder / "exports"
    made.mkdir()
    run(python, "make", family, made)
    partial = {path.name: compared(path, exports / path.name) for path in sorted(made.iterdir())}
    run(python, "read", exports)
    for number, found in partial.items():
        answered = load_file(exports / number / "answered.safetensors")["logits"]
        written, theirs = (load_file(path / "model.safetensors") for path in both(exports / number))
        assert written.keys() == theirs.keys()
        for name, values in written.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=name)
        want = load_pretrained(str(made / number))
        back = load_pretrained(str(exports / number / "theirs"))
        assert back.cfg == want.cfg
        jax.tree.map(np.testing.assert_array_equal, back.params, want.params)
        yield Differences(*found[0], apart(found[1], answered))


def both(folder):
    return folder, folder / "theirs"


def compared(made, export):
    """Returns (all differences but of the export, our logits of the first row)."""
    loaded, want = load_pretrained(str(made)), load_file(made / "expected.safetensors")
    model, inputs = loaded.cfg.instantiate(parent=None), batch(want)
    logits = logits_of(model, loaded.params, inputs)
    loss, grads, *_ = computed(model, loaded.params, inputs)
    family, _ = read_model(loaded.settings, str(made))
    got = dict(checkpoint_tensors(grads, tensor_mappings(family, model)))
    names = [name for name in got if f"grad.{name}" in want]  # Not those of images.
    gradient = max(of_gradient(got[name], want[f"grad.{name}"]) for name in names)
    cached = apart(from_cache(model, loaded.params, inputs), logits[:1, NUM_IN_PROMPT - 1 :])
    files_of = str(made) if family.model_type in BY_FILE else None
    save_pretrained(str(export), loaded.cfg, loaded.params, files_of=files_of)
    save_file({"input_ids": want["input_ids"][:1]}, export / "asked.safetensors")
    found = apart(logits, want["logits"]), apart(loss, want["loss"]), gradient, cached
    return found, logits[:1]


def apart(ours, theirs):
    """Returns the largest difference, relative to the largest value or to 1 if it is less."""
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


def of_gradient(ours, theirs):
    """Returns the largest difference relative to the largest value, of which all may be 0.

    Values below 1e-6 are rounding, as of biases that move all scores of a token.
    """
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6))


def from_cache(model, params, inputs):
    """Returns the logits of the first row from its prompt's last token on."""
    ids, positions = (inputs[name][:1] for name in ("input_ids", "positions"))
    cache = new_cache(model, params, 1, ids.shape[1])
    step, found, start = jax.jit(next_logits, static_argnums=0), [], 0
    for stop in range(NUM_IN_PROMPT, ids.shape[1] + 1):
        tokens = ids[:, start:stop], positions[:, start:stop]
        logits, cache, _ = step(model, params, cache, *tokens, jnp.ones(tokens[0].shape, bool))
        found.append(logits)
        start = stop
    return jnp.stack(found, 1)


def run(python, *arguments):
    """Runs random_models.py; raises AssertionError with the end of its output if it fails."""
    command = [python, "-m", "tests.huggingface.random_models", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(families):
    """Prints the table."""
    python = os.environ["MOELIB_HF_PYTHON"]
    families = families or FAMILIES
    print(f"{'family':16}" + "".join(f"{name:>10}" for name in Differences._fields))
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            rows = list(differences(python, family, pathlib.Path(folder)))
        largest = [max(column) for column in zip(*rows, strict=True)]
        print(f"{family:16}" + "".join(f"{value:10.1e}" for value in largest), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])
