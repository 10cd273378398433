"""Runs that continue from an earlier checkpoint, and runs that skip batches."""

import json
import os

import pytest

from moelib.checkpoint.contents import CheckpointNotFoundError
from moelib.core.errors import UserError
from moelib.runs.course import ranges_to_skip, requested
from moelib.runs.folder import RunFolder
from tests import tiny


def config(directory, **fields):
    return tiny.trainer_config(directory, save_every=2, evaler=False).set(**fields)


def run(cfg):
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    return trainer


def rewinds(directory):
    return [e["step"] for e in RunFolder(directory).events() if e["event"] == "rewind_to"]


def test_a_run_rewinds_once_and_equals_one_with_these_settings_from_the_start(tmp_path, caplog):
    a, checkpoints = tmp_path / "a", tmp_path / "a" / "checkpoints"
    run(config(a, max_step=6))
    cfg = config(a, rewind_to=2, skip_batches=["3:5"])
    run(cfg)  # Steps 1 to 3 on batches 0 to 2, steps 4 and on from batch 5.
    want = run(config(tmp_path / "b", skip_batches=["3:5"]))
    assert tiny.losses(a) == tiny.losses(tmp_path / "b")
    assert sorted(os.listdir(checkpoints / "rewound_1")) == ["step_00000004", "step_00000006"]
    assert f"{checkpoints}/rewound_1" in caplog.text
    assert rewinds(a) == [2]

    caplog.clear()
    again = run(cfg.set(max_step=10))  # The same command, as by a scheduler, resumes.
    assert "rewind_to=2: the last start rewound the run already" in caplog.text
    assert "rewound_2" not in os.listdir(checkpoints)
    assert rewinds(a) == [2]
    longer = run(config(tmp_path / "b", max_step=10))  # Keeps the range without the setting.
    tiny.assert_trees_equal(again.trainer_state, longer.trainer_state)
    assert longer.input_state["step"] == 12 != want.input_state["step"]

    run(config(a, max_step=10))
    run(config(a, max_step=10, rewind_to=8))
    assert rewinds(a) == [2, None, 8]
    assert os.listdir(checkpoints / "rewound_2") == ["step_00000010"]


def test_a_step_without_a_checkpoint_names_those_that_exist(tmp_path):
    run(config(tmp_path, max_step=4))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 3; .* steps 2, 4"):
        run(config(tmp_path, rewind_to=3))
    assert rewinds(tmp_path) == []
    run(config(tmp_path, rewind_to=4, max_step=4))  # Nothing is to be moved.
    assert rewinds(tmp_path) == [4]


def test_a_rewind_with_another_model_moves_nothing(tmp_path):
    run(config(tmp_path, max_step=4))
    cfg = config(tmp_path, rewind_to=2)
    cfg.model.dim = 8
    with pytest.raises(UserError, match=r"model\.dim is 16 there"):
        run(cfg)
    assert "rewound_1" not in os.listdir(tmp_path / "checkpoints")


def test_a_range_that_has_been_trained_on_is_refused_without_a_rewind(tmp_path):
    run(config(tmp_path, max_step=4))
    with pytest.raises(UserError, match="skip_batches=3:5"):
        run(config(tmp_path, skip_batches=["3:5"]))
    run(config(tmp_path, skip_batches=["4:6"]))
    record = json.loads((tmp_path / "checkpoints/step_00000008/record/metadata").read_text())
    assert record["input"]["skipped"] == [[4, 6]]
    assert record["input"]["step"] == 10
    (event,) = (e for e in RunFolder(tmp_path).events() if e["event"] == "skipped_ranges")
    assert (event["step"], event["ranges"]) == (4, [[4, 6]])


def test_a_rewind_needs_a_checkpointer(tmp_path):
    with pytest.raises(UserError, match="rewind_to is set, but checkpointer is None"):
        config(tmp_path, checkpointer=None, rewind_to=3).instantiate(parent=None)
    with pytest.raises(UserError, match="skip_batches has '5'"):
        config(tmp_path, skip_batches=["5"]).instantiate(parent=None)


def test_ranges_are_of_the_config_the_log_and_the_checkpoint(tmp_path):
    events = [
        {"event": "bad_step", "action": "rewind"},
        {"event": "bad_step", "first": 7, "stop": 8},
    ]
    found = ranges_to_skip(config(tmp_path, skip_batches=["1:3"]), events, {"skipped": [[2, 4]]})
    assert found == [[1, 4], [7, 8]]
    assert ranges_to_skip(config(tmp_path), [], None) == []
    saved = {"step": 4, "skipped": [[1, 3], [6, 600]]}  # The data have passed the first one.
    assert ranges_to_skip(config(tmp_path), [], saved) == [[1, 3], [6, 600]]
    corrected = config(tmp_path, skip_batches=["6:7"])
    assert ranges_to_skip(corrected, events, saved) == [[1, 3], [6, 8]]
    assert ranges_to_skip(config(tmp_path, skip_batches=[]), [], saved) == [[1, 3]]


def test_a_step_is_requested_again_after_another_start():
    log = lambda *steps: [{"event": "rewind_to", "step": step} for step in steps]
    for step, before in ((2, ()), (2, (4,)), (None, (4,)), (2, (2, None))):
        assert requested(step, log(*before))
    for step, before in ((2, (4, 2)), (None, ())):
        assert not requested(step, log(*before))
