"""Every named config equals its golden file, and its step lowers."""

import math
import pathlib

import jax
import pytest

from experiments import flame_moe, gpt_oss, long_run, open_models, variants
from moelib.core import config_text
from moelib.core.config_text import sub_configs
from moelib.parallel.mesh import mesh_shape_from_axes

GOLDEN = pathlib.Path(__file__).parent / "golden"
CONFIGS = {
    name: make
    for module in (flame_moe, gpt_oss, long_run, open_models, variants)
    for name, make in module.named_trainer_configs().items()
}
FAST = ("flame-moe-tiny", "dense-77m")


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_the_golden_one_and_reads_back(name):
    text = CONFIGS[name]().debug_string()
    path = GOLDEN / f"{name}.txt"
    assert path.exists(), "make it with: python -m tests.experiments.test_named_configs"
    assert text == path.read_text()
    assert config_text.parse(text) == CONFIGS[name]()


@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_fields_share_a_config(name):  # --set of one would change the other.
    cfg = CONFIGS[name]()
    assert len({id(inner) for _, inner in sub_configs(cfg)}) == len(list(sub_configs(cfg)))


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_step_lowers_on_eight_devices_or_those_of_its_mesh(name, tmp_path):
    cfg = CONFIGS[name]().set(dir=str(tmp_path))
    sizes = [int(axis) for axis in cfg.mesh_shape]
    fixed = math.prod(axis for axis in sizes if axis > 0)
    size = max(8, fixed) if -1 in sizes else fixed
    if size > len(jax.devices()):
        cfg.mesh_shape = mesh_shape_from_axes(fsdp=-1, expert=8)
        size = 8
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:size])
    with trainer.on_mesh():
        lowered = trainer.trace_train_step().lower()
    assert trainer.mesh().size == size
    assert "func.func public @main" in lowered.as_text()


if __name__ == "__main__":  # Writes the golden files, for review.
    GOLDEN.mkdir(exist_ok=True)
    for config_name, make in CONFIGS.items():
        (GOLDEN / f"{config_name}.txt").write_text(make().debug_string())
