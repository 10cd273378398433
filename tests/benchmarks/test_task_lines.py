"""Lines of code are counted as stated, and no example is longer than RedCoast's."""

from benchmarks import task_lines

SOURCE = '''"""Docstring
of two lines."""

import os  # Counted.

# A comment.


def f(
    x,
):
    """Docstring."""

    text = """not
    a docstring"""
    return x, text
'''


def test_blank_lines_comments_and_docstrings_are_not_counted():
    assert task_lines.code_lines(SOURCE) == 1 + 3 + 2 + 1


def test_no_example_is_longer_than_that_of_redcoast():
    rows = task_lines.count()
    assert len(rows) == len(task_lines.PARADIGMS)
    for name, ours, theirs in rows:
        assert ours <= theirs, name
    assert sum(ours <= 120 for _, ours, _ in rows) > len(rows) / 2
