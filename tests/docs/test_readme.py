"""The model on the first page: it trains by the command that is printed below it."""

import re
import shlex
import sys

import jax
import pytest

from docs.generate import ROOT
from moelib import launch
from moelib.cli import main
from moelib.core.config import config_for_function
from moelib.data.batches.synthetic import SyntheticInput
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.runtime.command_line import parse_flags
from moelib.train.trainer import SpmdTrainer
from tests.docs import blocks


# --8<-- [start:model]
def small() -> SpmdTrainer.Config:
    """Returns a language model of two layers, in which a token visits 2 of 8 experts."""
    attention = GroupedQueryAttention.default_config().set(num_heads=4, num_kv_heads=2)
    moe = MoELayer.default_config().set(hidden_dim=128, num_experts=8, num_experts_per_token=2)
    moe.load_balance_loss = LoadBalanceLoss.default_config().set(weight=0.01)
    layer = TransformerLayer.default_config().set(self_attention=attention, feed_forward=moe)
    decoder = ScanStack.default_config().set(num_layers=2, block=[layer])
    adamw = config_for_function(adamw_optimizer).set(learning_rate=0.01, weight_decay=0.1)
    return SpmdTrainer.default_config().set(
        model=CausalLM.default_config().set(vocab_size=32, dim=64, decoder=decoder),
        learner=Learner.default_config().set(optimizer=adamw),
        input=SyntheticInput.default_config().set(vocab_size=32, seq_len=64, global_batch_size=16),
        max_step=50,
    )


def named_trainer_configs():
    """Returns the configs that `--config` can name."""
    return {"small": small}


# --8<-- [end:model]


def test_the_tree_has_every_folder():
    (tree,) = [each.text for each in blocks.blocks("README.md") if "moelib/\n" in each.text]
    found = set(re.findall(r"(\w+)/", tree))
    folders = {path.parent.name for path in (ROOT / "moelib").glob("*/__init__.py")}
    assert folders | {"cloud", "experiments", "benchmarks", "tests", "docs"} <= found


@pytest.fixture
def train_flags(tmp_path, monkeypatch):
    """Writes the model of the README to my_model.py, and returns the flags of its commands."""
    (model,) = [each for each in blocks.blocks("README.md") if "def small" in each.text]
    (tmp_path / "my_model.py").write_text(model.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    commands = [each for each in blocks.commands("README.md") if each.startswith("moelib train ")]
    yield [parse_flags(launch.TrainFlags, shlex.split(each)[2:])[0] for each in commands]
    sys.modules.pop("my_model", None)


def test_the_first_command_sets_the_run(train_flags):
    cfg = train_flags[0].load()
    assert (cfg.max_step, cfg.dir) == (50, "runs/small")
    cfg.instantiate(parent=None)


@pytest.mark.slow
def test_the_model_trains_by_the_first_command(train_flags):
    cfg = train_flags[0].load()
    cfg.set(checkpointer=None, max_step=15)
    result = cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    assert result["loss"] < 3.0  # Uniform over the words: log 31 = 3.4.


def test_the_second_command_changes_sizes_and_the_mesh(train_flags):
    cfg = train_flags[1].load()
    assert (cfg.max_step, cfg.model.dim) == (100, 128)
    assert sorted(cfg.mesh_shape)[-2:] == [2, 4]
    cfg.instantiate(parent=None)


@pytest.mark.slow  # 156,555 candidates are estimated.
def test_the_table_of_plan_has_the_figures_that_are_printed(capsys):
    (page,) = [each.text for each in blocks.blocks("README.md") if "$ moelib plan" in each.text]
    command, _, *rows = page.splitlines()
    assert main.run(shlex.split(command)[2:]) == 0
    cells = lambda line: re.split(r"\s{2,}", line.strip())
    printed = {
        tuple(found[:2]): found for x in capsys.readouterr().out.splitlines() if (found := cells(x))
    }
    assert len(rows) == 3
    for row in map(cells, rows):
        assert set(row) <= set(printed[tuple(row[:2])])
