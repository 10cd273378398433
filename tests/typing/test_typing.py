"""Configs and the public functions as type checkers, and so editors, see them."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_HERE = pathlib.Path(__file__).parent
_BIN = pathlib.Path(sys.executable).parent


def run(folder: pathlib.Path, *command: str) -> str:
    """Returns the output of a type checker in a folder."""
    program, *args = command
    checked = subprocess.run(
        [_BIN / program, *args], cwd=folder, capture_output=True, text=True, check=False
    )
    return checked.stdout + checked.stderr


def by_pyrefly(folder: pathlib.Path) -> list[tuple[str, int, str]]:
    """Returns (file, line, rule) of the errors that pyrefly finds in two files."""
    settings = f'python-interpreter-path = "{sys.executable}"\nsearch-path = ["{_ROOT}"]\n'
    (folder / "pyrefly.toml").write_text(settings)
    output = run(folder, "pyrefly", "check", "--output-format=min-text", "right.py", "wrong.py")
    found = re.findall(r"ERROR (\S+?):(\d+):.*\[([\w-]+)\]", output)
    return [(name, int(line), rule) for name, line, rule in found]


def by_pyright(folder: pathlib.Path) -> list[tuple[str, int, str]]:
    """Returns the same for pyright, the type checker of VS Code."""
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(_ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    output = run(folder, "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    errors = [x for x in json.loads(output)["generalDiagnostics"] if x["severity"] == "error"]
    return [
        (pathlib.Path(x["file"]).name, x["range"]["start"]["line"] + 1, x["rule"]) for x in errors
    ]


@pytest.mark.parametrize(("checker", "rule"), [(by_pyrefly, 0), (by_pyright, 1)])
def test_mistakes_are_found_and_nothing_else(tmp_path, checker, rule):
    for name in ("right.py", "wrong.py"):
        (tmp_path / name).write_text((_HERE / name).read_text())
    lines = enumerate((_HERE / "wrong.py").read_text().splitlines(), 1)
    rules = [(i, line.split("# ")[1].split(", ")) for i, line in lines if "# " in line]
    assert checker(tmp_path) == [("wrong.py", i, both[rule]) for i, both in rules]
