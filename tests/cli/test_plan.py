"""`moelib plan`: its flags, its output, its files."""

import json
import pathlib

import pytest

from moelib.cli import plan
from moelib.core.errors import UserError
from moelib.planning import plan as plan_lib
from moelib.planning.compiled.in_subprocess import Outcome
from moelib.planning.estimate.estimate import Estimate
from moelib.planning.report.step_report import Finding
from moelib.runtime.command_line import parse_flags
from tests.planning.report.test_step_report import make_report

MODULE = """
from tests import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("", max_step=2, evaler=False)}
"""
TINY = ("--module=named_plan_tiny", "--config=tiny")
WHERE = "--topology=v6e:2x2"
MAXTEXT = pathlib.Path(__file__).parents[2] / "experiments/gpt_oss_maxtext.json"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Returns a function that runs the command with flags."""
    (tmp_path / "named_plan_tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")  # Output to a file is not cut to a terminal's width.

    return lambda *args: plan.run(*parse_flags(plan.Flags, args))


@pytest.fixture
def outcomes(monkeypatch):
    """Replaces compilation: a test adds the outcomes."""
    waiting = []
    fake = lambda *arguments, **settings: waiting.pop(0)
    monkeypatch.setattr(plan_lib, "compile_in_subprocess", fake)
    return waiting


def test_a_sweep_is_printed_and_written(command, capsys):
    command(*TINY, "--topology=v6e:2x2,h100:1x8", "--tokens=1e12", "--rows=3", "--json=plan.json")
    out, err = capsys.readouterr()
    assert "tiny: 3 of " in out
    for text in ("v6e:2x2", "h100:1x8", "MFU %", "$/billion tokens", "days", "total $", "links"):
        assert text in out
    assert "plan  tracing the model" in err
    assert len(json.loads(pathlib.Path("plan.json").read_text())["rows"]) == 3


def test_each_phase_of_a_run_is_planned(command, capsys):
    sets = ("=moelib.runs.phases:Phase", ".after_step=1", ".changes={'input.seq_len': 32}")
    phase = [f"--set=phases.long{text}" for text in sets]
    command(*TINY, WHERE, "--rows=1", "--json=plan.json", "--tokens=3e15", *phase)
    out = capsys.readouterr().out
    assert "the first phase: steps 1 to 1\n" in out
    assert "long: steps 2 to 2\n" in out
    plans = json.loads(pathlib.Path("plan.json").read_text())
    assert [*plans] == ["the first phase", "long"]
    # A step of sequences of 16 tokens, then one of 32.
    for plan_of_phase, billions in zip(plans.values(), (1e6, 2e6), strict=True):
        dollars = [x * billions for x in plan_of_phase["rows"][0]["dollars_per_billion_tokens"]]
        assert "{:,.0f} to {:,.0f}".format(*dollars) in out
    one, other = (plan["rows"][0]["tokens_per_second"] for plan in plans.values())
    command(*TINY, WHERE, "--rows=1", "--json=plan.json", *phase, "--set=phase=long")
    alone = json.loads(pathlib.Path("plan.json").read_text())
    assert alone["rows"][0]["tokens_per_second"] == other != one


def test_the_current_mesh_is_one_row(command, capsys):
    command(*TINY, WHERE, "--current_mesh", "--set=mesh_shape=(1, 2, 1, -1, 1, 1)")
    out = capsys.readouterr().out
    assert "1 of 1 meshes, 1 candidates" in out
    assert "data=2,fsdp=2" in out


def test_a_compiled_step_is_compared_with_other_figures(command, outcomes, capsys):
    finding = Finding(
        rule="float32 gather of weights",
        severity="warning",
        instruction="all-gather.7",
        bytes=64 << 20,
        executions=8,
        op_name="jit(step)/decoder",
        locations=("layers/linear.py:40",),
        config_path="train_dtype",
        advice="set it to bfloat16",
    )
    outcomes.append(Outcome(make_report(findings=(finding,))))
    command(*TINY, WHERE, "--compile=1", f"--compare={MAXTEXT}", "--top=3", "--json=plan.json")
    out = capsys.readouterr().out
    assert "15.519 GiB" in next(line for line in out.splitlines() if "peak memory" in line)
    assert "all but small" in out
    assert "warning: float32 gather of weights: train_dtype" in out
    assert "all-gather.7: 64.0 MiB, 8 times per step" in out
    assert "--top=3: this compiler" in out
    assert len(json.loads(pathlib.Path("plan.json").read_text())["compiled"]) == 1


@pytest.mark.parametrize("others", [[], [Outcome(make_report())]])
def test_a_step_that_does_not_compile_exits_with_1(command, outcomes, capsys, others):
    outcomes += [Outcome(None, "it crashed"), *others]
    with pytest.raises(SystemExit) as error:
        command(*TINY, WHERE, f"--compile={len(outcomes)}", "--json=plan.json")
    assert error.value.code == 1
    printed = capsys.readouterr()
    assert printed.err.count("it crashed") == 1
    assert printed.out.count("Lint has no findings.") == len(others)
    assert len(json.loads(pathlib.Path("plan.json").read_text())["failures"]) == 1


def test_a_step_within_the_estimates_error_is_judged_by_the_compiler(
    command, outcomes, capsys, monkeypatch
):
    monkeypatch.setattr(Estimate, "fits", False)
    outcomes.append(Outcome(make_report({"memory.peak": 2**30})))
    command(*TINY, WHERE, "--compile=1")
    printed = capsys.readouterr()
    assert "12% for its error, no mesh is sure to fit" in printed.err
    assert "The step fits with 30.24 GiB free" in printed.out


def test_a_topology_that_cannot_run_the_config_is_named(command, capsys):
    command(*TINY, "--topology=h100:1x8,v6e:2x2", "--mesh=fsdp=8")
    printed = capsys.readouterr()
    assert "h100:1x8" in printed.out
    assert "Excluded: topology v6e:2x2: mesh fsdp=8 takes 8 devices" in printed.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*TINY,), "--topology"),
        ((*TINY, "--topology=v6x:2x2x1"), "'v6e'"),
        (("v6e:2x2x1",), "'v6e:2x2x1'"),
        ((*TINY, WHERE, "--compile=1", "--compare=none.json"), r"none.json"),
        ((*TINY, WHERE, "--json=no/x.json"), "--json=no/x.json"),
        ((*TINY, WHERE, "--mesh=fsdp=3"), r"3 devices.*4"),
        ((*TINY, WHERE, "--current_mesh", "--mesh=fsdp=4"), "mesh='fsdp=4'"),
        ((*TINY, WHERE, "--prices=none.json"), r"none.json"),
        ((*TINY, WHERE, f"--compare={MAXTEXT}"), "--compile=0"),
        ((*TINY, WHERE, "--top=3"), "--top .*--compile=1"),
        ((*TINY, WHERE, "--timeout=3"), "--timeout .*--compile=1"),
        ((*TINY, WHERE, "--compile=1", "--timeout=-3"), "timeout_seconds=-3"),
        ((*TINY, WHERE, "--json=."), r"--json=\."),
        ((*TINY, WHERE, "--compile=1", "--dump=named_plan_tiny.py/x"), "named_plan_tiny.py/x"),
        ((*TINY, WHERE, "--mesh=pipeline=-1"), "mesh axis pipeline: model has no stack"),
        ((*TINY, WHERE, "--mesh=fsdp=2,expert=2"), "expert=2"),
        ((*TINY, WHERE, "--mesh=fsdp=--2"), "'fsdp=--2'"),
        ((*TINY, WHERE, "--mesh=fsdp=2,fsdp=4"), "fsdp=2,fsdp=4"),
        ((*TINY, WHERE, "--compile=1", "--compiler_option=xla_some"), "name=value"),
        ((*TINY, WHERE, "--current_mesh", "--set=mesh_shape=(1, 3, 1, 2, 1, 1)"), "6 devices"),
        ((*TINY, WHERE, "--current_mesh", "--set=input.global_batch_size=6"), "by 4"),
        ((*TINY, "--topology=v6e:2x2,v6e:2x1", "--mesh=fsdp=3"), "fsdp=3.* 4;.* 2;"),
        (
            (
                *TINY,
                WHERE,
                "--set=phases.late=moelib.runs.phases:Phase",
                "--set=phases.late.after_step=5",
            ),
            "after_step is 5.*max_step=2",
        ),
        ((*TINY, WHERE, '--set=sharding_rules={"fnn": ("model",)}'), "'ffn'"),
    ],
)
def test_what_is_impossible_is_one_line(command, args, message):
    with pytest.raises(UserError, match=message) as error:
        command(*args)
    assert "\n" not in str(error.value)
