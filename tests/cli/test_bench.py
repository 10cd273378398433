"""`moelib bench`: what is measured is what is said, and by turns."""

import pytest

from moelib.cli import bench
from moelib.launch import UsageError
from moelib.models.cost import model_cost


def test_the_model_has_the_size_and_the_flops_that_are_said():
    cost = model_cost(bench.model_config(16).instantiate(parent=None), seq_len=256)
    embeddings, attention = 2 * 8192 * 256, 256 * 32 * (8 + 2 * 4 + 8)
    router, expert, norms = 16 * 256, 3 * 256 * 256, (2 * 4 + 1) * 256
    assert cost.total_parameters == embeddings + 4 * (attention + router + 16 * expert) + norms
    assert round(cost.total_parameters / 1e6, 1) == 17.6
    matmuls = embeddings // 2 + 4 * (attention + router + 2 * expert)
    scores = 4 * 2 * 8 * 32 * (256 + 1) / 2  # Keys times queries, then values; the causal half.
    assert cost.train_flops_per_token == 3 * 2 * (matmuls + scores)


def test_runs_are_measured_by_turns_and_the_first_turn_is_not_counted():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = bench.interleaved(runs, 3)
    assert order == ["a", "b"] * 4
    assert [len(times[name]) for name in runs] == [3, 3]


def test_an_unknown_benchmark_names_those_there_are():
    with pytest.raises(UsageError, match="name one benchmark: step"):
        bench.run(["stpe"])
