"""The command that trains a config with several values of its fields."""

import pytest

from moelib.cli import sweep
from moelib.cli.main import run
from moelib.core.errors import UsageError
from tests import tiny

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
    [(["lr=1"], "no field has several values"), (["lr=1,1"], "two runs are lr=1")],
)
def test_a_sweep_of_one_run_or_of_equal_ones_is_refused(sets, message):
    with pytest.raises(UsageError, match=message):
        sweep.trials(sets)


def test_a_wrong_value_is_refused_before_anything_trains(tmp_path, capsys):
    assert run([*TRAIN, f"--trainer_dir={tmp_path}", "--set=prng_seed=0,x"]) == 2
    assert "prng_seed" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


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
