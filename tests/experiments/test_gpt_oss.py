"""The GPT-OSS configs: published counts."""

import pytest

from experiments import gpt_oss
from moelib.models.cost import model_cost

CONFIGS = gpt_oss.named_trainer_configs()

PUBLISHED_BILLIONS = {  # Name: (total, active), both embeddings counted.
    "gpt-oss-20b": (20.915, 4.187),
    "gpt-oss-120b": (116.829, 5.712),
    "gpt-oss-3b-v6e4": (3.525, 0.706),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_the_published_counts(name):
    counts = model_cost(CONFIGS[name]().model.instantiate(parent=None), seq_len=1024)
    made = counts.total_parameters, counts.active_parameters
    assert tuple(round(count / 1e9, 3) for count in made) == PUBLISHED_BILLIONS[name]
