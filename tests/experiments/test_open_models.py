"""The open models: the counts of their published weights."""

import pytest

from experiments import gpt_oss, open_models
from moelib.models.cost import model_cost

# Sums of the tensors on the hub; for Qwen2-57B computed by hand. DeepSeek-V3 has 58 biases of 256
# in addition, which no gradient trains.
TOTAL = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2-57b-a14b": 57_408_658_944,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    # The module has 11.5 B without `eh_proj`: README_WEIGHTS of DeepSeek-V3.
    "deepseek-v3-mtp": 671_026_404_352 + 11_507_307_520 + 2 * 7168**2,
    # Sums of the hub less the biases of MoE layers; for GLM-4.5 also less the module that predicts
    # a second token and its copies of embedding and head, for Air those of a fine-tune without it.
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "glm-4.5": 358_337_791_296 - 90 * 160 - 3_988_069_632 - 2 * 151_552 * 5120,
    "glm-4.5-air": 106_852_251_264 - 45 * 128,
    "minimax-m2": 228_689_764_864 - 62 * 256,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    # Less the module that predicts a second token.
    "qwen3-next-80b-a3b": 81_324_862_720 - 1_650_471_424,
    "kimi-linear-48b-a3b": 49_122_681_728 - 26 * 256,
    "glm-4.7-flash": 31_221_488_576 - 46 * 64 - 1_278_094_656,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    # By hand: embeddings and norms, then Mamba-2, attention and experts; 31.6 B as published.
    "nemotron-3-nano-30b-a3b": (2 * 131_072 + 1 + 52) * 2688
    + 23 * (2688 * (10_304 + 4096) + 5 * 6144 + 3 * 64 + 4096)
    + 6 * 2688 * 128 * (2 * 32 + 2 * 2)
    + 23 * (2688 * 128 + 2 * 2688 * (128 * 1856 + 3712)),
    # By hand: embeddings and norms, then per layer norms, attention, router and experts.
    "solar-open-100b": (2 * 196_608 + 1 + 48 * 2) * 4096
    + 48 * (2 * (64 + 8) * 128 * 4096 + 128 * 4096 + 129 * 3 * 1280 * 4096),
    # Sums of the hub, less the biases of MoE layers.
    "mistral-7b-v0.3": 7_248_023_552,
    "olmo-2-7b": 7_298_617_344,
    "olmo-3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "granite-3.1-8b": 8_170_848_256,
    "granite-3.1-3b-a800m": 3_298_793_472,
    "dbrx": 131_596_523_520,
    "dots.llm1": 142_774_381_696 - 61 * 128,
    "ernie-4.5-21b-a3b": 21_825_437_888 - 27 * 64,
    "hunyuan-a13b": 80_393_183_232,
    # By hand: embeddings and norms, per layer attention, router and experts; 33 B as published.
    "flexolmo-7x7b": (2 * 100_352 + 1 + 32 * 4) * 4096
    + 32 * (4 * 4096**2 + 7 * 4096 + 7 * 3 * 4096 * 11_008),
    # By hand: embeddings, norms, attention, a dense layer and 47 of experts; 236 B as published.
    "k-exaone-236b-a23b": (2 * 153_600 + 1 + 48 * 2) * 6144
    + 48 * (2 * (64 + 8) * 128 * 6144 + 2 * 128)
    + 3 * 6144 * 18_432
    + 47 * (128 * 6144 + 129 * 3 * 6144 * 2048),
    # DeepSeek-V3 and, per layer, queries, keys with their norm, and weights of the indexer.
    "deepseek-v3.2": 671_026_404_352 + 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128),
    # By hand: embeddings and norms, latent attention and its indexer, 3 dense layers and 75 of
    # experts; 744 B as published.
    "glm-5": (2 * 154_880 + 1 + 78 * 2) * 6144
    + 78 * (6144 * (2048 + 512 + 64) + 2048 + 512 + 64 * (2048 * 256 + 512 * 448 + 256 * 6144))
    + 78 * (2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128)
    + 3 * 3 * 6144 * 12_288
    + 75 * (256 * 6144 + 257 * 3 * 6144 * 2048),
    # By hand: embeddings and norms, 30 layers with a state, 10 with attention, experts; 35 B as
    # published.
    "qwen3.5-35b-a3b": (2 * 248_320 + 1 + 40 * 2) * 2048
    + 30 * (2048 * (8192 + 4096 + 2 * 32) + 8192 * 4 + 2 * 32 + 128 + 4096 * 2048)
    + 10 * (2048 * 256 * (2 * 16 + 2 * 2 + 16) + 2 * 256)
    + 40 * (256 * 2048 + 2048 + 257 * 3 * 2048 * 512),
    # By hand, as the published 119 B have the encoder of images too.
    "mistral-small-4": (2 * 131_072 + 1 + 36 * 2) * 4096
    + 36 * (4096 * 1024 + 1024 + 1024 * 32 * 128 + 4096 * (256 + 64) + 256)
    + 36 * (256 * 32 * (64 + 128) + 32 * 128 * 4096 + 128 * 4096 + 129 * 3 * 2048 * 4096),
}
# In billions, both embeddings counted.
ACTIVE = {
    "qwen3-30b-a3b": 3.353,
    "mixtral-8x7b": 12.880,
    "deepseek-v2-lite": 2.661,
    "deepseek-v2": 21.376,
    "deepseek-v3": 37.552,
    "olmoe-1b-7b": 1.282,
    "glm-4.5": 33.632,  # 32.08 without both, as published.
    "glm-4.5-air": 13.424,  # 12.18 without both.
    "qwen3-next-80b-a3b": 3.875,  # 3.25 without both.
    "kimi-linear-48b-a3b": 3.484,  # 3.11 without the input's.
    "glm-4.7-flash": 3.897,  # 3.26 without both.
    "granite-4.0-h-tiny": 1.465,
    "granite-4.0-h-small": 8.803,  # 9 B as published.
    "nemotron-3-nano-30b-a3b": 3.580,  # 3.6 as published; 3.2 without the input's.
    "solar-open-100b": 12.055,  # 12 B as published.
    "mistral-small-4": 6.633,
    "dbrx": 36.470,  # 36 B as published.
    "dots.llm1": 14.017,  # 14 B as published.
    "ernie-4.5-21b-a3b": 3.352,  # 3 B as published.
    "hunyuan-a13b": 12.747,  # 13 B as published.
    "k-exaone-236b-a23b": 23.668,  # 23 B as published.
    "glm-5": 41.785,  # 40 B as published, less the input's embedding.
    "qwen3.5-35b-a3b": 3.455,  # 3 B as published, less both embeddings.
    "granite-3.1-3b-a800m": 0.883,  # 800 M as published.
}


@pytest.mark.parametrize("name", open_models.named_trainer_configs())
def test_parameter_counts_are_the_published_ones(name):
    cfg = open_models.named_trainer_configs()[name]()
    counts = model_cost(cfg.model.instantiate(parent=None), seq_len=1024)
    assert counts.total_parameters == TOTAL[name]
    if name in ACTIVE:
        assert round(counts.active_parameters / 1e9, 3) == ACTIVE[name]


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
