"""The commands on the pages: each has the flags that it uses."""

import importlib
import shlex

import pytest

from docs import generate
from moelib.cli.main import COMMANDS
from moelib.core.command_line import parse_flags
from tests.docs import blocks

PAGES = [page.relative_to(generate.ROOT).as_posix() for page in generate.pages()]
FOUND = [(page, command) for page in PAGES for command in blocks.commands(page)]


@pytest.mark.parametrize(("page", "command"), FOUND, ids=[each for _, each in FOUND])
def test_a_command_has_the_flags_that_it_uses(page, command):
    name, *arguments = shlex.split(command, comments=True)[1:]
    if not name.startswith("-") and not name.isupper():
        flags = importlib.import_module(COMMANDS[name][0]).Flags
        parse_flags(flags, [each for each in arguments if each not in ("...", "--help")])


def test_commands_are_found():
    assert len({page for page, _ in FOUND}) >= 5
