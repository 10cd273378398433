"""Tiny runs keep the layers and experts of their configs, and are trained by one command."""

import pytest

from benchmarks import tiny_runs
from experiments.flame_moe import named_trainer_configs
from moelib.core import tree
from moelib.core.command_line import run_command
from moelib.core.metrics_file import read_metrics
from moelib.layers.moe.layer import MoELayer


def test_all_models_are_named():
    names = set(named_trainer_configs()) - {"flame-moe-tiny"}
    assert set(tiny_runs.NAMES) == names
    assert len(names) == 7 + 4


@pytest.mark.parametrize("name", tiny_runs.NAMES)
def test_layers_and_experts_are_those_of_the_config(name):
    own = named_trainer_configs()[name]()
    small = tiny_runs.tiny_config(name, "unused", steps=8, num_devices=1)
    layer, tiny = (cfg.model.decoder.block[0].feed_forward for cfg in (own, small))
    assert type(layer) is type(tiny)
    if isinstance(layer, MoELayer.Config):
        assert tiny.num_experts == layer.num_experts == 64
        assert tiny.num_experts_per_token == layer.num_experts_per_token == 6
        assert tiny.load_balance_loss == layer.load_balance_loss
    assert small.model.decoder.num_layers == own.model.decoder.num_layers
    assert small.model.dim == own.model.dim // 32


def test_models_have_different_sizes():
    sizes = []
    for name in tiny_runs.NAMES:
        small = tiny_runs.tiny_config(name, "unused", steps=8, num_devices=1)
        model = small.model.clone(name="model").instantiate(parent=None)
        sizes.append(tree.count_elements(model.create_parameter_specs_recursively()))
    assert sizes[:7] == sorted(set(sizes[:7]))  # Of FLAME-MoE, in the order of their names.
    assert sizes[7:] == sorted(set(sizes[7:]))
    assert max(sizes) < 20_000_000


@pytest.mark.slow
def test_every_model_is_trained(tmp_path, capsys):
    flags = [f"--folder={tmp_path}"]
    status = run_command("tiny_runs", tiny_runs.Flags, tiny_runs.run, flags)
    assert status == 0
    table = capsys.readouterr().out.partition("Tiny runs")[2]
    for name in tiny_runs.NAMES:
        assert name in table
        steps = [line["step"] for line in read_metrics(str(tmp_path / name), ["loss"])]
        assert steps[:8] == list(range(1, 9))
        report = tmp_path / name / "analysis/routing/report.md"
        assert report.exists() == name.startswith("flame-moe")


def test_a_part_that_no_name_has_is_refused(capsys):
    assert run_command("tiny_runs", tiny_runs.Flags, tiny_runs.run, ["--only=none"]) == 2
    assert "--only=none" in capsys.readouterr().err
