"""`plan`: rows, budgets, and compiled steps."""

import dataclasses
import json
import re

import pytest

from moelib.core.errors import UserError
from moelib.planning import plan as plan_lib
from moelib.planning.compiled.in_subprocess import CompileOptions, Outcome
from moelib.planning.estimate.estimate import Estimate
from moelib.planning.hardware.topologies import topology
from moelib.planning.plan import plan
from moelib.runtime.accelerators import ACCELERATORS
from tests.planning import tiny_moe
from tests.planning.report.test_step_report import make_report


@pytest.fixture
def outcomes(monkeypatch):
    """Replaces compilation: a test adds the outcomes; returns them and the calls."""
    waiting, calls = [], []

    def compile_in_subprocess(cfg, topology_name, options, *, name, on_progress):
        calls.append((cfg, topology_name, options, name))
        return waiting.pop(0)

    monkeypatch.setattr(plan_lib, "compile_in_subprocess", compile_in_subprocess)
    return waiting, calls


def test_a_plan_has_rows_as_data_and_as_a_table():
    found = plan(tiny_moe.config(), ["v6e:2x2", "h100:1x8"], tokens=1e12)
    assert found.rows[0].fits
    table = found.table(max_rows=3)
    assert len(table.rows) == 3
    assert {"MFU %>", "$/billion tokens>", "days>", "total $>"} <= set(table.columns)
    saved = json.loads(json.dumps(found.to_json(max_rows=3)))
    assert saved["compiled"] == []
    row = saved["rows"][0]
    assert row["seconds"][0] < row["seconds"][1]
    assert row["batch_per_device"] == found.rows[0].candidate.batch_per_device
    assert {"parameters", "optimizer", "gradients", "activations"} <= row["memory"].keys()
    assert f"parameters {row['memory']['parameters'] / 2**30:.1f}, " in table.footnotes[0]


def test_meshes_whose_axes_share_a_side_of_the_torus_are_named():
    found = plan(tiny_moe.config(), "v6e:4x4", mesh="expert=2,fsdp=4,model=2")
    assert any("#1 4 = expert 2 x model 2" in line for line in found.table().footnotes)
    cfg = found.rows[0].candidate.apply(tiny_moe.config()).set(dir="unused")
    trainer = cfg.instantiate(parent=None, devices=topology("v6e:4x4").devices)
    assert "4 = expert 2 x model 2" in trainer.describe()


def test_tokens_are_a_number_and_rows_short():
    with pytest.raises(UserError, match="tokens='1e9': set it to a number above 0"):
        plan(tiny_moe.config(), "v6e:2x2", tokens="1e9")
    (row,) = plan(tiny_moe.config(), "v6e:2x2", current_mesh=True).rows
    assert re.fullmatch(r"Estimate\(v6e:2x2, .* GiB, .* s\)", repr(row))


def test_a_budget_excludes_meshes_that_cost_more():
    where = ["h100:1x2", "h100:1x8"]
    rows = plan(tiny_moe.config(), where, tokens=1e12).rows
    dollars = sorted(row.whole_run(1e12)[1][0] for row in rows)
    budget = dollars[1] * 1.001
    found = plan(tiny_moe.config(), where, tokens=1e12, budget=budget)
    assert len(found.rows) == sum(each <= budget for each in dollars) > 0
    assert found.num_over_budget == len(rows) - len(found.rows) > 0
    assert all(row[-2].endswith(" !") for row in found.table().rows)
    with pytest.raises(UserError, match=r"budget=1e-09.* costs [\d,]+\."):
        plan(tiny_moe.config(), where, tokens=1e12, budget=1e-9)
    with pytest.raises(UserError, match=f"costs {dollars[0] / 1e6:.3g}"):
        plan(tiny_moe.config(), where, tokens=1e6, budget=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 5.0}, "budget=5"),
        ({"tokens": -5.0}, "tokens=-5"),
        ({"tokens": float("nan")}, "tokens=nan"),
        ({"mesh": "fsdp=4", "current_mesh": True}, "mesh='fsdp=4'"),
        ({"trainer_config": "flame"}, "trainer_config is 'flame'"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        plan(**({"trainer_config": tiny_moe.config(), "topologies": "v6e:2x2"} | arguments))


def _with_figures(estimate, **figures):
    """Returns an estimate with other figures."""
    fields = {field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)}
    return type("Changed", (Estimate,), figures)(**fields)


