"""Code on the pages of the documentation: equal to marked regions of tests, and complete."""

import pytest

from docs import generate

PAGES = {page.relative_to(generate.ROOT).as_posix(): page for page in generate.pages()}


@pytest.mark.parametrize("name", PAGES)
def test_pages_equal_the_code_that_they_show(name):
    text = PAGES[name].read_text(encoding="utf-8")
    assert generate.generated(PAGES[name]) == text, "run `python -m docs.generate`"
    assert "--8<--" not in text
    for quote in generate.QUOTE.finditer(text):
        compile(quote["code"], f"{quote['path']}:{quote['name']}", "exec")
        assert max(len(line) for line in quote["code"].splitlines()) <= 100


def test_every_region_is_quoted():
    quoted = {
        (quote["path"], quote["name"])
        for page in PAGES.values()
        for quote in generate.QUOTE.finditer(page.read_text(encoding="utf-8"))
    }
    files = (generate.ROOT / "tests").rglob("*.py")
    marked = {
        (file.relative_to(generate.ROOT).as_posix(), name)
        for file in files
        for name in generate.regions(file)
    }
    assert quoted == marked


def test_a_region_is_dedented_and_preceded_by_the_imports_that_it_uses(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os\n"
        "import pathlib\n"
        "from moelib.core.tree import count_bytes, count_parameters\n"
        "from tests import tiny\n"
        "def test_it():\n"
        "    # --8<-- [start:it]\n"
        "    if pathlib.Path('x'):\n"
        "        count_bytes(tiny)\n"
        "    # --8<-- [end:it]\n"
    )
    assert generate.regions(file) == {
        "it": "import pathlib\n\n"
        "from moelib.core.tree import count_bytes\n\n"
        "if pathlib.Path('x'):\n"
        "    count_bytes(tiny)\n"
    }
