"""A run's folder of someone else: commands that read it run no code that it names."""

import dataclasses
import json
import shutil
import sys

import pytest

from moelib import launch
from moelib.checkpoint.contents import CheckpointRecord
from moelib.cli import main
from moelib.core import trusted_code
from tests import tiny

OWN_MODULE = """
from tests import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("unset", max_step=1, evaler=False)}
"""
LINES = [  # Lines of a config.txt that would write the file "ran" if they were believed.
    "dir: <os:system>\ndir.command: 'touch ran'",
    "dir: <subprocess:Popen>\ndir.args: ['touch', 'ran']",
    "dir.fn: os:system\ndir.command: 'touch ran'",
    "dir.cls: subprocess:Popen\ndir.args: ['touch', 'ran']",
    "dir.klass: subprocess:Popen",
    "dir.config_class: hostile:Touch",
    "dir: hostile:x",
    "dir: run.hostile:x",
    "dir: <moelib.runtime.storage:os.system>\ndir.command: 'touch ran'",
    "dir.fn: moelib.core.config_types:resolve_reference\ndir.text: 'os:system'",
    "dir.fn: moelib.runtime.storage:write_json\ndir.path: 'ran'\ndir.value: 1",
    "dir: <builtins:exec>\ndir.source: 'import hostile'",
    "dir.fn: optax:adamw.__globals__.keys",
    "dir.fn: jax.numpy:load\ndir.file: 'ran'",
]
WATCHER = "watchers.x: <os:system>\nwatchers.x.command: 'touch ran'"  # `watchers` is {} above.
COMMANDS = {
    "generate": ["--prompt=x"],
    "evaluate": ["--tasks=arc"],
    "convert": ["--to_hf=out"],
    "train": ["--module=mine", "--config=tiny"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny.trainer_config(folder, max_step=1, evaler=False).instantiate(parent=None).run()
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """The folder of a run, from which modules can be imported, as from the current folder."""
    shutil.copytree(trained, tmp_path / "run")
    touch = "import pathlib; pathlib.Path('ran').touch()"
    for path in (tmp_path, tmp_path / "run"):
        (path / "hostile.py").write_text(touch)
    (tmp_path / "mine.py").write_text(OWN_MODULE)
    (tmp_path / "run/run.json").write_text(json.dumps({"module_dirs": [str(tmp_path)]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(trusted_code, "_modules", set())
    yield tmp_path / "run"
    for name in ("hostile", "mine"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        *(("generate", lines) for lines in LINES),
        *((command, LINES[0]) for command in COMMANDS if command != "generate"),
        ("train", WATCHER),
    ],
    ids=lambda value: value.split("\n")[0],
)
def test_code_that_a_run_names_is_refused_and_not_run(command, lines, folder, capsys):
    text = (folder / "config.txt").read_text()
    kept = [line for line in text.splitlines() if not line.startswith("dir")]
    (folder / "config.txt").write_text("\n".join([*kept, lines, ""]))
    before = set(sys.modules)
    status = main.run([command, f"--trainer_dir={folder}", *COMMANDS[command]])
    (line,) = capsys.readouterr().err.splitlines()
    named = lines.split(": ")[1].split("\n")[0].strip("<>")
    assert status == 2
    assert f"config.txt:{len(kept) + 1}" in line
    assert named in line
    assert "--module" in line or "standard library" in line
    assert not (folder.parent / "ran").exists()
    assert "hostile" not in set(sys.modules) - before


@pytest.mark.parametrize("edited", ["config.txt", "record", "both"])
def test_a_watcher_of_another_module_stops_no_generation_and_is_not_run(edited, folder, capsys):
    path = str(folder / "checkpoints/step_00000001")
    record = CheckpointRecord.read(path)
    text = f"{record.config}\n{WATCHER}\n"
    if edited != "config.txt":
        dataclasses.replace(record, config=text).write(path)
    if edited != "record":
        (folder / "config.txt").write_text(text)
    assert main.run(["generate", f"--trainer_dir={folder}", "--prompt=x"]) == 2
    assert "SyntheticTokens" in capsys.readouterr().err  # It has no tokenizer.
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("kind", ["binary", "folder", "unknown module"])
def test_a_file_that_is_not_used_stops_no_command(kind, folder, caplog, capsys):
    file = folder / "config.txt"
    text = file.read_text()
    if kind == "unknown module":
        file.write_text(f"{text}model.own: gone.away:Layer\n")
    elif kind == "binary":
        file.write_bytes(text.encode() + b"\xff")
    else:
        file.unlink()
        file.mkdir()
    run = [f"--trainer_dir={folder}"]
    assert main.run(["generate", *run, "--prompt=x"]) == 2
    assert "SyntheticTokens" in capsys.readouterr().err  # It has no tokenizer.
    assert str(file) in caplog.text
    caplog.clear()
    status = main.run(["train", *run, *COMMANDS["train"]])
    assert str(file) in caplog.text
    if kind == "folder":  # Which the file that train writes cannot replace.
        assert f"moelib train: {file}: Is a directory" in capsys.readouterr().err
    else:
        assert (status, file.read_text().count("gone.away")) == (0, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_code_that_a_checkpoint_names_is_refused(command, folder, capsys):
    path = str(folder / "checkpoints/step_00000001")
    record = CheckpointRecord.read(path)
    kept = [line for line in record.config.splitlines() if not line.startswith("dir")]
    text = "\n".join([*kept, "dir.fn: os:system", ""])
    dataclasses.replace(record, config=text).write(path)
    assert main.run([command, f"--trainer_dir={folder}", *COMMANDS[command]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "record of step 1" in line
    assert "os:system" in line


def test_own_modules_are_allowed_by_flag(folder, capsys):
    text = (folder / "config.txt").read_text()
    assert "tests.tiny:TinyModel" in text
    (folder.parent / "own_model.py").write_text(
        "from tests.tiny import *\nclass Own(TinyModel): pass"
    )
    (folder / "config.txt").write_text(text.replace("tests.tiny:TinyModel", "own_model:Own"))
    run = [f"--trainer_dir={folder}", "--prompt=x"]
    try:
        assert main.run(["generate", *run]) == 2
        error = capsys.readouterr().err
        assert "'own_model'" in error
        assert "--module=own_model" in error
        assert str(folder.parent) in error  # Where the run says that it imported its modules from.
        for flag in ("--module=own_model", f"--module_dir={folder.parent}"):
            main.run(["generate", *run, flag])
            assert "own_model" not in capsys.readouterr().err  # It fails for want of a tokenizer.
            sys.modules.pop("own_model")
            trusted_code._modules.clear()
            trusted_code._folders.clear()
    finally:
        sys.modules.pop("own_model", None)


def test_config_modules_of_the_users_module_are_allowed(folder):
    path = folder.parent / "mine.py"
    path.write_text(f"{OWN_MODULE}\nCONFIG_MODULES = ('collections',)\n")
    with pytest.raises(trusted_code.UntrustedNameError, match="collections:deque"):
        trusted_code.resolve("collections:deque")
    launch.import_module("mine")
    assert trusted_code.resolve("collections:deque").__name__ == "deque"
    with pytest.raises(trusted_code.UntrustedNameError, match="os:system"):
        trusted_code.resolve("os:system")
