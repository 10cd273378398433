"""docs/metrics.md: every name that a run writes, and no other."""

import ast
import json
import pathlib
import re

from docs.generate import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
# Names in backticks at the beginning of a list's item: - `a`, `b` (unit): ...
NAMES = [
    name
    for item in re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", PAGE, re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", item)
]


def pattern(name):
    """Returns the regex of a name with placeholders; a scan adds the index of a layer."""
    return re.sub("<[a-z]+>", ".+", name) + r"(/\d+)?"


def test_every_metric_of_a_run_is_on_the_page(trainer_dir):
    known = re.compile("|".join(map(pattern, NAMES)))
    found = set()
    for line in (pathlib.Path(trainer_dir) / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line).keys()
    names = {name.removeprefix("validation/") for name in found}
    assert {"cross_entropy", "validation/perplexity", "skipped"} <= found
    assert {name for name in names if not known.fullmatch(name)} == set()


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
