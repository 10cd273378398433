"""The source that fits the files at a path."""

import glob
import os

from moelib.core.errors import MissingFileError, UserError
from moelib.data.sources import delimited
from moelib.data.sources.files import TextFiles, walk_files
from moelib.data.sources.json_lines import ENDINGS, JsonLines
from moelib.data.sources.source import Source
from moelib.data.sources.tables import ARROW, PARQUET, Tables

# Files of `datasets` next to its tables, which hold no text.
_JSON_OF_DATASETS = ("dataset_dict.json", "dataset_info.json", "state.json")


def source_for_path(path: str, *, text_field: str | None = "text") -> Source.Config:
    """Returns the config of a source for a path, chosen by the names of the files there.

    Args:
        path: A file, a pattern, or a folder with files of one kind: JSON lines, CSV or TSV,
            Parquet, Arrow (a `Dataset` saved by `datasets`) or text.
        text_field: The field or column of a record that holds the document; None: the whole.

    Raises:
        MissingFileError: If there is no file of a known kind.
        UserError: If a folder holds several kinds, or a dataset of several splits.
    """
    if os.path.exists(os.path.join(path, "dataset_dict.json")):
        splits = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
        raise UserError(
            f"{path} is a DatasetDict with splits {splits}; name the folder of one of them."
        )
    kinds = {
        "JSON lines": ENDINGS,
        "CSV or TSV": delimited.ENDINGS,
        "Parquet": (PARQUET,),
        "Arrow": (ARROW,),
        "text": tuple(TextFiles.default_config().endings),
    }
    if os.path.isdir(path):
        names = list(walk_files(path, ("",)))
    else:
        names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    names = [name.lower() for name in names]
    if any(name.endswith(ARROW) for name in names):
        names = [name for name in names if os.path.basename(name) not in _JSON_OF_DATASETS]
    found = [kind for kind, ends in kinds.items() if any(name.endswith(ends) for name in names)]
    if len(found) > 1:
        raise UserError(
            f"{path} holds files of several kinds ({', '.join(found)}); select one kind with a "
            "pattern such as folder/**/*.jsonl, or define a source for each."
        )
    if found == ["JSON lines"]:
        return JsonLines.default_config().set(paths=[path], text_field=text_field)
    if found in (["Parquet"], ["Arrow"]):
        return Tables.default_config().set(paths=[path], column=text_field)
    if found == ["CSV or TSV"]:
        return delimited.Delimited.default_config().set(paths=[path], column=text_field)
    if found == ["text"] or os.path.isfile(path):
        return TextFiles.default_config().set(paths=[path])
    if not names and not os.path.isdir(path):
        raise MissingFileError(
            f"{path} does not exist; name a file, a folder or a pattern of text."
        )
    known = ", ".join(ending for ends in kinds.values() for ending in ends)
    raise MissingFileError(f"{path} holds no file of a known kind; files may end in {known}.")
