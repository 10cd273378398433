"""Random models of transformers: the same logits, losses and gradients, and the weights come back.

All but one test need torch and transformers as those of test_transformers.py do.
"""

import jax
import pytest

from tests.huggingface.parity_table import (
    FAMILIES,
    NUM_IN_PROMPT,
    apart,
    differences,
    from_cache,
)
from tests.huggingface.test_parity import batch, fixture, loaded, logits_of
from tests.huggingface.test_transformers import NEWEST, python_with


def test_the_table_compares_logits_of_a_cache():  # The rest of it needs torch.
    model, _, params = loaded("llama3")
    inputs = batch(fixture("llama3")[3], slice(0, 1))
    want = logits_of(model, params, inputs)[:, NUM_IN_PROMPT - 1 :]
    assert apart(from_cache(model, params, inputs), want) < 1e-5


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_compute_the_same_in_both_and_come_back(family, tmp_path):
    for number, found in enumerate(differences(python_with(NEWEST), family, tmp_path)):
        assert found.loss < 1e-6, (number, found)
        assert found.gradient < 1e-4, (number, found)
        assert max(found.logits, found.cached, found.exported) < 1e-5, (number, found)
    jax.clear_caches()
