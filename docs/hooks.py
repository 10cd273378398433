"""Adds to the pages what is not in docs/: commands, reference pages and measurements.

The CLI reference gets a section for each command, each folder of moelib/ and launch.py a reference
page, and `results.md` the text of benchmarks/RESULTS.md.
"""

import pathlib
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = pathlib.Path(__file__).parents[1]


def _reference() -> dict[str, str]:
    """Returns the text of each reference page, by path."""
    packages = (_ROOT / "moelib").glob("*/__init__.py")
    names = sorted([*(path.parent.name for path in packages), "launch"])
    return {f"reference/{name}.md": f"# {name}\n\n::: moelib.{name}\n" for name in names}


def _results() -> str:
    """Returns the text of the measurements."""
    return (_ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the reference pages under Reference."""
    pages = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    pages.extend(page for page in _reference() if page not in pages)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages, which exist in memory only."""
    for path, content in {**_reference(), "results.md": _results()}.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **unused: Any) -> str:
    """Adds the sections of the commands to the CLI reference."""
    del unused
    if page.file.src_uri != "cli.md":
        return markdown
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    from docs import commands

    return f"{markdown}\n{commands.sections()}"
