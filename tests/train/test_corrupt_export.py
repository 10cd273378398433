"""No damage to an exported model goes unnoticed."""

import pathlib

import pytest

from benchmarks import corruption


@pytest.mark.parametrize("num_cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_damaged_export_is_read_silently(tmp_path: pathlib.Path, num_cases: int):
    (tmp_path / "sound").mkdir()
    subject = corruption.export(str(tmp_path / "sound"))
    table = corruption.table("export", subject, num_cases, str(tmp_path))
    counts = dict(zip(table.columns[1:], map(int, table.rows[-1][1:]), strict=True))
    assert counts["cases"] == num_cases
    assert counts[corruption.WRONG] == counts[corruption.TRACEBACK] == 0
    assert counts[corruption.ERROR] > num_cases // 2
