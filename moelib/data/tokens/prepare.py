"""Preparing: tokenizes a source into a token store, with many processes of many machines."""

import errno
import functools
import os
import shutil
from collections.abc import Mapping, Sequence

import numpy as np

from moelib.core.errors import UserError
from moelib.data.sources.files import STORE_MARK, files_of
from moelib.data.sources.source import BadRecords, Part, Source
from moelib.data.tokens import token_store
from moelib.data.tokens.chat.labels import ChatOptions
from moelib.data.tokens.preparation import (
    Preparation,
    do_part,
    finish_store,
    join_parts,
    log,
    plan_store,
    unfinished_store,
    write_plan,
)
from moelib.data.tokens.prepare_part import DiskFullError, part_file
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.data.tokens.workers import in_processes
from moelib.runtime.lock import DirectoryInUseError
from moelib.runtime.progress import Progress, format_bytes

_SAMPLE_BYTES = 1 << 18  # Text whose tokens are counted to estimate the size of the store.


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    output_dir: str,
    *,
    num_processes: int = 1,
    append_eos: bool = True,
    prepend_bos: bool = False,
    skip_bad_records: bool = False,
    accept_lossy_tokenizer: bool = False,
    chat: ChatOptions | None = None,
    splits: Mapping[str, float] | None = None,
    split_seed: int = 0,
) -> TokenStore:
    """Returns the token store of a source, made now unless output_dir already holds it.

    A store is recognized by its settings and the `fingerprint` of the source.

    A program that calls this with several processes needs `if __name__ == "__main__":`, because
    they are spawned.

    Args:
        source: The documents. Empty ones are skipped and counted. Those of more than 4 million
            characters are divided after line ends, and counted too.
        tokenizer: The tokenizer.
        output_dir: Folder of the store; `<output_dir>.partial` is used while working.
        num_processes: Worker processes; 1 works in this process.
        append_eos: Whether each document ends with the end-of-text token.
        prepend_bos: Whether each document begins with the tokenizer's BOS.
        skip_bad_records: Whether records without a document are counted rather than errors.
        accept_lossy_tokenizer: Whether the ids may lack more than 1 % of the text, such as unknown
            characters, or capitals that a normalizer replaces.
        chat: Settings of conversations: the source gives records as JSON objects, the template
            writes BOS and ends, and only answers are labels. None for text.
        splits: Fraction of documents in each split; all are in "train" if None.
        split_seed: Seed that assigns documents to splits.

    Returns:
        The store, with all its documents.

    Raises:
        ExistingFileError: If output_dir holds another store, or something else, or
            `<output_dir>.partial` something that was not made here.
        DirectoryInUseError: If another process prepares the same store.
        DiskFullError: If the disk is too small, or becomes full; finished parts are kept.
        UserError: If the source is empty or broken, a split's fraction is wrong, or the tokenizer
            loses too much of the text; finished parts are kept.
    """
    preparation = plan_store(
        source,
        tokenizer,
        output_dir,
        append_eos=append_eos,
        prepend_bos=prepend_bos,
        skip_bad_records=skip_bad_records,
        chat=chat,
        splits=splits,
        split_seed=split_seed,
    )
    _check_num_processes(num_processes)
    with unfinished_store(preparation, shared=False) as unfinished:
        if unfinished:
            write_plan(preparation, tokenizer, start_over=True)
            _make_parts(preparation, range(len(preparation.parts)), tokenizer, num_processes)
            join_parts(preparation, tokenizer, accept_lossy_tokenizer)
    if not unfinished:
        _report_finished(preparation)
    return finish_store(preparation)


def prepare_share(
    preparation: Preparation,
    tokenizer: Tokenizer,
    share: tuple[int, int],
    *,
    num_processes: int = 1,
    accept_lossy_tokenizer: bool = False,
) -> TokenStore | None:
    """Returns the token store if this share of its parts was the last one, or None.

    The shares of a store may run at once, on machines that see its folder, or one after another;
    the first begins the store. A share that failed continues when it is run again.

    Args:
        preparation: The store, equal in all shares.
        tokenizer: The tokenizer, equal in all shares.
        share: Index of the share, and number of shares.
        num_processes: Worker processes; 1 works in this process.
        accept_lossy_tokenizer: Whether the ids may lack more than 1 % of the text.

    Raises:
        ExistingFileError: If the store was begun with other settings.
        UserError: As `prepare` does.
    """
    index, count = share
    if not 0 <= index < count:
        raise UserError(f"share={share}: set an index of 0 or more, below the number of shares.")
    _check_num_processes(num_processes)
    parts = preparation.parts
    # Parts of equal sizes are dealt in turn, so that shares have about equal work.
    order = sorted(range(len(parts)), key=lambda i: -parts[i].num_bytes)
    left: list[int] = []
    with unfinished_store(preparation, shared=True) as unfinished:
        if unfinished:
            write_plan(preparation, tokenizer, start_over=False)
            _make_parts(preparation, order[index::count], tokenizer, num_processes)
            left = _unmade(preparation, range(len(parts)))
    if not unfinished:
        _report_finished(preparation)
    if left:
        log(f"share {index + 1}/{count} is finished; {len(left)} of {len(parts)} parts are left.")
        return None
    try:
        return finish_store(preparation, accept_lossy_tokenizer=accept_lossy_tokenizer)
    except DirectoryInUseError:
        log(f"share {index + 1}/{count} is finished; the last process joins all parts.")
        return None


