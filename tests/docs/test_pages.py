"""All pages and the README: lines, navigation, commands, and names of metrics."""

import ast
import functools
import importlib
import pkgutil
import re
import shlex

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import study
from docs.commands import commands
from docs.generate import ROOT, pages
from moelib.cli.main import COMMANDS
from moelib.runtime.command_line import TRACEBACK, describe_flags, parse_flags
from tests import tiny
from tests.docs import blocks
from tests.docs.metric_names import NAMES

PAGES = {page.relative_to(ROOT).as_posix(): page for page in pages()}
FLAG = re.compile(r"(?<![\w-])--(?:no)?([a-z][a-z0-9_]*)(?![\w-])")
OTHER_FLAGS = {
    "gradients",
    "help",
    "version",
    "fast",
    "logdir",
}  # Of every command, pytest, TensorBoard.
BENCHMARK = "python -m benchmarks"


@functools.cache
def flag_names():
    """Returns the names of the flags of all commands, and of the study."""
    flags = [flag for command in commands().values() for flag in command.flags]
    return {flag.name for flag in (*flags, *describe_flags(study.Flags))}


FOUND = [(page, line) for page in PAGES for line in blocks.commands(page)]
BENCHMARKS = [(page, line) for page in PAGES for line in blocks.commands(page, BENCHMARK)]


@pytest.mark.parametrize(("page", "line"), FOUND + BENCHMARKS, ids=lambda value: value)
def test_a_command_has_no_unknown_flag_or_invalid_value(page, line):
    if line.startswith(BENCHMARK):
        parse_flags(benchmarks.Flags, shlex.split(line, comments=True)[3:])
        return
    name, *arguments = shlex.split(line, comments=True)[1:]
    if not name.startswith("-") and not name.isupper():
        flags = importlib.import_module(COMMANDS[name][0]).Flags
        parse_flags(flags, [each for each in arguments if each not in ("...", "--help")])


def test_commands_are_found():
    assert len({page for page, _ in FOUND}) >= 5


@pytest.mark.parametrize("name", PAGES)
def test_flags_in_the_text_exist(name):
    text = re.sub(r"^```.*?^```$", "", blocks.text(name), flags=re.MULTILINE | re.DOTALL)
    known = flag_names() | OTHER_FLAGS | {TRACEBACK.lstrip("-")}
    shown = {flag for code in re.findall(r"`([^`]+)`", text) for flag in FLAG.findall(code)}
    assert shown <= known


@pytest.mark.parametrize("name", PAGES)
def test_lines_have_at_most_120_characters(name):
    """Rows of tables and what commands print cannot be broken."""
    text = blocks.text(name)
    text = re.sub(r"^```(text|console).*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", nav.partition("\nnav:")[2].partition("\n\n")[0]))
    in_docs = {page for page in PAGES if page.startswith("docs/")}
    assert {f"docs/{page}" for page in listed} == in_docs | {"docs/results.md"}


def test_the_shapes_of_a_batch_are_those_of_its_table():
    page = (ROOT / "docs/path_of_a_batch.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\[.*?\])` int32 \|", page, re.MULTILINE))
    batch = tiny.input_config(batch_size=4, seq_len=16).instantiate().batch(0)
    assert {str(x.dtype) for x in batch.values()} == {"int32"}
    letters = {(4, 16): "[B, S]", (4,): "[B]"}
    assert {name: letters[x.shape] for name, x in batch.items()}.items() <= rows.items()
    assert "`target_num_bytes` `[B]`" in (ROOT / "docs/data.md").read_text(encoding="utf-8")


def test_concepts_are_as_many_as_the_page_says():
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## \d+\. ", page, re.MULTILINE)) == 7
    assert "Seven ideas" in page


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


@pytest.mark.parametrize("name", PAGES)
def test_modules_and_classes_in_the_text_exist(name):
    dotted = r"(?<![\w:./])moelib(?:\.\w+)+(?::\w+)?"  # A log line begins with "WARNING:".
    for found in set(re.findall(dotted, blocks.text(name))):
        pkgutil.resolve_name(found)
