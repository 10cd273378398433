import pytest

from moelib.core.table import Table, print_table, to_markdown

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
    print_table(Table("", ["", ">"], [["a", "1"], [], ["b", "23"]], ["* a note"]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [["a", "1"], ["b", "23"], ["*", "a", "note"]]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["a|b", "1"], []], "| name | n |\n| --- | ---: |\n| a\\|b | 1 |\n\nnote"),
        ([], "None.\n\nnote"),
    ],
)
def test_a_table_in_markdown(rows, text):
    assert to_markdown(Table("title", ["name", "n>"], rows, ["note"])) == text
