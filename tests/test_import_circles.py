"""Imports inside each folder of the library go one way."""

import ast
import collections
import pathlib
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[1] / "moelib"

Name = tuple[str, ...]
Graph = dict[str, set[str]]


def _module(path: pathlib.Path) -> Name:
    parts = path.relative_to(_ROOT.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(text: str, modules: dict[Name, str]) -> Iterator[Name]:
    """Yields the modules that a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = (*(node.module or "").split("."), alias.name)
                yield name if name in modules else name[:-1]


def _graphs(modules: dict[Name, str]) -> dict[Name, Graph]:
    """Returns for each folder which of its files and folders imports which other."""
    graphs: dict[Name, Graph] = collections.defaultdict(lambda: collections.defaultdict(set))
    for name, text in modules.items():
        for other in _imports(text, modules):
            if other == name or other not in modules:
                continue
            pairs = enumerate(zip((*name, "__init__"), (*other, "__init__"), strict=False))
            depth, (own, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            if (own, depth) != ("__init__", 1):  # moelib/__init__.py is the public API of them all.
                graphs[name[:depth]][own].add(theirs)
    return graphs


def _circle(graph: Graph) -> set[str]:
    """Returns the nodes that reach themselves."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        queue = [start]
        while queue:
            new = graph.get(queue.pop(), set()) - found
            found |= new
            queue += new
        return found

    return {node for node in graph if node in reached(node)}


def _circles(modules: dict[Name, str]) -> dict[str, set[str]]:
    found = {"/".join(folder): _circle(graph) for folder, graph in _graphs(modules).items()}
    return {folder: names for folder, names in found.items() if names}


def test_no_two_files_or_folders_of_one_folder_import_each_other():
    modules = {_module(path): path.read_text() for path in _ROOT.rglob("*.py")}
    assert len(modules) > 100
    assert _circles(modules) == {}


@pytest.mark.parametrize(
    ("texts", "circles"),
    [
        ({"a": "import moelib.f.b", "b": "import moelib.f.c", "c": ""}, {}),
        ({"a": "import moelib.f.b", "b": "def g():\n  from moelib.f import a"}, {"a", "b"}),
        (
            {"a": "if 1:\n  from moelib.f.b.x import y", "b/x": "from moelib.f.a import z"},
            {"a", "b"},
        ),
        (
            {"__init__": "from moelib.f.a import x", "a": "from moelib.f import y"},
            {"__init__", "a"},
        ),
    ],
)
def test_circles_are_found(texts, circles):
    modules = {_module(_ROOT / "f" / f"{name}.py"): text for name, text in texts.items()}
    assert _circles(modules) == ({"moelib/f": circles} if circles else {})
