"""Tables on stdout."""

from rich.table import Table

from moelib.core.table import show


def test_a_table_in_a_file_is_whole_however_wide(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = Table(title="[a]")
    for i in range(30):
        table.add_column(f"a column called {i}")
    table.add_row(*(f"[cell] {i}" for i in range(30)))
    show(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6  # Title, head and one row, with the lines around them.
    assert all(f"[cell] {i} " in lines[4] for i in range(30))
