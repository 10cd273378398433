"""No damage to a token store goes unnoticed."""

import pytest

from benchmarks import corruption


@pytest.mark.parametrize("num_cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_damaged_store_is_read_silently(tmp_path, num_cases):
    subject = corruption.token_store(str(tmp_path / "sound"))
    table = corruption.table("token store", subject, num_cases, str(tmp_path))
    counts = dict(zip(table.columns[1:], map(int, table.rows[-1][1:]), strict=True))
    assert counts["cases"] == num_cases
    assert counts[corruption.WRONG] == counts[corruption.TRACEBACK] == 0
    # The request and tokenizer_config.json hold no data of the store.
    assert counts[corruption.ERROR] > num_cases // 2
