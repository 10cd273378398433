import numpy as np
import pytest

from moelib.data.batches.mixture import PERIOD, Mixture, round_shares, spread_pattern
from moelib.data.tokens.token_source import InMemoryTokens


def _mixture(weights: dict[str, float], names: str = "", vocab_sizes: int | list[int] = 10):
    names = names or "".join(weights)
    sizes = [vocab_sizes] * len(names) if isinstance(vocab_sizes, int) else vocab_sizes
    sources = {
        name: InMemoryTokens.default_config().set(documents=[[1, 2]], vocab_size=size)
        for name, size in zip(names, sizes, strict=True)
    }
    return Mixture.default_config().set(sources=sources, weights=weights).instantiate()


@pytest.mark.parametrize("weights", [[1], [7, 3], [1, 1, 1], [50, 30, 15, 4, 1], [0.9999, 0.0001]])
def test_every_prefix_of_the_sequences_has_each_source_in_its_share_to_within_one(weights):
    counts = round_shares(np.array(weights, np.float64), PERIOD)
    pattern = spread_pattern(counts)
    used = np.cumsum(pattern[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, PERIOD + 1)[:, None] * counts / PERIOD
    assert abs(used - due).max() < 1
    assert used[-1].tolist() == counts.tolist()


def test_rounded_shares_sum_and_stay_close():
    weights = np.random.default_rng(0).uniform(1, 9, 7)
    counts = round_shares(weights, 1000)
    assert counts.sum() == 1000
    assert abs(counts - weights / weights.sum() * 1000).max() < 1


def test_sequences_of_a_source_are_numbered_without_gaps():
    mixture = _mixture({"a": 2.0, "b": 0.5, "c": 1.1})
    source, number = mixture.locate(np.arange(3 * PERIOD + 17))
    for k in range(3):
        assert np.array_equal(number[source == k], np.arange((source == k).sum()))
    later = np.array([25_000, 12_345])
    assert np.array_equal(mixture.locate(later), (source[later], number[later]))


@pytest.mark.parametrize(
    ("weight", "arguments", "message"),
    [
        *((x, {}, rf"weights\['b'\]={x}") for x in (0.0, -1.0, float("nan"), float("inf"))),
        (1e-6, {}, r"weights\['b'\]=1e-06 of 1 in all .* 10000"),  # Too small to ever be drawn.
        (1.0, {"names": "abc"}, r"\['a', 'b', 'c'\].*\['a', 'b'\]"),
        (1.0, {"vocab_sizes": [10, 11]}, r"11.*10\)"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(weight, arguments, message):
    with pytest.raises(ValueError, match=message):
        _mixture({"a": 1.0, "b": weight}, **arguments)
