"""Rewrites what pages take from the code: `python -m docs.generate`, or `make format`.

Pages quote regions of tests, which are marked with `# --8<-- [start:NAME]` and
`# --8<-- [end:NAME]`:

    <!-- from tests/layers/test_external.py:nnx -->
    ```python
    ...the region, after the imports that it needs...
    ```

What `moelib launch` prints with --dry_run follows its command:

    <!-- its dry run --> or <!-- the last 4 lines of its dry run -->
"""

import ast
import contextlib
import io
import os
import pathlib
import re
import shlex
import sys
import tempfile
import textwrap
from unittest import mock

from moelib.cli.main import run

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUOTE = re.compile(
    r"^<!-- from (?P<path>\S+):(?P<name>\w+) -->\n(?:```python\n(?P<code>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
REGION = re.compile(
    r"^ *# --8<-- \[start:(?P<name>\w+)\]\n(?P<code>.*?)^ *# --8<-- \[end:(?P=name)\]$",
    re.MULTILINE | re.DOTALL,
)
DRY_RUN = re.compile(
    r"^(?P<head>```bash\n(?P<command>moelib launch (?:(?!```).*\n)+)```\n\n"
    r"<!-- (?:the last (?P<num>\d+) lines? of )?its dry run -->\n)(?:```text\n(?s:.*?)^```\n)?",
    re.MULTILINE,
)
MODEL = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # The first one of README.


def pages() -> list[pathlib.Path]:
    """Returns the README, the measurements and the pages of the documentation."""
    others = [ROOT / "README.md", ROOT / "benchmarks/RESULTS.md"]
    return [*others, *sorted((ROOT / "docs").rglob("*.md"))]


def regions(file: pathlib.Path) -> dict[str, str]:
    """Returns the marked regions of a Python file by name, each after the imports that it needs."""
    text = file.read_text(encoding="utf-8")
    if "--8<--" not in text:
        return {}
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {match["name"]: _with_imports(match["code"], nodes) for match in REGION.finditer(text)}


def _with_imports(code: str, nodes: list[ast.Import | ast.ImportFrom]) -> str:
    """Returns dedented code after those of the imports that it uses."""
    code = textwrap.dedent(code).strip("\n") + "\n"
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    groups: dict[bool, list[str]] = {False: [], True: []}  # Others' imports, and ours.
    for node in nodes:
        names = [each for each in node.names if (each.asname or each.name).split(".")[0] in used]
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        package = module.split(".")[0]
        if names and package != "tests":
            kept = ast.ImportFrom(module, names, 0) if isinstance(node, ast.ImportFrom) else node
            groups[package == "moelib"].append(ast.unparse(kept) + "\n")
    imports = "\n".join("".join(lines) for lines in groups.values() if lines)
    gap = "\n\n" if code.startswith(("class ", "def ", "@")) else "\n"
    return imports + gap + code if imports else code


def with_quotes(page: str) -> str:
    """Returns the text of a page with every quoted region as it is in its file.

    Raises:
        KeyError: If a file has no such region.
    """

    def quote(match: re.Match[str]) -> str:
        code = regions(ROOT / match["path"])[match["name"]]
        return f"<!-- from {match['path']}:{match['name']} -->\n```python\n{code}```\n"

    return QUOTE.sub(quote, page)


# -- Jobs ----------------------------------------------------------------------------------------


def with_dry_runs(page: str) -> str:
    """Returns the text of a page with what its jobs print."""

    def show(match: re.Match[str]) -> str:
        lines = dry_run(match["command"]).splitlines(keepends=True)
        return f"{match['head']}```text\n{''.join(lines[-int(match['num'] or 0) :])}```\n"

    return DRY_RUN.sub(show, page)


def dry_run(command: str) -> str:
    """Returns what `moelib launch` prints with --dry_run, for the model of the README."""
    model = MODEL.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    arguments = shlex.split(command.replace("\\\n", " "))[1:]
    path, module = list(sys.path), sys.modules.pop("my_model", None)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        pathlib.Path("my_model.py").write_text(model, encoding="utf-8")
        assert run([*arguments, "--dry_run"]) == 0, command
        package, here = os.path.relpath(ROOT / "cloud"), os.getcwd()
    sys.path[:] = path
    sys.modules.pop("my_model", None)
    if module is not None:
        sys.modules["my_model"] = module
    texts = {package: "moelib_cloud", here: "/home/me", sys.executable: "python"}
    printed = out.getvalue()
    for found, shown in texts.items():
        printed = printed.replace(found, shown)
    return printed


# -- Pages ---------------------------------------------------------------------------------------


def generated(page: pathlib.Path) -> str:
    """Returns the text that a page must have."""
    return with_dry_runs(with_quotes(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    for page in pages():
        if page.read_text(encoding="utf-8") != (text := generated(page)):
            page.write_text(text, encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")
