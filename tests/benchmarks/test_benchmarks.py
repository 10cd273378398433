"""The benchmarks: cases and measurements, calibration, tiny runs and counts of lines."""

import dataclasses
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import cases as bench_cases
from benchmarks import measure, serve, task_lines, tiny_runs
from benchmarks import transformers_comparison as comparison
from benchmarks.calibration import as_markdown, calibrate
from benchmarks.published_runs import EXCLUDED, PUBLISHED_RUNS
from benchmarks.sizes import Sizes, check_sizes, describe
from experiments.flame_moe import named_trainer_configs
from moelib.core import tree
from moelib.core.errors import UsageError
from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.layers.moe.layer import MoELayer
from moelib.models.cost import model_cost
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.command_line import run_command
from tests.train import small_run

SMALL = Sizes(
    batch_size=8, seq_len=16, dim=32, hidden_dim=16, num_experts=8, num_heads=2, num_kv_heads=1
)


@pytest.mark.slow
def test_the_rates_of_a_server_are_measured(tmp_path, capsys):
    small_run.make_hub(tmp_path)
    flags = serve.Flags(hf_dir=str(tmp_path), texts=1, max_tokens=2, repeats=1)
    serve.run(flags, [])
    rows = re.findall(r"^ +(\d+) +([\d,]+) +([\d,]+) *$", capsys.readouterr().out, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 4, 16]
    assert all(row[1] == row[2] != "0" for row in rows)


def test_the_model_has_the_documented_size_and_flops():
    cfg = bench_cases.model_config(Sizes(), "learned")
    cost = model_cost(cfg.instantiate(parent=None), seq_len=256)
    embeddings, attention = 2 * 8192 * 256, 256 * 32 * (8 + 2 * 4 + 8)
    router, expert, norms = 16 * 256, 3 * 256 * 256, (2 * 4 + 1) * 256
    assert cost.total_parameters == embeddings + 4 * (attention + router + 16 * expert) + norms
    assert round(cost.total_parameters / 1e6, 1) == 17.6
    matmuls = embeddings // 2 + 4 * (attention + router + 2 * expert)
    scores = 4 * 2 * 8 * 32 * (256 + 1) / 2  # Keys times queries, then values; the causal half.
    assert cost.train_flops_per_token == 3 * 2 * (matmuls + scores)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), pytest.param("bfloat16", 2**-5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "name", ["loss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gmm", "attention"))]
)
def test_compared_cases_give_the_same_gradients(name, dtype, tolerance):
    sizes = dataclasses.replace(SMALL, dtype=dtype)
    cases = list(bench_cases.CASES[name](sizes, "skewed").values())
    for ours, other in zip(cases[::2], cases[1::2], strict=True):
        assert ours.flops == other.flops
        for a, b in zip(*(jax.tree.leaves(case.run()) for case in (ours, other)), strict=True):
            assert a.dtype == b.dtype == dtype
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            scale = np.abs(b).max()
            np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


@pytest.mark.slow
def test_a_step_computes_in_the_dtype_and_keeps_its_state_in_float32():
    sizes = dataclasses.replace(SMALL, dtype="bfloat16", num_layers=1, vocab_size=64)
    case = bench_cases.step_case(sizes, "learned")["step"]
    assert np.isfinite(case.run()).all()
    state = jax.tree.leaves(case.compiled.in_avals)
    assert not any(x.dtype == jnp.bfloat16 for x in state)
    assert "bf16[" in case.compiled.as_text()


def test_dispatched_tokens_and_experts_are_of_the_dtype_and_the_router_is_not(monkeypatch):
    monkeypatch.setattr(bench_cases, "DISPATCHERS", {"sorted": SortedDispatcher})
    sizes = dataclasses.replace(SMALL, dtype="bfloat16")
    params, x = bench_cases.dispatch_cases(sizes, "learned")["sorted"].run()
    assert all(leaf.dtype == jnp.bfloat16 for leaf in [x, *jax.tree.leaves(params["experts"])])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params["router"]))


def test_the_flops_of_attention_are_those_of_the_scores_that_count():
    cases = bench_cases.attention_cases(SMALL, "learned")
    ahead = np.arange(16)[:, None] - np.arange(16)
    for name, window in (("attention", 16), ("window", 4)):
        scores = 8 * 2 * ((ahead >= 0) & (ahead < window)).sum()  # Of 8 rows and 2 heads.
        assert cases[name].flops == 3 * 2 * 2 * 16 * scores


