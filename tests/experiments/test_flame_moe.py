"""The FLAME-MoE configs: published counts, names and steps; golden files show every value."""

import pathlib

import jax
import pytest

from experiments import flame_moe
from moelib.core import config_text
from moelib.models.cost import model_cost

GOLDEN = pathlib.Path(__file__).parent / "golden"
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


@pytest.mark.parametrize("name", TRUE_COUNTS)
def test_parameters_equal_the_published_shapes(name):
    counts = cost(CONFIGS[f"flame-moe-{name}"]())
    assert (counts.active_parameters, counts.total_parameters) == TRUE_COUNTS[name]


@pytest.mark.parametrize("name", flame_moe.MOE_SIZES)
def test_names_follow_from_the_authors_formula(name):
    assert flame_moe.published_name(flame_moe.MOE_SIZES[name]) == name


@pytest.mark.parametrize("name", flame_moe.MOE_SIZES)
def test_ten_checkpoints_fit_into_the_steps(name):
    size = flame_moe.MOE_SIZES[name]
    assert size.max_step // size.save_every == 10


@pytest.mark.parametrize(
    ("name", "millions"), [("77m", 77), ("191m", 191), ("411m", 411), ("1.4b", 1439)]
)
def test_dense_baselines_have_the_size_of_their_name(name, millions):
    counts = cost(CONFIGS[f"dense-{name}"]())
    assert round(counts.total_parameters / 1e6) == millions
    assert counts.active_parameters == counts.total_parameters


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_the_golden_one_and_reads_back(name):
    text = CONFIGS[name]().debug_string()
    path = GOLDEN / f"{name}.txt"
    assert path.exists(), f"make it with: python -m tests.experiments.test_flame_moe {name}"
    assert text == path.read_text()
    assert config_text.parse(text) == CONFIGS[name]()


FAST = ("flame-moe-tiny", "flame-moe-38m-100m", "dense-77m")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_step_lowers_on_eight_devices(name, tmp_path):
    cfg = CONFIGS[name]().set(dir=str(tmp_path))
    trainer = cfg.instantiate(parent=None)
    lowered = trainer.lower_train_step()
    assert trainer.mesh().size == len(jax.devices()) == 8
    assert "func.func public @main" in lowered.as_text()


if __name__ == "__main__":  # Writes golden files anew, to be read in review.
    GOLDEN.mkdir(exist_ok=True)
    for config_name, make in CONFIGS.items():
        (GOLDEN / f"{config_name}.txt").write_text(make().debug_string())
