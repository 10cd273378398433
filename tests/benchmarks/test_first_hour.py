"""The report of the first minutes on a device: its parts, their limits, and what it shows."""

import json
import pathlib
import sys

import pytest

from benchmarks import first_hour
from moelib.runtime.table import to_markdown
from tests.python_process import finish, start

TINY = first_hour.Flags(tiny=True)


def test_a_part_times_its_cases_beside_the_limits_of_the_device(monkeypatch):
    h100 = first_hour.ACCELERATORS["h100"]
    monkeypatch.setattr(first_hour, "_accelerator", lambda kind: h100)
    (row,) = first_hour.loss(TINY)
    sizes = first_hour._TINY
    assert row["flops"] == 6.0 * sizes.num_tokens * sizes.dim * sizes.vocab_size
    # Hidden states and head, and their gradients; labels are constants of the program.
    wanted = 2 * 4 * sizes.dim * (sizes.num_tokens + sizes.vocab_size)
    assert row["bytes"] == pytest.approx(wanted, rel=1e-3)
    assert row["limit"] == "HBM"
    assert row["limit_seconds"] == row["bytes"] / h100.hbm_bytes_per_second
    part = {"rows": [row], "device": "NVIDIA H100", "seconds": 3.0, "problem": None}
    (table,) = first_hour.tables({"loss": part})
    page = to_markdown(table)
    assert "of the limit" in page
    assert "3 s on NVIDIA H100." in page
    assert "MFU" not in page


def test_a_case_that_fails_is_a_line():
    def build():
        raise RuntimeError("no such kernel\nat line 3")

    (row,) = first_hour._measured("cudnn", build)
    assert row == {"case": "cudnn", "verdict": "RuntimeError: no such kernel"}


def test_a_part_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(first_hour.PARTS, "loss", (first_hour.loss, 0.1))
    found = first_hour._in_process_of_its_own(first_hour.Flags(folder=str(tmp_path)), "loss")
    assert found["problem"] == "stopped after 0.1 s"
    assert found["rows"] == []


def test_all_parts_end_within_eight_minutes():
    assert sum(limit for _, limit in first_hour.PARTS.values()) <= 8 * 60


@pytest.mark.slow
def test_the_command_writes_numbers_and_a_page(tmp_path):
    parts = [f"--only={name}" for name in ("kernels", "train")]
    command = ["-m", "benchmarks.first_hour", "--tiny", f"--folder={tmp_path}", *parts]
    finish(start(*command, devices=1))
    report = json.loads((tmp_path / "first_hour.json").read_text())
    assert {row["verdict"] for row in report["kernels"]["rows"]} == {"right"}
    (run,) = report["train"]["rows"]
    assert len(run["losses"]) == 2
    page = pathlib.Path(tmp_path, "first_hour.md").read_text()
    assert page.index("## kernels") < page.index("flash_attention(q") < page.index("## train")
    assert sys.executable not in page
