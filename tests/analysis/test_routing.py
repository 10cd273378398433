"""Analyses of planted logs: series over steps, their report, and what does not compare."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from moelib.analysis.routing import Settings, analyze, open_logs, write_analysis
from moelib.analysis.routing_report import plot
from moelib.core.errors import UserError
from moelib.runs.routing_file import clear_log, log_folder
from moelib.runtime.figures import save_figure
from tests.analysis.planted import LAYER, plant

# Two sequences of four tokens; the last two are padding. Expert 3 has no token, token id 9 neither.
TOKENS = [[0, 0, 1, 1], [0, 1, 5, 5]]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0]]
LAST = [[[0, 1], [0, 2], [1, 2], [1, 0]], [[0, 1], [2, 1], [4, 4], [4, 4]]]
FIRST = [[[1, 0], [0, 1], [3, 2], [1, 0]], [[2, 3], [2, 1], [4, 4], [4, 4]]]
SETTINGS = Settings(min_count=3, capacity_factors=[0.5], expert_parallel=[2])


def planted(run, steps, **fields):
    for step, ids in steps.items():
        plant(run, step, ids, TOKENS, mask=np.array(MASK, bool), **fields)


def analyzed(run, **options):
    logs = open_logs(str(run), "val", **options)
    return logs, {name: layers[LAYER] for name, layers in analyze(logs, SETTINGS).items()}


def test_series_over_steps_are_those_of_arithmetic(tmp_path):
    planted(tmp_path, {10: FIRST, 20: LAST})
    logs, found = analyzed(tmp_path)
    assert logs.steps == [10, 20]
    load = found["load"]
    assert load["load"] == [[3, 4, 3, 2], [4, 5, 3, 0]]
    assert load["max_violation"] == [pytest.approx(1 / 3, abs=1e-4), pytest.approx(2 / 3, abs=1e-4)]
    assert load["dead_experts"] == [[], [3]]
    assert load["entropy"] == [0.25, 0.25]
    # Best expert equal for tokens 1, 3, 5 of 6; common experts 2 + 1 + 1 + 2 + 0 + 2 of 12.
    assert found["saturation"] == {"1": [0.5, 1.0], "2": [pytest.approx(8 / 12, abs=1e-4), 1.0]}
    drift = found["drift"]
    assert drift["changed"] == [None, pytest.approx(4 / 12, abs=1e-4)]
    assert drift["load_shift"] == [None, pytest.approx(2 / 12, abs=1e-4)]
    assert found["coactivation"]["20"][0] == [1.0, 0.75, 0.25, 0.0]  # P(j | 0): 3 and 1 of 4.
    assert found["coactivation"]["20"][3] == [None] * 4
    special = found["specialization"]
    assert (special["token_ids"], special["token_ids_that_never_occur"]) == (2, 8)
    assert special["experts"][0]["best"][0] == {"token": 0, "count": 3, "share": 1.0}
    assert special["experts"][0]["shares_by_step"] == [[2 / 3, 1 / 3], [1.0, 1 / 3]]
    assert special["experts"][3]["share"] is None
    # Capacity 1 per sequence and expert of 8 * 0.5 / 4: kept 3 of 8 and 3 of 4.
    assert found["replay"]["drops"] == {"0.5": 0.5}


def test_tokens_with_fewer_experts_than_k_are_compared_by_those_they_have(tmp_path):
    few = [[[0, 4], [0, 4], [1, 2], [1, 4]], [[0, 4], [4, 4], [4, 4], [4, 4]]]
    planted(tmp_path, {10: few, 20: few, 30: LAST})
    _, found = analyzed(tmp_path)
    assert found["drift"]["changed"][1] == 0
    # The five best experts are the same ones at step 30, and so is the second of token 3.
    assert found["saturation"]["1"][1] == found["saturation"]["2"][1] == 1.0
    planted(tmp_path, {40: few})
    _, found = analyzed(tmp_path)
    assert found["saturation"]["2"] == [1.0, 1.0, 0.5, 1.0]  # Six of twelve at step 30.
    assert found["drift"]["changed"] == [None, 0.0, 0.5, 0.0]


def test_chance_explains_the_shares_of_an_uneven_load(tmp_path):
    """Experts that know no token have the share of the baseline, far above the mean share."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10, (8, 200))
    plant(tmp_path, 1, np.argsort(rng.random((8, 200, 4)), -1)[..., :2], tokens)
    by_token = np.stack([tokens % 4, (tokens + 1) % 4], -1)
    plant(tmp_path / "known", 1, by_token, tokens)
    settings = Settings(min_count=100)
    chance, known = (
        analyze(open_logs(str(run), "val"), settings)["specialization"][LAYER]
        for run in (tmp_path, tmp_path / "known")
    )
    assert chance["mean_share"] == pytest.approx(chance["mean_chance"], abs=0.05)
    assert chance["mean_share"] > 0.52
    assert known["mean_share"] == 1.0
    assert known["mean_chance"] < 0.7


