"""The files of an analysis: numbers as JSON, figures as SVG, and report.md."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moelib.runtime import storage
from moelib.runtime.figures import save_figure
from moelib.runtime.storage import atomic_file, write_json


def write_files(
    folder: str, parts: Mapping[str, tuple[Any, Any]], paragraphs: Sequence[str]
) -> list[str]:
    """Writes the files of an analysis, and returns their paths.

    Args:
        folder: Folder, which is made if it is missing.
        parts: The numbers, of dicts, sequences and arrays, and the figure for NAME.json and
            NAME.svg, by name. Numbers that are not finite become null.
        paragraphs: The parts of report.md in Markdown.
    """
    storage.make_folder(folder)
    page = os.path.join(folder, "report.md")
    paths = []
    for name, (numbers, figure) in parts.items():
        data, image = (os.path.join(folder, f"{name}.{ending}") for ending in ("json", "svg"))
        write_json(data, _plain(numbers), indent=1)
        save_figure(figure, image)
        paths += [data, image]
    with atomic_file(page) as file:
        file.write("\n\n".join(paragraphs) + "\n")
    return [*paths, page]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
