"""The files of the current folder that a job sends to other machines.

In a Git repository they are those that Git tracks or does not ignore, otherwise all. Files that
often hold secrets are never sent, nor are outputs of runs and environments.
"""

import collections
import dataclasses
import fnmatch
import os
import re
import subprocess
from collections.abc import Iterator, Sequence

from moelib.core.errors import UserError
from moelib.runtime.table import Table

_OUTPUTS = "runs", "jobs", "tmp"  # Of the current folder.
# Names of files and folders at any depth; docker/Dockerfile.dockerignore has them, too.
EXCLUDED = (
    *(".git", ".venv", "venv", "__pycache__", ".cache"),
    *(".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ecdsa*", "id_ed25519*"),
    *(".ssh", ".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".huggingface"),
    *(".netrc", "_netrc", ".pypirc", ".npmrc", ".boto", ".s3cfg", ".pgpass", ".git-credentials"),
    *("kaggle.json", "credentials.json", "application_default_credentials.json"),
)
_EXCLUDED = re.compile("|".join(map(fnmatch.translate, EXCLUDED)))
_KEY = re.compile(rb'"(private_key|refresh_token)"\s*:')  # In a key of a service account or user.
_KEY_BYTES = 2**16  # Of a JSON file in which a key is looked for.


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Files of the current folder."""

    files: tuple[str, ...]  # Paths that are sent, sorted.
    excluded: tuple[str, ...]  # Paths that may hold secrets, or that are outputs.
    from_git: bool  # Whether Git selected the files.

    def table(self, url: str) -> Table:
        """Returns what is sent to a URL: files and bytes by entry of the folder."""
        sums = collections.defaultdict[str, list[int]](lambda: [0, 0])
        for path in self.files:
            entry, slash, _ = path.partition("/")
            sums[entry + slash][0] += 1
            sums[entry + slash][1] += os.lstat(path).st_size
        rows = [(entry, f"{num:,}", f"{size / 1e6:,.2f}") for entry, (num, size) in sums.items()]
        origin = "that Git does not ignore" if self.from_git else "of a folder without Git"
        notes = [f"Not sent: {', '.join(self.excluded)}."] if self.excluded else []
        return Table(f"Files {origin}, sent to {url}", ("entry", "files>", "MB>"), rows, notes)


def bundle(folder: str, required: Sequence[str] = ()) -> Bundle:
    """Returns the files of the current folder that are sent.

    Args:
        folder: Folder of the job, which is not sent.
        required: Paths that are sent even if Git ignores them.

    Raises:
        UserError: If the name of a file has a line break or a backslash, which tar misreads.
    """
    found = _of_git(".")
    paths = set(_all(".") if found is None else found)
    own = os.path.relpath(folder).split(os.sep)
    outputs = {path for path in paths if path.split("/")[: len(own)] == own}
    outputs |= {path for path in paths if path.partition("/")[0] in _OUTPUTS}
    secret = {path for path in paths - outputs if _may_hold_secrets(path)}
    sent = (paths - outputs - secret) | {os.path.normpath(path) for path in required}
    for path in sent:
        if re.search(r"[\n\\]", path):
            raise UserError(f"file {path!r}: rename it, without line breaks and backslashes.")
    entries = {path.partition("/")[0] for path in outputs}
    return Bundle(tuple(sorted(sent)), tuple(sorted(secret | entries)), found is not None)


def _may_hold_secrets(path: str) -> bool:
    return any(_EXCLUDED.match(name) for name in path.split("/")) or _is_key(path)


def _is_key(path: str) -> bool:
    if not path.endswith(".json") or not os.path.isfile(path) or os.path.islink(path):
        return False
    with open(path, "rb") as file:
        return _KEY.search(file.read(_KEY_BYTES)) is not None


def check_image_context() -> None:
    """Raises UserError if an image of the current folder would hold the key of an account."""
    for path in _all("."):
        if path not in _OUTPUTS and not _EXCLUDED.match(os.path.basename(path)) and _is_key(path):
            raise UserError(f"{path} is a key of an account; move it out of the current folder.")


def _all(folder: str) -> Iterator[str]:
    """Yields the files at or below a folder; of excluded folders and outputs the path alone."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = os.path.normpath(entry.path)
            is_named_only = path in _OUTPUTS or _EXCLUDED.match(entry.name)
            if entry.is_dir(follow_symlinks=False) and not is_named_only:
                yield from _all(path)
            else:
                yield path


def _of_git(folder: str) -> Iterator[str] | None:
    """Returns the files of a folder that Git tracks or does not ignore; None without Git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return _files_of_git(folder, os.fsdecode(done.stdout).split("\0"))


def _files_of_git(folder: str, names: Sequence[str]) -> Iterator[str]:
    for name in filter(None, names):
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.isdir(path) and not os.path.islink(path):  # Another repository, or a submodule.
            if os.path.exists(os.path.join(path, ".git")):
                found = _of_git(path)
                yield from _all(path) if found is None else found
        elif os.path.lexists(path):  # A tracked file may be deleted.
            yield path
