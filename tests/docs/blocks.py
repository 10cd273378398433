"""The fenced blocks of a page, and the commands in them."""

import os
import pathlib
import re
import subprocess
import sys
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


def write_files(page: str, folder: pathlib.Path) -> None:
    """Writes the Python files of a page, whose titles are their names, into a folder."""
    for block in blocks(page):
        if block.language == "python" and block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def environment() -> dict[str, str]:
    """Returns the variables of the environment of a user who has installed moelib."""
    found = os.environ | {
        "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": str(generate.ROOT),
        "COLUMNS": "120",
    }
    found.pop("JAX_NUM_CPU_DEVICES", None)
    return found


def run(block: Block, folder: pathlib.Path) -> str:
    """Returns what a block of Python or of commands prints."""
    python = [sys.executable, "-c", block.text]
    commands_of_block = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
    done = subprocess.run(
        python if block.language == "python" else ["bash", "-eu", "-c", commands_of_block],
        check=False,
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert not re.search("warning", done.stdout, re.IGNORECASE), done.stdout
    return done.stdout
