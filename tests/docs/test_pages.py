"""All pages and the README: navigation, and the commands that they show."""

import functools
import importlib
import re
import shlex

import pytest

from benchmarks import __main__ as benchmarks
from docs.generate import ROOT, commands, pages
from moelib.cli.main import COMMANDS
from moelib.core.command_line import TRACEBACK, parse_flags

PAGES = {page.relative_to(ROOT).as_posix(): page for page in pages()}
FLAG = re.compile(r"(?<![\w-])--(?:no)?([a-z][a-z0-9_]*)(?![\w-])")
OTHER_FLAGS = {"help", "version", "fast"}  # Of every command, and of pytest.


def fenced_commands(text):
    """Yields the command lines of moelib and its benchmarks in code blocks, as words."""
    for block in re.findall(r"^```(?:bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            names = [word.rpartition("/")[2] for word in words]
            if names[:2] == ["python", "-m"] and names[2] in ("moelib", "benchmarks"):
                words, names = words[2:], names[2:]
            if names[:1] == ["moelib"] or names[:1] == ["benchmarks"]:
                yield [names[0], *words[1:]]


@functools.cache
def flag_names():
    """Returns the names of the flags of all commands."""
    return {flag.name for command in commands().values() for flag in command.flags}


@pytest.mark.parametrize("name", PAGES)
def test_commands_have_no_unknown_flag_or_invalid_value(name):
    for program, *words in fenced_commands(PAGES[name].read_text(encoding="utf-8")):
        if program == "moelib" and not set(words) & {"--help", "--version", "COMMAND"}:
            command, *words = words
            parse_flags(importlib.import_module(COMMANDS[command][0]).Flags, words)
        elif program == "benchmarks":
            parse_flags(benchmarks.Flags, words)


@pytest.mark.parametrize("name", PAGES)
def test_flags_in_the_text_exist(name):
    text = re.sub(r"^```.*?^```$", "", PAGES[name].read_text(), flags=re.MULTILINE | re.DOTALL)
    known = flag_names() | OTHER_FLAGS | {TRACEBACK.lstrip("-")}
    shown = {flag for code in re.findall(r"`([^`]+)`", text) for flag in FLAG.findall(code)}
    assert shown <= known


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", nav.partition("\nnav:")[2].partition("\n\n")[0]))
    assert {f"docs/{page}" for page in listed} == PAGES.keys() - {"README.md"}
