"""Phases of a run: their settings, data and state, and runs that stop in each of them."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

import moelib
from experiments import flame_moe
from moelib.checkpoint.contents import CheckpointNotFoundError, list_checkpoints, step_path
from moelib.checkpoint.policy import every_n_steps_policy
from moelib.checkpoint.restore import restore_arrays
from moelib.core.config import REQUIRED, config_for_function
from moelib.core.config_text import parse, text_lines
from moelib.core.errors import UserError
from moelib.data.tokens.token_store import TokenStore
from moelib.layers.rope import YarnRotaryEmbedding
from moelib.learner import schedules, transforms
from moelib.learner.learner import UpdateType
from moelib.learner.moments import MomentFormat
from moelib.operations.runs import list_runs, runs_table
from moelib.runs.folder import RunFolder
from moelib.runs.identity import TrainerDirConflictError
from moelib.runs.phases import Phase, applied, check_ends, last_step, name_at
from moelib.train.program import StepProgram
from tests import tiny
from tests.checkpoint.small import truncate_arrays
from tests.python_process import finish, free_port, start

MISSING = TokenStore.default_config().set(path="missing")
EIGHT_BIT = MomentFormat.EIGHT_BIT
FROZEN = [(".*table", UpdateType.NO_UPDATE)]


def phase(after_step, **changes):
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    return Phase.default_config().set(after_step=after_step, changes=changes)


def config(directory, **fields):
    """Returns a run of three phases: other batches, then another length with a frozen table."""
    cfg = tiny.trainer_config(directory, max_step=12, save_every=3, evaler=False)
    cfg.checkpointer.keep_last_n = 10
    cfg.phases = {
        "long": phase(8, input__seq_len=32, model__dropout=0.0, learner__update_rules=FROZEN),
        "large": phase(4, input__global_batch_size=16, num_microbatches=2),
    }
    return cfg.set(**fields)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("phases")
    result = moelib.fit(config(directory))
    return directory, result


def remove_after(directory, step):
    for later, path in list_checkpoints(RunFolder(directory).checkpoints).items():
        if later > step:
            shutil.rmtree(path)


def arrays(directory, step):
    return restore_arrays(RunFolder(directory).checkpoints, step=step).state


def test_each_step_has_the_settings_of_its_phase(unbroken):
    directory, result = unbroken
    assert (result.step, result.stopped_by) == (12, None)
    starts = [x["phase"] for x in RunFolder(directory).events() if x["event"] == "start"]
    assert starts == [None, "large", "long"]
    assert "12 / 12, long" in str(runs_table(list_runs([str(directory)])).rows)
    texts = {step: RunFolder(directory).record(step).config for step in (4, 8, 12)}
    paths = ("input.global_batch_size", "num_microbatches", "input.seq_len", "phase")
    found = {step: [text_lines(text).get(path) for path in paths] for step, text in texts.items()}
    assert found[4][:3] == ["8", "1", "16"]
    assert found[8] == ["16", "2", "16", "'large'"]
    assert found[12] == ["16", "2", "32", "'long'"]
    before, after = (arrays(directory, step) for step in (8, 12))
    np.testing.assert_array_equal(before["model/table"], after["model/table"])
    assert np.any(before["model/head"] != after["model/head"])


def test_a_phase_of_the_same_settings_changes_nothing(tmp_path):
    plain = tiny.trainer_config(tmp_path / "plain", evaler=False)
    moelib.fit(plain)
    same = phase(3, input__global_batch_size=8)
    moelib.fit(plain.clone(dir=str(tmp_path / "phases"), phases={"same": same}))
    want, got = (arrays(tmp_path / name, 8) for name in ("plain", "phases"))
    assert want.keys() == got.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("step", [3, 4, 6, 8, 9])
def test_a_run_that_is_killed_in_a_phase_has_the_same_numbers(unbroken, tmp_path, step):
    directory, result = unbroken
    shutil.copytree(directory, tmp_path / "run")
    remove_after(tmp_path / "run", step)
    again = moelib.fit(config(tmp_path / "run"))
    tiny.assert_trees_equal(again.params, result.params)
    assert tiny.losses(tmp_path / "run") == tiny.losses(directory)


_PROCESS = """
import os, signal, sys
import moelib
from moelib.launch import DeviceFlags
from moelib.train.trainer import SpmdTrainer
from tests.train.test_phases import config
folder, address, index, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
flags = {"distributed_coordinator": address, "num_processes": 2, "process_id": index}
DeviceFlags(**flags).set_up()
run_step = SpmdTrainer.run_step
def run_step_or_end(trainer, *args, **options):
    if trainer.step == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_step(trainer, *args, **options)
