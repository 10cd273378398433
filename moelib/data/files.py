"""Documents in text files, one a file; and how files are found and shared out.

Parts are made of whole small files, or of pieces of large ones, so that many processes share the
work whatever the files' sizes.
"""

import dataclasses
import glob
import io
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence

from moelib.core.config import REQUIRED, config_class
from moelib.data.source import BadRecords, Part, Source

# Text in a part: enough to keep a worker busy for a while, little enough to share evenly.
_MIN_PART_BYTES = 1 << 19
_MAX_PART_BYTES = 1 << 28
_PARTS_PER_SOURCE = 64

# How much larger text is than its file, for estimates.
EXPANSION = {".gz": 4, ".zst": 5, ".zstd": 5, ".parquet": 3}


# A file that each token store has; folders with it hold no text.
STORE_MARK = "moelib_prepare.json"


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """A file as it was when the source listed it."""

    path: str
    num_bytes: int
    modified_ns: int

    @property
    def num_text_bytes(self) -> int:
        """Estimated bytes once unpacked."""
        return self.num_bytes * EXPANSION.get(os.path.splitext(self.path)[1], 1)


def find_files(paths: Sequence[str], endings: tuple[str, ...]) -> list[FileStamp]:
    """Returns the files that paths name, in the order of paths and sorted within each.

    Args:
        paths: Files, glob patterns (`**` for any depth), or folders, which are searched through.
        endings: What a file's name must end with to be taken from a folder.

    Raises:
        FileNotFoundError: If a path matches no file.
        ValueError: If no path is given.
    """
    if not paths:
        raise ValueError("No paths are given; set paths to files, folders or glob patterns.")
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            walk = sorted(walk_files(path, endings))
        elif os.path.isfile(path):
            walk = [path]
        else:
            walk = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
        if not walk:
            wanted = f" with files ending in {', '.join(endings)}" if os.path.isdir(path) else ""
            raise FileNotFoundError(
                f"{path} matches no file; set paths to a file, a folder{wanted} or a pattern."
            )
        found |= dict.fromkeys(walk)
    return [stamp(path) for path in found]


def walk_files(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yields the files at any depth of a folder whose names end so, but not of token stores."""
    for parent, folders, names in os.walk(folder):
        if STORE_MARK in names:
            folders.clear()  # A token store that was put beside its texts.
            continue
        yield from (os.path.join(parent, name) for name in names if name.endswith(endings))


def stamp(path: str) -> FileStamp:
    """Returns a file as it is now."""
    info = os.stat(path)
    return FileStamp(path, info.st_size, info.st_mtime_ns)


def part_size(files: Sequence[FileStamp]) -> int:
    """Returns the bytes of text that a part of these files should hold."""
    total = sum(file.num_text_bytes for file in files)
    return min(max(total // _PARTS_PER_SOURCE, _MIN_PART_BYTES), _MAX_PART_BYTES)


def group_files(files: Sequence[FileStamp], num_bytes: int) -> list[tuple[FileStamp, ...]]:
    """Returns the files in groups of consecutive ones, each some `num_bytes` or a single file."""
    groups: list[tuple[FileStamp, ...]] = []
    group: list[FileStamp] = []
    size = 0
    for file in files:
        if group and size + file.num_text_bytes > num_bytes:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(file)
        size += file.num_text_bytes
    return [*groups, tuple(group)]


# -- Text ----------------------------------------------------------------------------------------


def _decode_utf8(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert the "
            "file, or leave it out of paths."
        ) from None


def _decode_python(path: str, data: bytes) -> str:
    """Decodes as the file itself says (PEP 263), and as Latin-1, which takes all, if it lies."""
    del path
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("latin-1")


@dataclasses.dataclass(frozen=True)
class TextFilesPart:
    """Files that are a document each, or several."""

    files: tuple[FileStamp, ...]
    encoding: str = "utf-8"  # Or "python": what the source file declares.
    max_document_chars: int | None = None  # Longer texts are cut.

    @property
    def name(self) -> str:
        """The first file, and how many follow."""
        more = len(self.files) - 1
        return self.files[0].path + (f" and {more} more" if more else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.num_bytes for file in self.files)

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields each file's text, line ends as they are in the file; long ones in pieces."""
        del bad_records
        decode: Callable[[str, bytes], str] = (
            _decode_python if self.encoding == "python" else _decode_utf8
        )
        for file in self.files:
            with open(file.path, "rb") as opened:
                text = decode(file.path, opened.read())
            yield from _pieces(text, self.max_document_chars or len(text))


def _pieces(text: str, most: int) -> Iterator[str]:
    """Yields the text in pieces of at most so many characters, cut behind line ends if it can."""
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield text[start:end]
        start = end
    yield text[start:]


class TextFiles(Source):
    """Text files, a document each; from a folder, those ending in `endings`.

    A split is made of whole documents, so a few large files need `max_document_chars`.
    """

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        endings: Sequence[str] = (".txt", ".md", ".rst")
        max_document_chars: int | None = None  # Longer files are cut, behind a line's end.

    def parts(self) -> Sequence[Part]:
        """Returns the files in groups. Raises ValueError if `max_document_chars` is below 1."""
        cfg = self.config
        if cfg.max_document_chars is not None and cfg.max_document_chars < 1:
            raise ValueError(f"max_document_chars is {cfg.max_document_chars}; set 1 or more.")
        files = find_files(cfg.paths, tuple(cfg.endings))
        groups = group_files(files, part_size(files))
        return [TextFilesPart(group, "utf-8", cfg.max_document_chars) for group in groups]


class PythonSourceCode(Source):
    """The Python standard library's own sources on this machine: text that is always there.

    A document is a file. Installed packages and caches are left out; the library's tests, where
    the installation has them, are most of the volume: some 30 MB in all.
    """

    @config_class
    class Config(Source.Config):
        path: str | None = None  # The library's folder; None asks the running interpreter.

    def parts(self) -> Sequence[Part]:
        """Returns the .py files in groups. Raises FileNotFoundError if there are none."""
        root = self.config.path or sysconfig.get_path("stdlib")
        left_out = {"site-packages", "dist-packages", "__pycache__"}
        files = []
        for parent, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - left_out)
            files += [os.path.join(parent, name) for name in sorted(names) if name.endswith(".py")]
        if not files:
            raise FileNotFoundError(
                f"{root} has no Python sources; set path to a folder that has, or use TextFiles."
            )
        stamps = [stamp(path) for path in files]
        return [TextFilesPart(group, "python") for group in group_files(stamps, part_size(stamps))]
