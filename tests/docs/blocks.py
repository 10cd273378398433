"""The fenced blocks of a page, and the commands in them."""

import re
from typing import NamedTuple

from docs import generate

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_PROMPTS = {"bash": "", "console": "$ "}


class Block(NamedTuple):
    """A fenced block: its language, its title ("" for none) and its lines."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page, such as "docs/tutorial.md"."""
    text = (generate.ROOT / page).read_text(encoding="utf-8")
    return [Block(*fields) for fields in _FENCE.findall(text)]


def commands(page: str, program: str = "moelib") -> list[str]:
    """Returns the command lines of a program on a page, each on one line."""
    found: list[str] = []
    for block in blocks(page):
        if block.language in _PROMPTS:
            start = f"{_PROMPTS[block.language]}{program} "
            lines = block.text.replace("\\\n", " ").splitlines()
            found += [
                f"{program} " + line.removeprefix(start) for line in lines if line.startswith(start)
            ]
    return found
