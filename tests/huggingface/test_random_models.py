"""Random models of transformers: the same logits, losses and gradients, and the weights come back.

The test needs torch and transformers as test_transformers.py does.
"""

import jax
import pytest

from tests.huggingface.parity_table import FAMILIES, differences
from tests.huggingface.test_transformers import NEWEST, python_with

pytestmark = [pytest.mark.hf, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_compute_the_same_in_both_and_come_back(family, tmp_path):
    for number, found in enumerate(differences(python_with(NEWEST), family, tmp_path)):
        assert found.loss < 1e-6, (number, found)
        assert found.gradient < 1e-4, (number, found)
        assert max(found.logits, found.cached, found.exported) < 1e-5, (number, found)
    jax.clear_caches()