SpmdTrainer.run_step = run_step_or_end
moelib.fit(config(folder))
"""


@pytest.mark.slow
def test_two_processes_are_killed_in_a_phase_and_go_on(unbroken, tmp_path):
    for last, code in ((7, -9), (-1, 0)):
        job = (tmp_path, f"localhost:{free_port()}")
        finish(*(start("-c", _PROCESS, *job, index, last) for index in range(2)), code=code)
    want, got = tiny.losses(unbroken[0]), tiny.losses(tmp_path)
    assert got == pytest.approx(want, abs=1e-5)
    phases = [
        each.get("phase") for each in RunFolder(tmp_path).events() if each["event"] == "start"
    ]
    assert phases == [None, "large", "large", "long"]


def test_a_damaged_checkpoint_sends_a_run_back_to_the_phase_before(unbroken, tmp_path, caplog):
    directory, result = unbroken
    shutil.copytree(directory, tmp_path / "run")
    remove_after(tmp_path / "run", 6)
    folder = RunFolder(tmp_path / "run").checkpoints
    truncate_arrays(step_path(folder, 6))
    shutil.rmtree(step_path(folder, 4))
    again = moelib.fit(config(tmp_path / "run"))
    assert "trying the one before" in caplog.text
    tiny.assert_trees_equal(again.params, result.params)


@pytest.mark.parametrize("damaged", [[9], [9, 8]])
def test_damaged_checkpoints_of_a_phase_that_freezes_are_skipped(unbroken, tmp_path, damaged):
    directory, result = unbroken
    shutil.copytree(directory, tmp_path / "run")
    remove_after(tmp_path / "run", 9)
    for step in damaged:
        truncate_arrays(step_path(RunFolder(tmp_path / "run").checkpoints, step))
    again = moelib.fit(config(tmp_path / "run"))
    tiny.assert_trees_equal(again.params, result.params)
    assert tiny.losses(tmp_path / "run") == tiny.losses(directory)


def test_freed_parameters_begin_with_an_empty_state_of_the_optimizer(tmp_path, caplog):
    cfg = tiny.trainer_config(tmp_path, max_step=4, save_every=1, evaler=False)
    cfg.checkpointer.keep_last_n = 10
    cfg.learner.update_rules = FROZEN
    cfg.phases = {"freed": phase(2, learner__update_rules=[])}
    moelib.fit(cfg)
    steps = {step: arrays(tmp_path, step) for step in (1, 2, 3)}
    of_learner = [name for name in steps[3] if name.startswith("learner/")]
    assert f"2 of {len(of_learner)} arrays of the learner's state have initial" in caplog.text
    np.testing.assert_array_equal(steps[1]["model/table"], steps[2]["model/table"])
    assert np.any(steps[2]["model/table"] != steps[3]["model/table"])
    moments = [name for name in steps[3] if name.endswith("mu/table")]
    assert moments
    assert not set(moments) & steps[2].keys()
    # One step of Adam from zero: the mean is (1 - b1) times the gradient, so far from zero.
    assert np.any(steps[3][moments[0]] != 0)
    kept = next(name for name in steps[2] if name.endswith("mu/head"))
    assert np.any(steps[2][kept] != 0)


def test_schedules_go_on_in_a_phase_with_another_optimizer(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=8, save_every=4, evaler=False)
    schedule = config_for_function(schedules.linear).set(peak_lr=0.02, warmup_steps=2)
    adamw = cfg.learner.optimizer.set(learning_rate=schedule)
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    clipped = config_for_function(transforms.chain).set(args=[clip, adamw.clone()])
    rules = [(".*table", adamw.clone())]
    changes = {"learner__optimizer": clipped, "learner__update_rules": rules}
    cfg.phases = {"clipped": phase(4, **changes)}
    moelib.fit(cfg)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = {line["step"]: line for line in lines}
    rates = [0.01, 0.02, 0.02 * 5 / 6, 0.02 * 4 / 6, 0.01, 0.02 * 2 / 6, 0.02 / 6, 0.0]
    assert [logged[step]["learning_rate"] for step in range(1, 9)] == pytest.approx(rates)
    of_rule = [logged[step]["learning_rate/rule0"] for step in range(5, 9)]
    assert of_rule == pytest.approx(rates[4:])


def test_evaluations_of_the_phase_before_are_part_of_the_result(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=5)
    cfg.evalers["val"].eval_policy = config_for_function(every_n_steps_policy).set(n=3)
    cfg.phases = {"other": phase(4, model__dropout=0.0)}
    assert "loss" in moelib.fit(cfg).evaluations["val"]


def test_the_weights_of_a_phase_are_read_with_its_settings(unbroken):
    folder = RunFolder(unbroken[0])
    text, source = folder.config_text(folder.record())
    assert parse(text, source=source, trusted=True).model.dropout == 0.0
    text, source = folder.config_text(folder.record(4))
    assert parse(text, source=source, trusted=True).model.dropout == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": {"late": phase(12)}}, "phases.late.after_step is 12, .* max_step=12"),
        ({"phases": {"a": phase(4), "b": phase(4)}}, "are both 4; put the changes"),
        ({"phases": {"a": phase(4, dir="x")}}, r"phases.a.changes has 'dir'; a phase changes only"),
        ({"phases": {"a": phase(4, model__dims=3)}}, r"phases.a.*model.dims"),
        ({"phases": {"a": phase(4, model__dim=8)}}, r"phases.a: .*cannot change the parameters"),
        ({"phases": {"a": phase(4, input__global_batch_size=6, num_microbatches=4)}}, "phases.a: "),
        ({"phases": {"a": Phase.default_config()}}, "phases.a.after_step must be set"),
        (
            {"phases": {"a": phase(4, learner__update_rules=[(".*", UpdateType.NO_UPDATE)])}},
            "a: no ",
        ),
        ({"phases": {"a": phase(4, learner__second_moment=EIGHT_BIT)}}, "a: .* are not converted"),
        ({"phases": {"a": phase(4, input__source=MISSING)}}, "phases.a: .*missing"),
        ({"checkpointer": None}, "phases is set, but checkpointer is None"),
        ({"phase": "long"}, "a run chooses its phase; leave it None"),
    ],
)
def test_impossible_phases_are_refused_before_the_first_step(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        moelib.fit(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_phases_of_a_run_without_an_end_are_refused(tmp_path):
    with pytest.raises(UserError, match="max_step must be set"):
        check_ends(config(tmp_path, max_step=REQUIRED))


def test_a_past_phase_cannot_change(unbroken, tmp_path):
    shutil.copytree(unbroken[0], tmp_path / "run")
    cfg = config(tmp_path / "run", max_step=20)
    cfg.phases["large"].changes["num_microbatches"] = 1
    with pytest.raises(TrainerDirConflictError, match=r"phases.large.changes is .*: 2\} there"):
        moelib.fit(cfg)
    cfg = config(tmp_path / "run", max_step=20)
    cfg.phases["new"] = phase(6, model__dropout=0.5)
    with pytest.raises(TrainerDirConflictError, match=r"phases.new.*not set there"):
        moelib.fit(cfg)


def test_a_further_phase_can_be_added(unbroken, tmp_path):
    shutil.copytree(unbroken[0], tmp_path / "run")
    cfg = config(tmp_path / "run", max_step=14)
    cfg.phases["long, then short"] = phase(12, input__seq_len=16)
    cfg.phases["long2"] = phase(13, input__seq_len=32)  # Named like one that is past.
    assert moelib.fit(cfg).step == 14
    assert "\nphase: 'long2'" in RunFolder(tmp_path / "run").record().config


def test_a_run_goes_on_with_other_data_if_they_are_accepted(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False)
    moelib.fit(cfg)
    cfg.set(max_step=6).input.seed = 5
    with pytest.raises(TrainerDirConflictError, match="--accept_changes=data"):
        moelib.fit(cfg)
    assert moelib.fit(cfg.set(accept_changes=["data"])).step == 6
    events = RunFolder(tmp_path).events()
    assert "input.seed" in [x["path"] for x in events if x["event"] == "changed"]
    assert [x["step"] for x in events if x["event"] == "other_data"] == [4]
    assert moelib.fit(cfg.set(max_step=8)).step == 8


def test_a_phase_has_the_settings_of_those_before():
    cfg = flame_moe.tiny()
    # --8<-- [start:phases]
    yarn = YarnRotaryEmbedding.default_config().set(factor=8.0, original_context=128)
    long_context = {
        "input.seq_len": 1024,
        "input.global_batch_size": 1,
        "model.decoder.block[0].self_attention.rope": yarn,
    }
    cfg.phases = {
        "long context": Phase.default_config().set(after_step=800, changes=long_context),
        "better data": Phase.default_config().set(
            after_step=900, changes={"input.source.path": "{data_dir}/books"}
        ),
    }
    # --8<-- [end:phases]
    last = applied(cfg.set(max_step=1000, phase="better data"))
    assert last.input.source.path == "{data_dir}/books"
    assert (last.input.seq_len, last.input.global_batch_size) == (1024, 1)
    assert last.model.decoder.block[0].self_attention.rope.factor == 8.0
    assert cfg.input.seq_len == 128
    with pytest.raises(UserError, match="there is no such phase; did you mean 'better data'"):
        applied(cfg.set(phase="beter data"))


def test_the_phase_of_a_step():
    cfg = config("unused")
    assert [name_at(cfg, step) for step in (1, 4, 5, 8, 9, 12)] == [
        *(None, None, "large", "large", "long", "long")
    ]
    ends = [last_step(applied(cfg.clone(phase=name))) for name in (None, "large", "long")]
    assert ends == [4, 8, 12]


@pytest.mark.parametrize("rules", [[], FROZEN])
def test_a_phase_rounds_the_moments_that_it_stores_in_fewer_bits(tmp_path, rules):
    cfg = tiny.trainer_config(tmp_path, max_step=3, save_every=1, evaler=False)
    cfg.checkpointer.keep_last_n = 10
    cfg.model.dim = 128  # Small arrays stay in float32.
    stored = {"learner__first_moment": MomentFormat.BFLOAT16, "learner__update_rules": rules}
    cfg.phases = {"low": phase(2, **stored)}
    moelib.fit(cfg)
    steps = {step: arrays(tmp_path, step) for step in (2, 3)}
    name = next(name for name in steps[2] if name.endswith("mu/head"))
    assert (steps[2][name].dtype, steps[3][name].dtype) == (np.float32, ml_dtypes.bfloat16)
    # 0.9 of the mean before; the gradient adds a tenth of it, so that most stays as it was.
    before, after = (steps[step][name].astype(np.float32).ravel() for step in (2, 3))
    assert np.corrcoef(before, after)[0, 1] > 0.7


def test_a_rewind_names_the_steps_that_exist_and_warns_once(unbroken, tmp_path, caplog):
    shutil.copytree(unbroken[0], tmp_path / "run")
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint of step 7; there are steps 3"
    ):
        moelib.fit(config(tmp_path / "run", rewind_to=7))
    caplog.clear()
    moelib.fit(config(tmp_path / "run", rewind_to=6))
    assert "rewound the run already" not in caplog.text
    tiny.assert_trees_equal(tiny.losses(tmp_path / "run"), tiny.losses(unbroken[0]))


def test_the_data_of_past_phases_may_be_gone(unbroken, tmp_path):
    shutil.copytree(unbroken[0], tmp_path / "run")
    remove_after(tmp_path / "run", 9)
    opened = []
    program = StepProgram.new_input
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StepProgram, "new_input", lambda x: opened.append(x.config.phase) or program(x)
        )
        moelib.fit(config(tmp_path / "run"))
    assert set(opened) == {"long"}
