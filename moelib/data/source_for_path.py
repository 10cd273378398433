"""The source that fits the files at a path."""

import os

from moelib.data.files import TextFiles, walk_files
from moelib.data.json_lines import ENDINGS, JsonLines
from moelib.data.parquet import Parquet
from moelib.data.source import Source


def source_for_path(path: str, *, text_field: str = "text") -> Source.Config:
    """Returns the config of a source that fits what lies at a path, judged by names of files.

    Args:
        path: A file, or a folder that holds files of one kind: JSON lines, Parquet or text.
        text_field: The field or column of a record that holds the document.

    Raises:
        FileNotFoundError: If there is no file of a known kind.
        ValueError: If a folder holds several kinds.
    """
    kinds = {
        "JSON lines": ENDINGS,
        "Parquet": (".parquet",),
        "text": tuple(TextFiles.default_config().endings),
    }
    names = list(walk_files(path, ("",))) if os.path.isdir(path) else [path]
    found = [kind for kind, ends in kinds.items() if any(name.endswith(ends) for name in names)]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds files of several kinds ({', '.join(found)}); name one kind with a "
            "pattern such as folder/**/*.jsonl, or make a source of each."
        )
    if found == ["JSON lines"]:
        return JsonLines.default_config().set(paths=[path], text_field=text_field)
    if found == ["Parquet"]:
        return Parquet.default_config().set(paths=[path], column=text_field)
    if found == ["text"] or os.path.isfile(path):
        return TextFiles.default_config().set(paths=[path])
    known = ", ".join(ending for ends in kinds.values() for ending in ends)
    raise FileNotFoundError(f"{path} holds no file of a known kind; files may end in {known}.")
