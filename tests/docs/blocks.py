"""The fenced blocks of a page, and the commands in them."""

import re
from typing import NamedTuple

from docs import commands as docs_commands
from docs import generate

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_PROMPTS = {"bash": "", "console": "$ "}


class Block(NamedTuple):
    """A fenced block: its language, its title ("" for none) and its lines."""

    language: str
    title: str
    text: str


def text(page: str) -> str:
    """Returns the text of a page, such as "docs/tutorial.md", as it is in the built site."""
    found = (generate.ROOT / page).read_text(encoding="utf-8")
    return f"{found}\n{docs_commands.sections()}" if page == "docs/cli.md" else found


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page."""
    return [Block(*fields) for fields in _FENCE.findall(text(page))]


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
