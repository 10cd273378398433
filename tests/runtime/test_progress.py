"""The progress display and tables, on a terminal and without one."""

import io
import re
import sys

import pytest

from moelib.runtime.progress import Progress, format_bytes, format_seconds
from moelib.runtime.table import Table, print_table, to_markdown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_without_a_terminal(capsys):
    with Progress("step", total=3) as progress:
        progress.update(1, "loss 4.04")
        progress.advance(2)
    assert capsys.readouterr().err.splitlines() == ["step 1/3  loss 4.04", "step 3/3"]


def test_lines_are_at_least_the_given_time_apart(capsys):
    with Progress("step", total=3, seconds_between_lines=3600.0) as progress:
        progress.update(1)
        progress.log("saved")
    assert capsys.readouterr().err.splitlines() == ["saved"]


def test_nothing_is_shown_if_disabled(capsys):
    with Progress("step", enabled=False) as progress:
        progress.log("saved")
    assert not capsys.readouterr().err


def test_work_in_bytes_has_a_rate(capsys):
    with Progress("read", total=4_000, unit="B", start=1_000) as progress:
        progress.update(2_000)
    assert re.fullmatch(r"read 2\.0 kB/4\.0 kB  [\d.]+ [kMGT]?B/s\n", capsys.readouterr().err)


@pytest.mark.parametrize("text", ["", "loss 4.04  12,345 tokens/s " * 8])
def test_the_bar_keeps_its_width_on_a_terminal_of_80_columns(monkeypatch, text):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("step", total=100) as progress:
        progress.update(100, text)
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    last = re.split(r"[\r\n]+", plain.rstrip())[-1]
    assert last.startswith("step 100/100 ")
    assert last.count("━") == 20
    assert len(last) <= 80


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e15, "2000.0 TB")]
)
def test_bytes_have_a_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.14, "4.1 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")]
)
def test_durations_have_units(seconds, text):
    assert format_seconds(seconds) == text


WIDE = Table(
    "[a]", [f"a column called {i}" for i in range(30)], [[f"[cell] {i}" for i in range(30)]]
)


def test_a_table_in_a_file_is_whole_however_wide(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_table(WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "[a]"
    (cells,) = (line for line in lines if "[cell]" in line)
    assert all(f"[cell] {i} " in cells + " " for i in range(30))


def test_sections_footnotes_and_alignment_are_shown(capsys):
    print_table(Table("", ["", ">"], [["a:100:", "1"], [], ["b", "23"]], ["* a:on: note"]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [["a:100:", "1"], ["b", "23"], ["*", "a:on:", "note"]]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["a|b", "1"], []], "| name | n |\n| --- | ---: |\n| a\\|b | 1 |\n\nnote"),
        ([], "None.\n\nnote"),
    ],
)
def test_a_table_in_markdown(rows, text):
    assert to_markdown(Table("title", ["name", "n>"], rows, ["note"])) == text
