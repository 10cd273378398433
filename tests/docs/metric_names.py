"""The names of metrics on docs/metrics.md."""

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