@pytest.mark.parametrize(("share", "fits"), [(0.95, False), (0.85, True)])
def test_a_nearly_full_device_does_not_fit(share, fits):
    (row,) = plan(tiny_moe.config(), "h100:1x8", mesh="data=8").rows
    capacity = int(row.bytes_held / share)
    full = _with_figures(row, capacity=capacity)
    assert full.fits == fits
    assert ("within the estimate's error" in plan_lib._limit(full)) != fits
    assert "lacks" in plan_lib._limit(_with_figures(row, capacity=capacity // 2))


def test_the_best_are_compiled_with_their_candidates_config(outcomes, tmp_path):
    waiting, calls = outcomes
    waiting += [Outcome(make_report()), Outcome(None, "it crashed")]
    options = CompileOptions({"xla_a": "1"}, 60.0, str(tmp_path / "dump"))
    found = plan(tiny_moe.config(), "v6e:2x2", num_compiled=2, compile_options=options, name="tiny")
    for i, ((cfg, where, own, name), row) in enumerate(zip(calls, found.rows, strict=False), 1):
        assert (where, name) == ("v6e:2x2", "tiny")
        assert cfg.mesh_shape == row.candidate.apply(tiny_moe.config()).mesh_shape
        assert own == dataclasses.replace(options, dump_dir=f"{tmp_path}/dump/{i}")
    saved = found.to_json()
    assert [len(saved[key]) for key in ("compiled", "failures")] == [1, 1]
    assert saved["failures"][0]["topology"] == "v6e:2x2"
    assert saved["failures"][0]["failure"] == "it crashed"


def test_ctrl_c_ends_all_compilation(outcomes):
    waiting, calls = outcomes
    waiting.append(Outcome(None, "stopped by Ctrl-C", interrupted=True))
    plan(tiny_moe.config(), "v6e:2x2", num_compiled=3)
    assert len(calls) == 1


def test_a_step_without_enough_memory_is_a_table_of_the_estimate(outcomes):
    outcomes[0].append(Outcome(None, "too much", out_of_memory=True))
    (step,) = plan(tiny_moe.config(), "v6e:2x2", num_compiled=1).compiled
    (table,) = step.tables()
    sizes = {name: float(size) for name, size in table.rows}
    assert sizes.pop("device") == pytest.approx(ACCELERATORS["v6e"].hbm_bytes / 2**30, abs=0.005)
    held = sizes.pop("total")
    assert {"parameters", "optimizer", "activations"} <= sizes.keys()
    assert sum(sizes.values()) == pytest.approx(held, abs=0.005 * (len(sizes) + 1))


def test_a_compiled_step_is_compared_with_its_estimate(outcomes):
    sent = {"memory.peak": 2**30, "collective-broadcast.bytes": 2**20}
    report = make_report(sent)
    outcomes[0].append(Outcome(report))
    (step,) = plan(tiny_moe.config(), "v6e:2x2", num_compiled=1).compiled
    figures, _, _, prediction = step.tables()
    assert "30.24 GiB free of 31.24 GiB" in figures.footnotes[0]
    rows = {row[0]: row[1:] for row in prediction.rows}
    held = step.estimate.bytes_held / 2**30
    assert rows["peak memory"] == (f"{held:.3f} GiB", "1.000 GiB", f"{100 * (held - 1):+.1f}%")
    assert rows["collective-broadcast"] == ("0.0 MiB", "1.0 MiB", "-100.0%")  # Not estimated.


def test_memory_that_more_devices_of_a_kind_do_not_reduce_is_found(outcomes):
    memory = {"memory.arguments": 1 << 30, "memory.temporaries": 2 << 30}
    devices = {"v6e:2x2": 4, "v6e:2x4": 8, "h100:1x16": 16}
    reports = [make_report(memory, topology=name, mesh={"data": n}) for name, n in devices.items()]
    found = plan(tiny_moe.config(), ["v6e:2x2", "v6e:2x4", "h100:2x8"])
    best = {row.candidate.topology.name: row for row in reversed(found.rows)}
    steps = [
        plan_lib.CompiledStep(best[name], Outcome(report))
        for name, report in zip(("v6e:2x2", "v6e:2x4", "h100:2x8"), reports, strict=True)
    ]
    found = dataclasses.replace(found, compiled=tuple(reversed(steps)))
    findings = list(found.scaling_findings())
    assert {name for name, _ in findings} == {"v6e:2x2 to v6e:2x4"}
    assert "arguments" in {finding.instruction for _, finding in findings}


@pytest.mark.parametrize(("links", "count"), [(3.0, 1), (1.0, 0)])
def test_a_step_bound_by_links_names_the_mesh_that_sends_less(links, count):
    found = plan(tiny_moe.config(), "v6e:2x2")
    first = found.rows[0]
    times = lambda x: _with_figures(
        first, seconds=(x, 2 * x), seconds_at_peak={"compute": 0.1, "links": x}, capacity=10**12
    )
    busy = [{"name": "links of fsdp", "seconds": 0.25}]
    bounds = {"bound.flops": 0.1, "bound.hbm": 2.0, "bound.links": links}
    step = plan_lib.CompiledStep(times(1.0), Outcome(make_report(bounds, busy=busy)))
    found = dataclasses.replace(found, rows=(times(1.0), times(0.9), times(0.5)), compiled=(step,))
    names = [(name, each.instruction) for name, each in found.mesh_findings()]
    assert names == [("v6e:2x2", "links of fsdp: 250.0 ms")] * count
    assert all("sends 0.50 of its bytes" in each.advice for _, each in found.mesh_findings())
