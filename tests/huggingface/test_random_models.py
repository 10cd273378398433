"""Random small models of transformers: logits, loss, gradients, text and exports are the same.

The Python with transformers is that of test_transformers.py.
"""

import subprocess

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moelib.huggingface.pretrained import load_pretrained, save_pretrained
from moelib.inference.generate import Settings, generate_tokens
from tests.huggingface import test_parity as parity
from tests.huggingface.test_transformers import HERE, NEWEST, python_with

pytestmark = [pytest.mark.hf, pytest.mark.slow]

FAMILIES = (
    *("qwen2", "mistral", "smollm3", "olmo2", "olmo3", "flex_olmo"),
    *("granite", "granitemoe", "granitemoeshared"),
)
COUNT = 6
FILE = "model.safetensors"
GREEDY = Settings(max_new_tokens=16, temperature=0.0)


def in_transformers(*arguments):
    module = "tests.huggingface.random_models"
    command = [python_with(NEWEST), "-m", module, *map(str, arguments)]
    root = HERE.parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """Returns a folder with the models of a family."""
    folder = tmp_path_factory.mktemp(request.param)
    in_transformers("make", folder, request.param, COUNT)
    return folder


@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_model_computes_the_same(models, number):
    folder = models / str(number)
    print((folder / "config.json").read_text())
    parity.test_logits_are_those_of_transformers(folder)
    parity.test_losses_experts_and_every_gradient_are_those_of_transformers(folder)
    model, _, params = parity.loaded(folder)
    want = parity.expected(folder)
    texts = list(generate_tokens(model, params, want["input_ids"], GREEDY))  # With a cache.
    np.testing.assert_array_equal(texts, want["generated"][:, 12:])


def test_transformers_computes_the_same_with_exports_and_tensors_come_back(models):
    exports = []
    for folder in sorted(models.iterdir()):
        cfg, params, _ = load_pretrained(str(folder))
        for name, options in (("export", {}), ("export_published", {"files_of": str(folder)})):
            exports.append((folder / name, cfg, params))
            architecture = save_pretrained(str(folder / name), cfg, params, **options)
        assert architecture == parity.fixture(folder)[0].architecture
        assert load_file(folder / name / FILE).keys() == load_file(folder / FILE).keys()
    in_transformers("check", models)
    for folder, cfg, params in exports:
        for again in (folder, folder / "theirs"):
            back = load_pretrained(str(again))
            assert back.cfg == cfg
            jax.tree.map(np.testing.assert_array_equal, back.params, params)
