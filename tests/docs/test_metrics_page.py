"""docs/metrics.md: names that exist; a run of test_python_api writes no other."""

import ast
import re

from docs.generate import ROOT
from tests.docs.metric_names import NAMES


def test_every_name_on_the_page_is_in_the_code():
    parts = set()
    for file in (ROOT / "moelib").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts |= set(re.split("[/ ]", node.value))
    assert len(NAMES) == len(set(NAMES)) > 30
    for name in NAMES:
        literals = [part for part in re.split("/|<[a-z]+>", name) if part]
        assert set(literals) <= parts, name
