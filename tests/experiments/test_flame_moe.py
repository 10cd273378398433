"""The FLAME-MoE configs: published counts, names and steps."""

import pytest

from experiments import flame_moe
from moelib.core import config_text
from moelib.core.config import REQUIRED, RequiredFieldMissingError
from moelib.models.cost import model_cost

CONFIGS = flame_moe.named_trainer_configs()

# Counted from the published shapes by hand: every matrix, router and norm once, V = 50304.
TRUE_COUNTS = {  # Name: (active, total).
    "38m-100m": (37_952_256, 100_670_208),
    "98m-349m": (100_025_856, 350_897_664),
    "115m-459m": (116_249_088, 461_197_824),
    "290m-1.3b": (296_537_088, 1_300_024_320),
    "419m-2.2b": (425_917_440, 2_182_020_096),
    "721m-3.8b": (734_934_528, 3_839_473_152),
    "1.7b-10.3b": (1_754_081_280, 10_283_722_752),
}


def cost(cfg):
    return model_cost(cfg.model.instantiate(parent=None), seq_len=2048)


@pytest.mark.parametrize("name", flame_moe.MOE_SIZES)
def test_parameters_and_names_are_the_published_ones(name):
    assert flame_moe.published_name(flame_moe.MOE_SIZES[name]) == name
    counts = cost(CONFIGS[f"flame-moe-{name}"]())
    assert (counts.active_parameters, counts.total_parameters) == TRUE_COUNTS[name]
    embeddings = 2 * flame_moe.VOCAB_SIZE * flame_moe.MOE_SIZES[name].dim
    assert counts.active_non_embedding_parameters == counts.active_parameters - embeddings


@pytest.mark.parametrize("name", flame_moe.MOE_SIZES)
def test_ten_evenly_spaced_checkpoints_and_the_last(name):
    size, cfg = flame_moe.MOE_SIZES[name], CONFIGS[f"flame-moe-{name}"]()
    policies = (cfg.checkpointer.save_policy, cfg.evalers["validation"].eval_policy)
    for policy in policies:
        acts = policy.clone(max_step=cfg.max_step).instantiate()
        steps = [step for step in range(1, cfg.max_step + 1) if acts(step=step)]
        assert steps == [size.save_every * i for i in range(1, 11)] + [size.max_step]
    assert cfg.checkpointer.keep_last_n is None  # All are kept.


@pytest.mark.parametrize(
    ("name", "millions"), [("77m", 77), ("191m", 191), ("411m", 411), ("1.4b", 1439)]
)
def test_dense_baselines_have_the_size_of_their_name(name, millions):
    counts = cost(CONFIGS[f"dense-{name}"]())
    assert round(counts.total_parameters / 1e6) == millions
    assert counts.active_parameters == counts.total_parameters


@pytest.mark.parametrize(
    "path",
    [
        "model.vocab_size",
        "model.decoder.first_layers[0].feed_forward.hidden_dim",
        "model.decoder.block[0].self_attention.num_heads",
        "model.decoder.block[0].feed_forward.shared_experts.hidden_dim",
        "learner.optimizer.args[1].learning_rate.peak_lr",
    ],
)
def test_an_unset_field_is_named_by_its_path_in_the_config(path, tmp_path):
    cfg = CONFIGS["flame-moe-tiny"]().set(dir=str(tmp_path))
    config_text.set_at(cfg, path, REQUIRED)
    with pytest.raises(RequiredFieldMissingError) as error:
        cfg.instantiate(parent=None).trace_train_step()
    assert str(error.value).startswith(f"{path} must be set")
