"""The tutorial: its config builds, and its page runs from the top in an empty folder."""

import importlib
import re
import shlex
import sys

import pytest

from moelib.cli.main import COMMANDS
from moelib.runtime.command_line import parse_flags
from tests.docs import blocks

PAGE = "docs/tutorial.md"
_VARYING = {"h", "kB", "MB", "min", "ms", "s"}  # Units that depend on the size of a number.


def words(line):
    return set(re.findall(r"[A-Za-z_][\w/]*", re.sub(r"\d\S*", "", line))) - _VARYING


@pytest.fixture
def imports(monkeypatch):
    """Forgets the modules of the page after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_model", None)


def test_the_config_builds_as_every_command_changes_it(tmp_path, monkeypatch, imports):
    blocks.write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    found = [shlex.split(each) for each in blocks.commands(PAGE) if "--config=small" in each]
    for _, name, *arguments in found:
        flags = importlib.import_module(COMMANDS[name][0]).Flags
        cfg = parse_flags(flags, arguments)[0].load()
        trainer = cfg.clone(dir="unused").instantiate(parent=None)
        assert set(trainer.trainer_state_specs.model) >= {"embedding", "decoder", "lm_head"}
        if "--data_dir=data" in arguments:
            assert cfg.input.source.path == str(tmp_path / "data/text")
    assert {name for _, name, *_ in found} == {"config", "train", "plan", "verify"}


@pytest.mark.slow
def test_the_page_runs_from_the_top(tmp_path):
    """Runs every block. Each line of output on the page has words of one line that was printed.

    A block with a title is a file or an example. Columns of a table may be omitted.
    """
    blocks.write_files(PAGE, tmp_path)
    output = ""
    for block in blocks.blocks(PAGE):
        if block.language in ("bash", "python") and not block.title:
            output = blocks.run(block, tmp_path)
        elif block.language == "text" and not block.title:
            printed = [words(line) for line in output.splitlines()]
            lines = [line for line in block.text.splitlines() if line != "..."]
            assert [line for line in lines if not any(map(words(line).issubset, printed))] == []
