"""No damage to a token store, an exported model or the folder of a run goes unnoticed."""

import pytest

from benchmarks import corruption


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [
        ("token_store", 100),
        ("export", 100),
        *(
            pytest.param(name, 1000, marks=pytest.mark.slow)
            for name in ("token_store", "export", "run")
        ),
    ],
)
def test_no_damage_is_read_silently(tmp_path, name, num_cases):
    (tmp_path / "sound").mkdir()
    subject = corruption.SUBJECTS[name](str(tmp_path / "sound"))
    table = corruption.table(name, subject, num_cases, str(tmp_path))
    counts = dict(zip(table.columns[1:], map(int, table.rows[-1][1:]), strict=True))
    assert counts["cases"] == num_cases
    assert counts[corruption.WRONG] == counts[corruption.TRACEBACK] == 0
    # The request and tokenizer_config.json of a store hold no data.
    assert counts[corruption.ERROR] > num_cases // (2 if name == "token_store" else 3)
