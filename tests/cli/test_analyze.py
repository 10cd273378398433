"""`moelib analyze routing`: logs of checkpoints, numbers, plots and a report; what is missing."""

import json
import shutil

import jax
import pytest

from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.cli import analyze
from moelib.core.command_line import parse_flags
from moelib.core.config import config_for_function
from moelib.core.routing_file import RoutingLog, list_logs, log_folder
from moelib.layers.transformer import LoopStack
from moelib.train.routing_log import RoutingEvaler
from tests import tiny

LAYERS = ["decoder/layer0/feed_forward"]


def analyze_with(run, *args):
    """Runs the command, and returns the numbers of its files by analysis."""
    analyze.run(*parse_flags(analyze.Flags, ["routing", f"--trainer_dir={run}", *args]))
    files = sorted((run / "analysis/routing").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one MoE layer with four checkpoints, and logs of two of them."""
    folder = tmp_path_factory.mktemp("run")
    decoder = tiny.stacked(tiny.transformer_layer(tiny.plain_moe()), stack=LoopStack)
    cfg = tiny.trainer_config(folder, model=tiny.model_config(decoder), save_every=1, max_step=4)
    cfg.checkpointer.keep_last_n = None
    cfg.evalers["val"].eval_policy.set(n=100)
    every_2 = config_for_function(every_n_steps_and_last_policy).set(n=2)
    cfg.routing_log = RoutingEvaler.default_config().set(evaler="val", eval_policy=every_2)
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    return folder


def test_checkpoints_without_a_log_get_one_that_equals_that_of_training(run, capsys):
    assert list_logs(str(run), "val") == {2: True, 4: True}
    trained = RoutingLog(log_folder(str(run), "val", 4))
    trained_ids = [ids.copy() for (ids,) in trained.layer(LAYERS[0], "expert_ids")]
    shutil.rmtree(log_folder(str(run), "val", 4))
    found = analyze_with(run)
    assert list_logs(str(run), "val") == dict.fromkeys((1, 2, 3, 4), True)
    again = RoutingLog(log_folder(str(run), "val", 4))
    for a, (b,) in zip(trained_ids, again.layer(LAYERS[0], "expert_ids"), strict=True):
        assert (a == b).all()
    assert again.header.config_hash == trained.header.config_hash
    assert set(found) == {
        *("load", "saturation", "coactivation", "specialization", "drift", "replay")
    }
    saturation = found["saturation"]["layers"][LAYERS[0]]
    assert saturation.keys() == {"1", "2"}
    assert saturation["2"][-1] == 1.0
    report = (run / "analysis/routing/report.md").read_text()
    for name in found:
        assert (run / f"analysis/routing/{name}.svg").stat().st_size > 1000
        assert f"({name}.svg)" in report
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an analysis: routing"),
        (["routin"], "'routin'.*'routing'"),
        (["routing", "more"], "'more'"),
        (["routing"], "--trainer_dir"),
        (["routing", "--trainer_dir=x", "--steps=last"], "--steps=last"),
        (["routing", "--trainer_dir=x", "--expert_parallel=2,0"], "--expert_parallel=2,0"),
        (["routing", "--trainer_dir=x", "--capacity_factors=a"], "--capacity_factors=a"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        analyze.run(*parse_flags(analyze.Flags, arguments))


def test_a_folder_without_checkpoints_and_logs_is_refused(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        analyze_with(tmp_path)