def _check_num_processes(num_processes: int) -> None:
    if num_processes < 1:
        raise UserError(f"num_processes={num_processes}: set 1 or more.")


def _report_finished(preparation: Preparation) -> None:
    """Reports a store that was found, and the files that were modified since."""
    output_dir = preparation.output_dir
    log(f"{output_dir} is prepared already.")
    made = os.stat(os.path.join(output_dir, STORE_MARK)).st_mtime_ns
    files = [file for part in preparation.parts for file in files_of(part)]
    later = [file.path for file in files if file.modified_ns > made]
    if later:
        log(
            f"{len(later)} files, such as {later[0]}, were modified since; delete the folder "
            "to prepare it again if their text has changed."
        )


def _unmade(preparation: Preparation, indices: Sequence[int]) -> list[int]:
    """Returns those of some parts that have no result."""
    folder = preparation.folder
    return [i for i in indices if not os.path.exists(part_file(folder, i, "json"))]


def _make_parts(
    preparation: Preparation, indices: Sequence[int], tokenizer: Tokenizer, num_processes: int
) -> None:
    """Tokenizes those of some parts that are not finished, the largest first."""
    parts, folder = preparation.parts, preparation.folder
    todo = sorted(indices, key=lambda i: -parts[i].num_bytes)
    left = _unmade(preparation, todo)
    if len(left) < len(todo):
        log(f"{len(todo) - len(left)} of {len(todo)} parts are finished; resuming.")
    if left:
        _check_disk(folder, [parts[i] for i in left], tokenizer)
    jobs = [preparation.job(i) for i in todo]
    # This process has the tokenizer; workers load it.
    alone = num_processes == 1 or len(jobs) == 1
    do = functools.partial(do_part, tokenizer=tokenizer) if alone else do_part
    total = sum(parts[i].num_bytes for i in todo)
    purpose = f"preparing {folder}"
    with Progress("prepare", total, unit="B", seconds_between_lines=10.0) as progress:
        for index in in_processes(do, jobs, num_processes, purpose=purpose):
            progress.advance(parts[index].num_bytes)


def verify_store(path: str) -> None:
    """Reads all files of a store and reports the result; the work of `moelib prepare --verify`.

    Raises:
        MissingFileError: If there is no store.
        UserError: If a file is not as it was written.
    """
    store = TokenStore.default_config().set(path=path, split=None).instantiate()
    itemsize = np.dtype(store.meta.dtype).itemsize
    with Progress("verify", unit="B", seconds_between_lines=10.0) as progress:
        store.verify(progress.advance)
    size = format_bytes(store.meta.num_tokens * itemsize)
    log(f"{path}: {store.meta.num_tokens:,} tokens ({size}) are as they were written.")


def _check_disk(folder: str, parts: Sequence[Part], tokenizer: Tokenizer) -> None:
    """Raises DiskFullError if the parts need more space than is free."""
    num_bytes = num_tokens = 0
    for text in parts[0].documents(BadRecords()):
        data = text[:_SAMPLE_BYTES].encode()
        num_bytes += len(data)
        num_tokens += 1 + len(tokenizer.encode(data.decode(errors="ignore")))
        if num_bytes >= _SAMPLE_BYTES:
            break
    itemsize = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).itemsize
    per_byte = itemsize * num_tokens / max(num_bytes, 1)
    need = 1.05 * per_byte * sum(part.num_bytes for part in parts)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise DiskFullError(
            errno.ENOSPC,
            f"the store needs some {format_bytes(need)} and {format_bytes(free)} are free; free "
            "space, or set output_dir (--output) to a larger disk",
            folder,
        )
