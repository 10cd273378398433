"""Published runs lie within the estimated ranges, and the page shows it."""

import pathlib
import re

import pytest

from benchmarks.calibration import as_markdown, calibrate
from benchmarks.published_runs import EXCLUDED, PUBLISHED_RUNS

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