@pytest.mark.parametrize(("routing", "most"), [("balanced", 1.0), ("skewed", 2.0)])
def test_planned_routing_matches_its_name(routing, most):
    sizes = Sizes(batch_size=8, seq_len=256)
    ids = bench_cases.planned_ids(routing, sizes.num_tokens, sizes)
    assert all(len(set(row)) == sizes.num_experts_per_token for row in ids)
    share = np.bincount(ids.reshape(-1), minlength=16) * 16 / ids.size
    assert share.max() == 1 if most == 1 else share.max() > most > 1 > share.min() > 0


def test_runs_alternate_and_the_first_round_is_not_counted():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = measure.interleaved(runs, 3)
    assert order == ["a", "b"] * 4
    assert [len(times[name]) for name in runs] == [3, 3]


def test_the_table_has_two_rows_per_case():
    table = measure.measure(bench_cases.loss_cases(SMALL, "learned"), 2, "bfloat16")
    assert [row[:2] for row in table.rows] == [
        (name, time) for name in ("loss", "all logits") for time in ("least", "median")
    ]
    assert all(float(row[2]) > 0 and row[5].endswith("%") for row in table.rows)


@pytest.mark.parametrize("cost", [None, {}, {"flops": 1.0}])
def test_bytes_that_are_not_counted_are_a_dash(cost):
    memory = types.SimpleNamespace(
        argument_size_in_bytes=3 * 2**20,
        output_size_in_bytes=2 * 2**20,
        temp_size_in_bytes=2**20,
        alias_size_in_bytes=2**20,
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, cost_analysis=lambda: cost)
    assert measure.memory(compiled) == ("5", "-")