def test_a_routing_with_fewer_experts_for_some_tokens_that_stays_is_no_drift(tmp_path):
    """Token 0 has one expert, token 1 none, token 2 its second choice only."""
    ids = [[[0, 4], [4, 4], [4, 2], [1, 0]]]
    for step in (10, 20):
        plant(tmp_path, step, ids, [[0, 1, 2, 3]])
    _, found = analyzed(tmp_path)
    assert found["saturation"] == {"1": [1.0, 1.0], "2": [1.0, 1.0]}
    assert found["drift"] == {"changed": [None, 0.0], "load_shift": [None, 0.0]}


def test_numbers_of_a_layer_without_assignments_are_not_defined(tmp_path):
    for step in (10, 20):
        plant(tmp_path, step, np.full((1, 4, 2), 4), [[0, 1, 2, 3]])
    _, found = analyzed(tmp_path)
    assert found["saturation"] == {"1": [None, None], "2": [None, None]}
    assert found["drift"]["changed"] == [None, None]
    assert found["load"]["max_violation"] == [None, None]


def test_a_log_copied_to_another_step_is_missing_there(tmp_path):
    planted(tmp_path, {10: FIRST, 20: FIRST, 30: LAST})
    shutil.rmtree(log_folder(str(tmp_path), "val", 20))
    shutil.copytree(log_folder(str(tmp_path), "val", 10), log_folder(str(tmp_path), "val", 20))
    logs, found = analyzed(tmp_path)
    assert "holds the routing log of step=10" in logs.missing[20]
    assert found["drift"]["changed"] == [None, None, None]


def test_logs_of_different_numbers_of_batches_name_the_flag(tmp_path):
    planted(tmp_path, {10: FIRST, 20: LAST})
    path = os.path.join(log_folder(str(tmp_path), "val", 20), "header.json")
    with open(path) as file:
        header = json.load(file)
    part = "batch_00001.process_0000.npz"
    folder = os.path.dirname(path)
    shutil.copy(os.path.join(folder, "batch_00000.process_0000.npz"), os.path.join(folder, part))
    header["files"][part] = os.path.getsize(os.path.join(folder, part))
    with open(path, "w") as file:
        json.dump(header | {"num_batches": 2}, file)
    with pytest.raises(UserError, match=r"num_batches is 1, and 2 .*--max_batches=1"):
        open_logs(str(tmp_path), "val")


def test_a_missing_step_is_null_and_named(tmp_path):
    planted(tmp_path, {10: FIRST, 30: LAST, 40: LAST})
    clear_log(log_folder(str(tmp_path), "val", 40))
    logs, found = analyzed(tmp_path, expected=[10, 20, 30])
    assert logs.steps == [10, 20, 30, 40]
    assert list(logs.missing) == [20, 40]
    assert "cut short" in logs.missing[40]
    assert found["load"]["max_violation"][1] is None
    assert found["load"]["max_violation"][3] is None
    assert found["saturation"]["2"][1] is None
    assert found["drift"]["changed"] == [None] * 4  # Not the change from 10 to 30.
    kept = {name: {LAYER: found[name]} for name in ("load", "specialization")}
    paths = write_analysis(logs, kept, str(tmp_path))
    report = (tmp_path / "report.md").read_text()
    assert "step 20: " in report
    assert "step 30: no token goes to the experts 3." in report
    assert "8 never" in report
    for path in map(pathlib.Path, paths):
        assert "NaN" not in path.read_text() or path.suffix == ".svg"
    assert json.loads((tmp_path / "load.json").read_text())["missing"].keys() == {"20", "40"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config_hash": "other"}, "config_hash is abc, and other"),
        ({"vocab_size": 11}, "vocab_size is 10, and 11"),
        ({"num_experts": 5}, "layers"),
    ],
)
def test_logs_of_different_runs_are_not_compared(tmp_path, fields, message):
    planted(tmp_path, {10: FIRST})
    planted(tmp_path, {20: LAST}, **fields)
    with pytest.raises(UserError, match=message):
        open_logs(str(tmp_path), "val")
    assert list(open_logs(str(tmp_path), "val", steps=[20]).logs) == [20]


def test_logs_of_other_tokens_are_not_compared(tmp_path):
    planted(tmp_path, {10: FIRST})
    plant(tmp_path, 20, LAST, np.array(TOKENS) + 1, mask=np.array(MASK, bool))
    with pytest.raises(UserError, match="input_ids of batch 0"):
        open_logs(str(tmp_path), "val")


def test_a_run_without_a_log_is_refused(tmp_path):
    with pytest.raises(UserError, match="'val'"):
        open_logs(str(tmp_path), "val", steps=[10])


def test_a_log_of_padding_only_is_refused(tmp_path):
    none = np.full((2, 4, 2), 4)
    plant(tmp_path, 10, none, TOKENS, mask=np.zeros((2, 4), bool))
    with pytest.raises(UserError, match="padding"):
        analyzed(tmp_path)


def test_a_plot_has_the_same_bytes_every_time(tmp_path):
    layers = {"layer0": {"max_violation": [0.5, None, 0.25]}}
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        save_figure(plot("load", [1, 2, 3], layers), str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_many_layers_have_many_colors(tmp_path):
    layers = {f"layer{i}": {"1": [0.1 * i, 1.0]} for i in range(12)}
    save_figure(plot("saturation", [1, 2], layers), str(tmp_path / "a.svg"))
    lines = re.findall(r"stroke: (#\w+); stroke-width: 1.5", (tmp_path / "a.svg").read_text())
    assert len(set(lines)) == 12
