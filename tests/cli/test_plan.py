"""`moelib plan`: its tables, its files, and what it refuses."""

import dataclasses
import json
import pathlib
import sys
import types

import pytest
from absl import flags
from absl.testing import flagsaver

from moelib.cli import plan
from moelib.core import accelerators as hardware
from moelib.core.errors import UsageError
from moelib.planning.report import tables as plan_tables
from moelib.planning.report.step_report import Finding, Memory, StepReport
from tests.planning.report.test_step_report import make_report

MODULE = """
from tests import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("", max_step=2, evaler=False)}
"""
TINY = ("--module=named_plan_tiny", "--config=tiny")
WHERE = "--topology=v6e:2x2"
BESIDE = pathlib.Path(__file__).parents[2] / "experiments/gpt_oss_maxtext.json"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with flags; those that it defines are taken away again."""
    (tmp_path / "named_plan_tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "40")  # Output to a file is not cut to a terminal's width.

    def run(*args):
        with flagsaver.flagsaver():
            plan.define_flags()
            plan.run(flags.FLAGS(["moelib plan", *args])[1:])

    return run


@pytest.fixture
def apart(monkeypatch):
    """Compiles in this process, in place of one apart; returns the arguments of the calls."""
    calls = []

    def compile_apart(cfg, topology_name, **settings):
        from moelib.planning.compiled.compile_step import plan_step
        from moelib.planning.hardware.topologies import PlanError, topology

        calls.append((cfg, topology_name, settings))
        outcome = _outcome(None)
        try:
            options = {each: settings[each] for each in ("name", "compiler_options")}
            outcome.report = plan_step(cfg, topology(topology_name), **options)
        except PlanError as error:
            outcome.failure, outcome.stages = str(error), {"trace": 1.5}
        return outcome

    _put(monkeypatch, compile_apart)
    return calls


def _put(monkeypatch, compile_apart):
    """Puts a function in the place of that which compiles."""
    module = types.SimpleNamespace(compile_apart=compile_apart)
    monkeypatch.setitem(sys.modules, "moelib.planning.compiled.in_subprocess", module)


def _outcome(report, **said):
    given = {"failure": "", "stages": {}, "from_cache": False}
    more = {"out_of_memory": False, "interrupted": False}
    return types.SimpleNamespace(report=report, **given | more | said)


def _of(outcomes, calls):
    """Returns a function that gives outcomes, one a call, and notes the calls."""

    def compile_apart(cfg, topology_name, **settings):
        calls.append(topology_name)
        return outcomes[len(calls) - 1]

    return compile_apart


def test_a_sweep_shows_meshes_and_what_a_run_costs(command, tmp_path, capsys):
    files = (f"--json={tmp_path}/plan.json",)
    command(*TINY, "--topology=v6e:2x2,h100:1x8", "--tokens=1e12", "--rows=3", *files)
    out = capsys.readouterr().out
    assert "tiny: 3 of " in out
    for text in ("v6e:2x2", "h100:1x8", "MFU %", "$ a billion", "days", "$ in all", "links"):
        assert text in out
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["compiled"] == []
    assert len(saved["rows"]) == 3
    row = saved["rows"][0]
    assert row["fits"]
    held = row["memory"]["parameters"] / 2**30
    assert f"Row 1, each device: parameters {held:.1f}, optimizer " in out
    assert row["seconds"][0] < row["seconds"][1]
    assert {"parameters", "optimizer", "gradients", "activations"} <= row["memory"].keys()


def test_a_budget_leaves_out_what_costs_more(command, tmp_path, capsys):
    args = (*TINY, "--topology=h100:1x2,h100:1x8", "--tokens=1e12", "--rows=100")
    command(*args, f"--json={tmp_path}/all.json")
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    dollars = sorted(row["dollars_per_billion_tokens"][0] * 1e3 for row in rows)
    budget = dollars[1] * 1.001
    kept = sum(each <= budget for each in dollars)
    assert 0 < kept < len(rows)
    capsys.readouterr()
    command(*args, f"--budget={budget}", f"--json={tmp_path}/some.json")
    out = capsys.readouterr().out
    assert len(json.loads((tmp_path / "some.json").read_text())["rows"]) == kept
    assert f"{len(rows) - kept} meshes over the budget are left out." in out
    assert out.count(" ! ") == kept  # The high end of each is over it.
    with pytest.raises(UsageError, match=r"may keep to it; the cheapest that fits costs [\d,]+\."):
        command(*args, "--budget=1e-9")


def test_the_config_as_it_is_is_one_row(command, capsys):
    command(*TINY, "--topology=v6e:2x2", "--as_is", "--set=mesh_shape=(1, 2, 1, -1, 1, 1)")
    out = capsys.readouterr().out
    assert "1 of 1 meshes, 1 candidates" in out
    assert "data=2,fsdp=2" in out


def test_what_does_not_fit_says_by_how_much(command, capsys):
    big = ("--set=model.vocab_size=8388608", "--set=model.dim=1024")
    command(*TINY, "--topology=v6e:2x2", "--mesh=data=4", *big)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "GiB too much;" in text


def test_what_nearly_fills_a_device_is_no_fit(command, tmp_path, capsys):
    most = hardware.ACCELERATORS["v6e"].hbm_bytes
    args = (*TINY, "--topology=v6e:2x2", "--as_is", f"--json={tmp_path}/plan.json")
    sizes = {}
    for vocab_size in (10**8, 2 * 10**8):
        command(*args, f"--set=model.vocab_size={vocab_size}", "--set=input.vocab_size=64")
        (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
        sizes[vocab_size] = sum(row["memory"].values())
    (few, some), (many, more) = sizes.items()
    a_token = (more - some) / (many - few)
    capsys.readouterr()
    for share, fits in ((0.95, False), (0.85, True)):
        vocab_size = int(few + (share * most - some) / a_token)
        command(*args, f"--set=model.vocab_size={vocab_size}", "--set=input.vocab_size=64")
        (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
        assert sum(row["memory"].values()) == pytest.approx(share * most, rel=0.01)
        assert row["fits"] == fits
        assert ("within the estimate's error" in capsys.readouterr().out) != fits


def test_a_compiled_step_is_shown_beside_figures_and_the_prediction(
    command, apart, tmp_path, capsys
):
    pytest.importorskip("libtpu")
    files = (f"--json={tmp_path}/plan.json", f"--beside={BESIDE}", "--top=3")
    mesh = "--set=mesh_shape=(1, 2, 1, -1, 1, 1)"
    command(*TINY, "--topology=v6e:2x2x1", mesh, "--as_is", "--compile=1", *files)
    out = capsys.readouterr().out
    assert "data=2,fsdp=2" in out
    # The prediction has a row of the same name, further down.
    assert "15.519 GiB" in next(line for line in out.splitlines() if "peak memory" in line)
    assert "predicted beside compiled" in out
    assert "all but small" in out
    assert "GiB of the 31.24 GiB that a device has." in out
    assert "tests/tiny.py" in out
    ((cfg, topology_name, settings),) = apart
    assert (topology_name, settings["timeout_seconds"]) == ("v6e:2x2x1", None)
    assert cfg.mesh_shape == (1, 2, 1, 2, 1, 1)
    (saved,) = json.loads((tmp_path / "plan.json").read_text())["compiled"]
    report = StepReport.from_json(json.dumps(saved))
    assert report.mesh["data"] == report.mesh["fsdp"] == 2
    # A report stands beside another as well.
    (column,) = plan_tables.read_beside(str(tmp_path / "plan.json"))
    assert column.figures == plan_tables.figures(report)


def test_findings_of_lint_are_shown(capsys):
    finding = Finding(
        rule="float32 gather",
        severity="warning",
        instruction="all-gather.7",
        bytes=64 << 20,
        executions=8,
        op_name="jit(step)/decoder",
        places=("layers/linear.py:40",),
        config_path="train_dtype",
        advice="set it to bfloat16",
    )
    plan_tables.print_findings(types.SimpleNamespace(findings=[finding]))
    out = capsys.readouterr().out
    assert "warning: float32 gather: train_dtype" in out
    assert "all-gather.7: 64.0 MiB, 8 times a step" in out
    assert "set it to bfloat16" in out
    plan_tables.print_findings(types.SimpleNamespace(findings=[]))
    assert "nothing" in capsys.readouterr().out


def test_a_step_that_fails_to_compile_says_what_was_done(command, monkeypatch, capsys):
    failed = _outcome(None, failure="it took longer than 1 s: traced", stages={"trace": 0.5})
    _put(monkeypatch, _of([failed], []))
    args = (*TINY, WHERE, "--compile=1", "--timeout=1", "--json=plan.json")
    with pytest.raises(UsageError, match=r"longer than 1 s: traced$"):
        command(*args)
    assert "longer" not in "".join(capsys.readouterr())  # It is said once: by the error.
    (saved,) = json.loads(pathlib.Path("plan.json").read_text())["failures"]
    assert saved["topology"] == "v6e:2x2"
    assert saved["stages"] == {"trace": 0.5}


def test_one_step_that_fails_is_no_success(command, monkeypatch, capsys):
    outcomes = [_outcome(None, failure="it crashed"), _outcome(make_report())]
    _put(monkeypatch, _of(outcomes, []))
    with pytest.raises(SystemExit) as error:
        command(*TINY, WHERE, "--compile=2", "--json=plan.json")
    assert error.value.code == 1
    assert capsys.readouterr().err.count("it crashed") == 1
    saved = json.loads(pathlib.Path("plan.json").read_text())
    assert (len(saved["compiled"]), len(saved["failures"])) == (1, 1)


def test_ctrl_c_ends_all_that_was_to_be_compiled(command, monkeypatch):
    calls = []
    stopped = _outcome(None, failure="stopped by Ctrl-C", interrupted=True)
    _put(monkeypatch, _of([stopped], calls))
    with pytest.raises(UsageError, match=r"stopped by Ctrl-C"):
        command(*TINY, WHERE, "--compile=3")
    assert calls == ["v6e:2x2"]


def test_a_step_that_takes_too_much_memory_is_a_table(command, monkeypatch, capsys):
    _put(monkeypatch, _of([_outcome(None, failure="too much", out_of_memory=True)], []))
    with pytest.raises(UsageError, match=r"too much"):
        command(*TINY, WHERE, "--compile=1")
    out = capsys.readouterr().out
    rows = [line.split("│")[1:3] for line in out[out.index("by our estimate") :].splitlines()]
    sizes = {row[0].strip(): float(row[1]) for row in rows if len(row) == 2}
    assert sizes.pop("a device has") == 31.24
    held = sizes.pop("in all")
    assert {"parameters", "optimizer", "activations"} <= sizes.keys()
    assert sum(sizes.values()) == pytest.approx(held, abs=0.005 * (len(sizes) + 1))


def test_memory_that_more_devices_do_not_lower_is_said(command, monkeypatch, capsys):
    memory = Memory(3 << 30, 1 << 30, 0, 2 << 30, 0, 0)
    reports = [make_report(topology=f"v6e:{shape}", memory=memory) for shape in ("2x2", "2x4")]
    few, many = (dataclasses.replace(reports[i], mesh={"data": n}) for i, n in ((0, 4), (1, 8)))
    by_name = {"v6e:2x2": few, "v6e:2x4": many}
    _put(monkeypatch, lambda cfg, where, **settings: _outcome(by_name[where]))
    command(*TINY, "--topology=v6e:2x4,v6e:2x2", "--compile=2")
    out = capsys.readouterr().out
    assert "v6e:2x2 to v6e:2x4: warning: memory that does not fall: mesh_shape" in out
    assert "arguments: 1,024.0 MiB" in out


def test_memory_of_unlike_accelerators_is_not_compared(command, monkeypatch, capsys):
    memory = Memory(3 << 30, 1 << 30, 0, 2 << 30, 0, 0)
    devices = {"v6e:2x2": 4, "h100:1x8": 8}
    _put(
        monkeypatch,
        lambda cfg, where, **settings: _outcome(
            make_report(topology=where, memory=memory, mesh={"data": devices[where]})
        ),
    )
    command(*TINY, "--topology=v6e:2x2,h100:1x8", "--compile=2", "--json=plan.json")
    compiled = json.loads(pathlib.Path("plan.json").read_text())["compiled"]
    assert {each["topology"] for each in compiled} == devices.keys()
    assert "memory that does not fall" not in capsys.readouterr().out


def test_what_a_topology_cannot_take_is_said_beside_the_rows_of_others(command, capsys):
    command(*TINY, "--topology=h100:1x8,v6e:2x2", "--mesh=fsdp=8")
    printed = capsys.readouterr()
    assert "h100:1x8" in printed.out
    assert "Left out: topology v6e:2x2: mesh fsdp=8 takes 8 devices, but there" in printed.err


def test_figures_of_a_compiled_step_have_flops_over_the_models():
    report = make_report(model_flops=4, matmul_flops=8)
    figures = plan_tables.figures(report)
    executed = 8 + sum(kernel.flops for kernel in report.kernels)
    assert figures["executed_over_model_flops"] == executed / 4
    assert figures["cycles"] == report.cycles
    assert "cycles" not in plan_tables.figures(dataclasses.replace(report, cycles=0))


def test_without_cycles_no_table_of_them_is_printed(capsys):
    plan_tables.print_costliest(make_report(cycles=0, sources=(), costliest=()), 3, 1e9)
    assert capsys.readouterr().out.startswith("--top: this compiler estimates no cycles")


def test_figures_that_no_report_has_are_refused(tmp_path):
    (tmp_path / "figures.json").write_text('{"memory.peek": 1}')
    with pytest.raises(UsageError, match=r"no figure 'memory.peek'; did you mean 'memory.peak'"):
        plan_tables.read_beside(str(tmp_path / "figures.json"))
    names = [column.name for column in plan_tables.read_beside(str(BESIDE))]
    assert names == ["MaxText", "aim"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*TINY,), "--topology says for what to plan, such as v6e:2x2,h100:1x8"),
        ((*TINY, "--topology=v6x:2x2x1"), "did you mean 'v6e'"),
        (("v6e:2x2x1",), "'v6e:2x2x1' is no flag"),
        ((*TINY, WHERE, "--compile=1", "--beside=none.json"), "none.json: .*No such file"),
        ((*TINY, WHERE, "--json=no/x.json"), "--json no/x.json: .*no such folder"),
        ((*TINY, WHERE, "--mesh=fsdp=3"), "takes 3 devices, but there are 4"),
        ((*TINY, WHERE, "--as_is", "--mesh=fsdp=4"), "leave --mesh out, or --as_is"),
        ((*TINY, WHERE, "--budget=5"), "say by --tokens how long it is"),
        ((*TINY, WHERE, "--tokens=-5"), "--tokens is -5; set it above 0"),
        ((*TINY, WHERE, "--prices=none.json"), "prices none.json: .*No such file"),
        ((*TINY, WHERE, f"--beside={BESIDE}"), "--beside is for one compiled step"),
        ((*TINY, WHERE, "--top=3"), "--top is for compiled steps; set --compile=1"),
        ((*TINY, WHERE, "--timeout=3"), "--timeout is for compiled steps"),
        ((*TINY, WHERE, "--tokens=nan"), "--tokens is nan; set it above 0"),
        ((*TINY, WHERE, "--json=."), r"--json \.: it is a folder; name a file"),
        ((*TINY, WHERE, "--compile=1", "--dump=named_plan_tiny.py/x"), "--dump .*can be made"),
        ((*TINY, WHERE, "--mesh=pipeline=-1"), "pipeline is 4, but nothing is split over it yet"),
        ((*TINY, WHERE, "--mesh=fsdp=2,expert=2"), "expert is 2, but the model has no experts"),
        ((*TINY, WHERE, "--mesh=fsdp=--2"), "is not axis=size"),
        ((*TINY, WHERE, "--mesh=fsdp=²"), "is not axis=size"),
        ((*TINY, WHERE, "--mesh=fsdp=2,fsdp=4"), "fsdp occurs twice"),
        ((*TINY, WHERE, "--compile=1", "--compiler_option=xla_some"), "write it as name=value"),
        ((*TINY, WHERE, "--as_is", "--set=mesh_shape=(1, 3, 1, 2, 1, 1)"), "takes 6 devices"),
        ((*TINY, WHERE, "--as_is", "--set=input.global_batch_size=6"), "divide into 4 parts"),
        (
            (*TINY, "--topology=v6e:2x2,v6e:2x1", "--mesh=fsdp=3"),
            "but there are 4.*but there are 2",
        ),
        ((*TINY, "--topology=v6e:2x2,h100:1x8", "--mesh=fsdp"), r"^mesh 'fsdp': 'fsdp' [^:]*$"),
        ((*TINY, WHERE, '--set=sharding_rules={"fnn": ("model",)}'), "did you mean 'ffn'"),
    ],
)
def test_what_cannot_be_is_one_line(command, args, message):
    with pytest.raises(UsageError, match=message) as error:
        command(*args)
    assert "\n" not in str(error.value)
