"""No damage to an exported model or to the folder of a run goes unnoticed."""

import pytest

from benchmarks import corruption


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [
        ("export", 100),
        pytest.param("export", 1000, marks=pytest.mark.slow),
        pytest.param("run", 1000, marks=pytest.mark.slow),
    ],
)
def test_no_damaged_model_is_read_silently(tmp_path, name, num_cases):
    (tmp_path / "sound").mkdir()
    subject = corruption.SUBJECTS[name](str(tmp_path / "sound"))
    table = corruption.table(name, subject, num_cases, str(tmp_path))
    counts = dict(zip(table.columns[1:], map(int, table.rows[-1][1:]), strict=True))
    assert counts["cases"] == num_cases
    assert counts[corruption.WRONG] == counts[corruption.TRACEBACK] == 0
    assert counts[corruption.ERROR] > num_cases // 3