@pytest.mark.parametrize(
    ("name", "sizes", "num_devices", "message"),
    [
        ("step", {"seq_len": 0}, 1, "^--seq_len=0"),
        ("gmm", {"hidden_dim": -1}, 1, "^--hidden_dim=-1"),
        ("attention", {"num_heads": 7}, 1, "^--dim=256.* 7, --num_heads"),
        ("step", {"num_kv_heads": 3}, 1, "^--num_heads=8.* 3, --num_kv_heads"),
        ("step", {"num_heads": 256}, 1, "^--num_heads=256"),
        ("step", {"num_experts": 1, "num_experts_per_token": 1}, 1, "^--num_experts=1:"),
        ("gmm", {"num_experts": 2, "num_experts_per_token": 4}, 1, "^--num_experts_per_token=4: "),
        ("dispatch", {"num_experts": 4}, 8, "^--num_experts=4.* 8,"),
        ("dispatch", {"batch_size": 4}, 8, "^--batch_size=4.* 8,"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_measured_are_refused_by_flag(name, sizes, num_devices, message):
    with pytest.raises(UsageError, match=message):
        check_sizes(name, Sizes(**sizes), num_devices)


def test_sizes_that_a_benchmark_does_not_use_are_not_checked():
    sizes = Sizes(num_heads=7, num_experts=2, num_experts_per_token=4, batch_size=3)
    check_sizes("loss", sizes, 8)
    for name in bench.BENCHMARKS:
        check_sizes(name, Sizes(), 8)


def test_the_routing_is_named_where_it_is_used():
    for name in bench.BENCHMARKS:
        text = describe(name, SMALL, "skewed")
        assert ("skewed routing" in text) == (name in ("step", "gmm", "dispatch"))
        assert text.endswith(", float32")


def test_an_unknown_benchmark_names_the_known_ones():
    with pytest.raises(UsageError, match="'stpe'"):
        bench.run(bench.Flags(), ["stpe"])


def test_ratios_are_of_the_least_times_and_of_neighboring_runs():
    ours = comparison.Times([2.0, 1.0, 4.0], [1.0, 1.0, 1.0])
    theirs = comparison.Times([2.0, 3.0, 16.0], [0.5, 1.0, 3.0])
    found = comparison.rows("8", {"moelib": ours, "transformers": theirs}, str)
    assert list(found) == [
        ("8", "least", "1.0", "2.0", "2.00", "0.50"),
        ("8", "median", "2.0", "3.0", "3.00", "1.00"),
    ]


def test_the_first_two_rounds_of_a_comparison_are_not_counted():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = comparison.alternate(runs, 2)
    assert order == ["a", "b"] * 4
    assert [len(times[name].wall) for name in runs] == [2, 2]


def test_transformers_is_compared_in_float32_only():
    with pytest.raises(UsageError, match="--dtype=bfloat16"):
        comparison.check(dataclasses.replace(SMALL, dtype="bfloat16"))


@pytest.mark.hf
def test_steps_and_texts_of_transformers_are_compared():
    sizes = dataclasses.replace(SMALL, num_layers=1, vocab_size=64, num_experts=4)
    steps, texts = comparison.compare(sizes, 1)
    assert {row[0] for row in steps.rows} == {"4 experts, top-2"}
    assert {row[0] for row in texts.rows} == {"1", "8"}


SOURCE = '''"""Docstring
of two lines."""

import os  # Counted.

# A comment.


def f(
    x,
):
    """Docstring."""

    text = """not
    a docstring"""
    return x, text
'''


def test_blank_lines_comments_and_docstrings_are_not_counted():
    assert task_lines.code_lines(SOURCE) == 1 + 3 + 2 + 1


def test_no_example_is_longer_than_that_of_redcoast():
    rows = task_lines.count()
    assert len(rows) == len(task_lines.PARADIGMS)
    for name, ours, theirs in rows:
        assert ours <= theirs, name
    assert sum(ours <= 120 for _, ours, _ in rows) > len(rows) / 2


PAGE = pathlib.Path(__file__).parents[2] / "docs/calibration.md"


@pytest.mark.slow
def test_a_small_run_is_within_its_range():
    (found,) = calibrate(PUBLISHED_RUNS[:1])
    assert found.contained
    low, high = found.estimate.tokens_per_second
    assert low < 5640 < high
    assert found.width == pytest.approx(high / low)
    text = as_markdown([found], EXCLUDED)
    assert "in 1 of 1 rows" in text
    assert "| gpt-oss-3b-v6e4 |" in text


def test_the_page_contains_eight_of_ten_with_no_wide_range():
    text = PAGE.read_text()
    within, runs = map(int, re.search(r"(\d+) of (\d+)\s+rows", text).groups())
    assert runs == len(PUBLISHED_RUNS) >= 10
    assert within >= 0.8 * runs
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 16]
    rows = [row for row in rows if re.fullmatch(r"[\d. ]+", row[9])]
    assert len(rows) == runs
    # On two nodes, compute, memory and links of qwen3-30b-a3b take 2.8, 3.3 and 2.2 s at their
    # peaks: their sum is 2.5 times their maximum before any efficiency.
    wide = [(row[2].strip(), row[3].strip()) for row in rows if float(row[9]) >= 5]
    assert wide == [("qwen3-30b-a3b", "h100:2x8")]
    assert all(float(row[9]) < 5.5 for row in rows)


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert as_markdown(calibrate(PUBLISHED_RUNS), EXCLUDED) == PAGE.read_text()


def test_all_models_are_named():
    names = set(named_trainer_configs()) - {"flame-moe-tiny"}
    assert set(tiny_runs.NAMES) == names
    assert len(names) == 7 + 4


@pytest.mark.parametrize("name", tiny_runs.NAMES)
def test_layers_and_experts_are_those_of_the_config(name):
    own = named_trainer_configs()[name]()
    small = tiny_runs.tiny_config(name, "unused", steps=8, num_devices=1)
    layer, tiny = (cfg.model.decoder.block[0].feed_forward for cfg in (own, small))
    assert type(layer) is type(tiny)
    if isinstance(layer, MoELayer.Config):
        assert tiny.num_experts == layer.num_experts == 64
        assert tiny.num_experts_per_token == layer.num_experts_per_token == 6
        assert tiny.load_balance_loss == layer.load_balance_loss
    assert small.model.decoder.num_layers == own.model.decoder.num_layers
    assert small.model.dim == own.model.dim // 32


def test_models_have_different_sizes():
    sizes = []
    for name in tiny_runs.NAMES:
        small = tiny_runs.tiny_config(name, "unused", steps=8, num_devices=1)
        model = small.model.clone(name="model").instantiate(parent=None)
        sizes.append(tree.count_elements(model.create_parameter_specs_recursively()))
    assert sizes[:7] == sorted(set(sizes[:7]))  # Of FLAME-MoE, in the order of their names.
    assert sizes[7:] == sorted(set(sizes[7:]))
    assert max(sizes) < 20_000_000


@pytest.mark.slow
def test_every_model_is_trained(tmp_path, capsys):
    flags = [f"--folder={tmp_path}"]
    status = run_command("tiny_runs", tiny_runs.Flags, tiny_runs.run, flags)
    assert status == 0
    table = capsys.readouterr().out.partition("Tiny runs")[2]
    for name in tiny_runs.NAMES:
        assert name in table
        steps = [line["step"] for line in read_metrics(str(tmp_path / name), ["loss"])]
        assert steps[:8] == list(range(1, 9))
        report = tmp_path / name / "analysis/routing/report.md"
        assert report.exists() == name.startswith("flame-moe")


def test_a_part_that_no_name_has_is_refused(capsys):
    assert run_command("tiny_runs", tiny_runs.Flags, tiny_runs.run, ["--only=none"]) == 2
    assert "--only=none" in capsys.readouterr().err
