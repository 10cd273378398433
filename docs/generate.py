"""Rewrites what pages quote from tested files: `python docs/generate.py`, or `make format`.

A test marks a region with `# --8<-- [start:NAME]` and `# --8<-- [end:NAME]`. A page quotes it:

    <!-- from tests/layers/test_external.py:nnx -->
    ```python
    ...the region, after the imports that it needs...
    ```
"""

import ast
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUOTE = re.compile(
    r"^<!-- from (?P<path>\S+):(?P<name>\w+) -->\n(?:```python\n(?P<code>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
REGION = re.compile(
    r"^ *# --8<-- \[start:(?P<name>\w+)\]\n(?P<code>.*?)^ *# --8<-- \[end:(?P=name)\]$",
    re.MULTILINE | re.DOTALL,
)


def pages() -> list[pathlib.Path]:
    """Returns the README and the pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
            kept = ast.ImportFrom(module, names) if isinstance(node, ast.ImportFrom) else node
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


def generated() -> dict[pathlib.Path, str]:
    """Returns the text that each page must have."""
    return {page: with_quotes(page.read_text(encoding="utf-8")) for page in pages()}


if __name__ == "__main__":
    for file, text in generated().items():
        if file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"rewrote {file.relative_to(ROOT)}")
