"""The command that trains a config with several values of its fields."""

import signal
import time

import pytest

from moelib.cli import sweep
from moelib.cli.main import run
from moelib.core.errors import UsageError
from moelib.runs.folder import RunFolder
from tests import tiny
from tests.python_process import finish, start

TRAIN = ["sweep", "--module=tests.cli.test_sweep", "--config=tiny"]


def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("unused", max_step=2)}


@pytest.mark.parametrize(
    ("sets", "runs"),
    [
        (
            ["a.b=1,2", "c=x", "a.d='u,v',w"],
            {
                "b=1,d=_u,v_": ("a.b=1", "c=x", "a.d='u,v'"),
                "b=1,d=w": ("a.b=1", "c=x", "a.d=w"),
                "b=2,d=_u,v_": ("a.b=2", "c=x", "a.d='u,v'"),
                "b=2,d=w": ("a.b=2", "c=x", "a.d=w"),
            },
        ),
        (
            ["x.lr=1, 2", "y.lr=[3, (4, 5)],6"],
            {
                "x.lr=1,y.lr=_3,_4,_5_": ("x.lr=1", "y.lr=[3, (4, 5)]"),
                "x.lr=1,y.lr=6": ("x.lr=1", "y.lr=6"),
                "x.lr=2,y.lr=_3,_4,_5_": ("x.lr=2", "y.lr=[3, (4, 5)]"),
                "x.lr=2,y.lr=6": ("x.lr=2", "y.lr=6"),
            },
        ),
        (
            ["mesh_shape=fsdp=4,expert=2", "lr=1,2"],
            {
                "lr=1": ("mesh_shape=fsdp=4,expert=2", "lr=1"),
                "lr=2": ("mesh_shape=fsdp=4,expert=2", "lr=2"),
            },
        ),
    ],
)
def test_there_is_a_run_for_each_combination(sets, runs):
    assert sweep.trials(sets) == runs


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["lr=1"], "no field has several values"),
        (["lr=1,1"], "two runs are lr=1"),
        (["lr=1,2", "lr=3"], "lr=...: it is set twice"),
    ],
)
def test_a_sweep_of_one_run_or_of_equal_ones_is_refused(sets, message):
    with pytest.raises(UsageError, match=message):
        sweep.trials(sets)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set=prng_seed=0,x"], "prng_seed"),
        (["--set=mesh_shape=fsdp=3", "--set=input.global_batch_size=8,-1"], "global_batch_size=-1"),
        (["--set=prng_seed=0,1", "--trainer_prng_seed=3"], "have the same config"),
        (["--set=prng_seed=0,1", "--num_processes=2"], "one process at a time"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_trains(tmp_path, capsys, flags, message):
    assert run([*TRAIN, f"--trainer_dir={tmp_path}", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_signal_stops_the_run_with_a_checkpoint_and_the_sweep(tmp_path):
    values = ["--set=prng_seed=0,1", "--max_step=100000"]
    process = start("-m", "moelib", *TRAIN, f"--trainer_dir={tmp_path}", *values, devices=1)
    first = tmp_path / "prng_seed=0"
    end = time.monotonic() + 120
    while not (first / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    ((_, errors),) = finish(process)
    assert errors.endswith("Stopped; the same command goes on.\n")
    events = [x for x in RunFolder(first).events() if x["event"] == "end"]
    assert [x["stopped_by"] for x in events] == ["SIGTERM"]
    assert RunFolder(first).record() is not None
    assert not (tmp_path / "prng_seed=1").exists()


@pytest.mark.slow
def test_runs_are_compared_and_one_that_fails_does_not_end_the_others(tmp_path, capfd):
    flags = [f"--trainer_dir={tmp_path}", "--set=model.nan_at=1,None", "--num_cpu_devices=1"]
    with pytest.raises(SystemExit, match="1"):
        run([*TRAIN, *flags])
    printed, errors = capfd.readouterr()
    assert printed.index("nan_at=None") < printed.index("nan_at=1")
    assert f"Failed: {tmp_path}/nan_at=1;" in errors
    assert (tmp_path / sweep.PICTURE).read_text().startswith("<?xml")
    with pytest.raises(SystemExit, match="1"):
        run([*TRAIN, *flags])
    assert "max_step=2 is reached" in capfd.readouterr().err


def test_a_run_whose_validation_loss_is_not_finite_comes_last(tmp_path, capsys):
    for name, mean_loss, loss in (("a", 1.0, "null"), ("b", 3.0, 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.txt").write_text("max_step: 1\n")
        lines = f'{{"step": 1, "mean_loss": {mean_loss}}}\n{{"step": 1, "val/loss": {loss}}}\n'
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    sweep._show(str(tmp_path), [str(tmp_path / name) for name in "ab"])
    rows = [x.split()[0] for x in capsys.readouterr().out.splitlines() if "finished" in x]
    assert rows == ["b", "a"]
