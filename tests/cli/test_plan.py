"""`moelib plan`: its table, its files, and what it refuses."""

import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from moelib.cli import plan
from moelib.launch import UsageError
from moelib.planning.report import StepReport

MODULE = """
from tests.train import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("", max_step=2, evaler=False)}
"""
TINY = ("--module=named_plan_tiny", "--config=tiny")
BESIDE = pathlib.Path(__file__).parents[2] / "experiments/gpt_oss_beside.json"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with flags; those that it defines are taken away again."""
    (tmp_path / "named_plan_tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        with flagsaver.flagsaver():
            plan.define_flags()
            plan.run(flags.FLAGS(["moelib plan", *args])[1:])

    return run


def test_a_plan_is_printed_beside_other_figures_and_kept(command, tmp_path, capsys):
    pytest.importorskip("libtpu")
    files = (f"--json={tmp_path}/plan.json", f"--beside={BESIDE}", "--top=3")
    command(*TINY, "--topology=v6e:2x2x1", "--set=mesh_shape=(1, 2, 1, -1, 1, 1)", *files)
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 4}
    assert "data 2, fsdp 2" in out
    assert "15.519 GiB" in rows["peak memory"]
    assert "13.500 GiB" in rows["peak memory"]
    assert "all but small" in out
    assert "GiB of the 31.24 GiB that a device has." in out
    assert "train/tiny.py" in out
    report = StepReport.from_json((tmp_path / "plan.json").read_text())
    assert report.mesh["data"] == report.mesh["fsdp"] == 2
    # A report stands beside another as well.
    (column,) = plan._read_beside(str(tmp_path / "plan.json"))
    assert column.figures == plan.figures(report)


def test_figures_that_no_report_has_are_refused(tmp_path):
    (tmp_path / "figures.json").write_text('{"memory.peek": 1}')
    with pytest.raises(UsageError, match=r"no figure 'memory.peek'; did you mean 'memory.peak'"):
        plan._read_beside(str(tmp_path / "figures.json"))
    names = [column.name for column in plan._read_beside(str(BESIDE))]
    assert names == ["MaxText", "aim"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*TINY,), "--topology says for what to compile, such as v6e:2x2x1"),
        ((*TINY, "--topology=v6x:2x2x1"), "did you mean 'v6e'"),
        (("v6e:2x2x1",), "'v6e:2x2x1' is no flag"),
        ((*TINY, "--topology=v6e:2x2", "--beside=none.json"), "--beside none.json: .*No such file"),
        ((*TINY, "--topology=v6e:2x2", "--json=no/x.json"), "--json no/x.json: .*no such folder"),
    ],
)
def test_what_cannot_be_is_one_line(command, args, message):
    with pytest.raises(UsageError, match=message) as error:
        command(*args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set=mesh_shape=(1, 3, 1, 2, 1, 1)",), "takes 6 devices, but there are 4"),
        (("--set=input.global_batch_size=6",), "does not divide into 4 parts"),
        (("--compiler_option=xla_some",), "--compiler_option xla_some: write it as name=value"),
    ],
)
def test_what_does_not_fit_the_topology_is_one_line(command, args, message):
    pytest.importorskip("libtpu")
    with pytest.raises(UsageError, match=message) as error:
        command(*TINY, "--topology=v6e:2x2x1", *args)
    assert "\n" not in str(error.value)
