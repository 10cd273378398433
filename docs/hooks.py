"""Adds a reference page for each folder of moelib/, and for launch.py."""

import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PACKAGE = pathlib.Path(__file__).parents[1] / "moelib"


def _pages() -> dict[str, str]:
    """Returns the text of each page, by path."""
    names = sorted([*(path.parent.name for path in _PACKAGE.glob("*/__init__.py")), "launch"])
    return {f"reference/{name}.md": f"# {name}\n\n::: moelib.{name}\n" for name in names}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the pages under Reference."""
    reference = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    reference.extend(page for page in _pages() if page not in reference)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages, which exist in memory only."""
    for path, content in _pages().items():
        files.append(File.generated(config, path, content=content))
    return files
