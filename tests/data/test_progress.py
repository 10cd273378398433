import sys

import pytest

from moelib.data import progress
from moelib.data.progress import Progress, format_bytes


def test_bytes_are_written_as_people_read_them():
    sizes = [0, 999, 1500, 2.5e6, 1.25e9, 7e15]
    texts = ["0 B", "999 B", "1.5 kB", "2.5 MB", "1.2 GB", "7000.0 TB"]
    assert [format_bytes(size) for size in sizes] == texts


def test_away_from_a_terminal_lines_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with Progress("work").of(2000) as advance:
        advance(1000)
    assert capsys.readouterr().err.startswith("work: 1.0 kB of 2.0 kB, ")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("work").of(2000) as advance:
        advance(2000)
    assert "2.0/2.0 kB" in capsys.readouterr().err
