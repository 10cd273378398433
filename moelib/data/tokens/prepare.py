"""Preparing: tokenizes a source into a token store, with many processes.

The work happens in `<output_dir>.partial`, which is renamed once it is complete. Each part of the
source becomes one file of tokens, so a run that is killed resumes from its finished parts. The
content of the store does not depend on the number of processes.
"""

import collections
import concurrent.futures
import contextlib
import errno
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from moelib.core.errors import ExistingFileError, UserError
from moelib.data.sources.files import STORE_MARK, files_of
from moelib.data.sources.source import BadRecords, Part, Source, fingerprint
from moelib.data.tokens import token_store
from moelib.data.tokens.prepare_part import (
    PARTS,
    DiskFullError,
    PartOptions,
    PartResult,
    part_file,
    read_result,
    synced_file,
    tokenize_part,
)
from moelib.data.tokens.store_check import hash_blocks
from moelib.data.tokens.token_store import StoreMeta, TokenStore
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.runtime import storage
from moelib.runtime.lock import LOCK_FILE, directory_lock
from moelib.runtime.progress import Progress, format_bytes
from moelib.runtime.storage import read_json, sync_folder, write_json

logger = logging.getLogger(__name__)

_COUNTS = (
    "num_documents",
    "num_tokens",
    "num_bytes",
    "num_empty",
    "num_bad_records",
    "num_divided",
)
_MAX_LOST = 0.01  # Fraction of the text that a tokenizer may lose without being accepted by name.
_SAMPLE_BYTES = 1 << 18  # Text whose tokens are counted to estimate the size of the store.


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    output_dir: str,
    *,
    num_processes: int = 1,
    append_eos: bool = True,
    skip_bad_records: bool = False,
    accept_lossy_tokenizer: bool = False,
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
        skip_bad_records: Whether records without a document are counted rather than errors.
        accept_lossy_tokenizer: Whether the ids may lack more than 1 % of the text, such as unknown
            characters, or capitals that a normalizer replaces.
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
    splits = {"train": 1.0} if splits is None else dict(splits)
    token_store.check_splits(splits)
    if num_processes < 1:
        raise UserError(f"num_processes={num_processes}: set 1 or more.")
    storage.require_local("output_dir (--output)", output_dir, "copy the store when it is complete")
    output_dir, parts = output_dir.rstrip("/"), source.parts()
    plan = {
        "source": fingerprint(parts),
        "tokenizer": tokenizer.fingerprint,
        "append_eos": append_eos,
        "splits": splits,
        "split_seed": split_seed,
    }
    if os.path.exists(output_dir):
        _check_finished(output_dir, plan, skip_bad_records)
        _log(f"{output_dir} is prepared already.")
        made = os.stat(os.path.join(output_dir, STORE_MARK)).st_mtime_ns
        later = [x.path for part in parts for x in files_of(part) if x.modified_ns > made]
        if later:
            _log(
                f"{len(later)} files, such as {later[0]}, were modified since; delete the folder "
                "to prepare it again if their text has changed."
            )
    else:
        folder = output_dir + ".partial"
        with directory_lock(folder, setting="output_dir (--output)"):
            _begin(folder, plan, tokenizer)
            options = PartOptions(append_eos, skip_bad_records)
            results = _tokenize(folder, parts, tokenizer, options, num_processes)
            _check_lost(results, accept_lossy_tokenizer)
            meta = _finish(folder, plan, tokenizer, results)
            os.rename(folder, output_dir)
            os.unlink(os.path.join(output_dir, LOCK_FILE))
        sync_folder(os.path.dirname(output_dir) or ".")
        _log(_report(output_dir, meta))
    shutil.rmtree(os.path.join(output_dir, PARTS), ignore_errors=True)
    return TokenStore.default_config().set(path=output_dir, split=None).instantiate()


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
    _log(f"{path}: {store.meta.num_tokens:,} tokens ({size}) are as they were written.")


def _log(text: str) -> None:
    print(f"prepare: {text}", file=sys.stderr, flush=True)


# -- Beginning -----------------------------------------------------------------------------------


def _changed(folder: str, plan: Mapping[str, Any]) -> list[str]:
    """Returns the names of the entries in which a plan differs from that of a folder.

    Whether bad records are skipped is not part of a plan: without such records it changes nothing.
    Raises ExistingFileError if the folder has no plan: its files are the user's.
    """
    found = {}
    with contextlib.suppress(OSError, UserError):
        found = read_json(os.path.join(folder, STORE_MARK))
    if not found:
        raise ExistingFileError(
            f"{folder} exists and was not made by `moelib prepare`; set output_dir "
            "(--output) to a new folder."
        )
    return [name for name, value in plan.items() if found.get(name) != value]


def _check_finished(folder: str, plan: Mapping[str, Any], skip_bad_records: bool) -> None:
    """Raises ExistingFileError unless this plan made the store in a folder."""
    changed = _changed(folder, plan)
    if not changed and not skip_bad_records and token_store.read_meta(folder).num_bad_records:
        changed = ["skip_bad_records"]
    if changed:
        raise ExistingFileError(
            f"{folder} was prepared with different {' and '.join(changed)}; set output_dir "
            "(--output) to a new folder, or delete that one to prepare it again."
        )


def _begin(folder: str, plan: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Fills the working folder, or keeps one with the same plan."""
    found = set(os.listdir(folder)) - {LOCK_FILE}
    if found and (changed := _changed(folder, plan)):
        _log(
            f"starting over, because {folder} was prepared with different {' and '.join(changed)}."
        )
        for path in (os.path.join(folder, name) for name in sorted(found, key=STORE_MARK.__eq__)):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)  # The mark is the last.
    write_json(os.path.join(folder, STORE_MARK), plan)  # First: it marks the folder as ours.
    os.makedirs(os.path.join(folder, PARTS), exist_ok=True)
    tokenizer.save(folder)


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


# -- Working -------------------------------------------------------------------------------------


def _tokenize(
    folder: str,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    options: PartOptions,
    num_processes: int,
) -> list[PartResult]:
    """Tokenizes the parts that are not finished, the largest first. Returns all results."""
    found = {index: read_result(folder, index, options) for index in range(len(parts))}
    results = {index: result for index, result in found.items() if result is not None}
    todo = [index for index in found if index not in results]
    todo.sort(key=lambda index: -parts[index].num_bytes)
    if len(todo) < len(parts):
        _log(f"{len(parts) - len(todo)} of {len(parts)} parts are finished; resuming.")
    if not todo:
        return list(results.values())
    _check_disk(folder, [parts[index] for index in todo], tokenizer)
    total, left = (sum(parts[i].num_bytes for i in some) for some in (range(len(parts)), todo))
    jobs = [(folder, index, parts[index], options) for index in todo]
    if num_processes == 1 or len(todo) == 1:
        finished = (_do_job(job, tokenizer) for job in jobs)
    else:
        finished = _in_processes(jobs, min(num_processes, len(todo)), tokenizer.eos_token)
    show = Progress("prepare", total, start=total - left, unit="B", seconds_between_lines=10.0)
    with _sigterm_ends_workers(), show as progress:
        for index, result in finished:
            results[index] = result
            progress.advance(parts[index].num_bytes)
    return [results[index] for index in found]


@contextlib.contextmanager
def _sigterm_ends_workers() -> Iterator[None]:
    """Ends the worker processes at SIGTERM, and this one as an exit, which frees what they share.

    Does nothing in a thread, or if the program has its own handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        for worker in multiprocessing.active_children():
            worker.terminate()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_Job = tuple[str, int, Part, PartOptions]
_worker_tokenizer: list[Tokenizer] = []  # One, in a worker process.


def _do_job(job: _Job, tokenizer: Tokenizer | None = None) -> tuple[int, PartResult]:
    """Tokenizes a part and returns its index and result."""
    folder, index, part, options = job
    return index, tokenize_part(folder, index, part, tokenizer or _worker_tokenizer[0], options)


def _in_processes(
    jobs: Sequence[_Job], num_processes: int, eos_token: str
) -> Iterator[tuple[int, PartResult]]:
    """Does jobs in spawned processes, and yields the index and result of each finished part."""
    folder = jobs[0][0]
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),  # A fork would copy the locks of JAX's threads.
        _start_worker,
        (folder, eos_token),
    )
    try:
        futures = [pool.submit(_do_job, job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            f"A worker process died (out of memory?) while preparing {folder}; finished parts are "
            f"kept: run the same command again with num_processes below {num_processes}."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(folder: str, eos_token: str) -> None:
    """Loads the tokenizer in a worker; its own threads would compete with other workers."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cfg = Tokenizer.default_config().set(path=folder, eos_token=eos_token)
    _worker_tokenizer.append(cfg.instantiate())


def _die_with_parent() -> None:
    """Ends a worker whose parent was killed, which would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# -- Finishing -----------------------------------------------------------------------------------


def _finish(
    folder: str,
    plan: Mapping[str, Any],
    tokenizer: Tokenizer,
    results: Sequence[PartResult],
) -> StoreMeta:
    """Joins the arrays of the parts and writes meta.json."""
    if not any(result.num_tokens for result in results):
        shutil.rmtree(folder)
        raise UserError(_nothing_found(results))
    arrays = {}
    for name in (token_store.LENGTHS, token_store.NUM_BYTES):
        of_parts = [np.load(part_file(folder, index, name)) for index in range(len(results))]
        arrays[name] = np.concatenate(of_parts)
    arrays[token_store.TOKEN_NUM_BYTES] = tokenizer.token_num_bytes()
    hashes = {}
    for name, values in arrays.items():
        with synced_file(os.path.join(folder, name)) as file:
            np.save(file, values)
        hashes[name] = hash_blocks(file.name)
    for index, result in enumerate(results):
        name = token_store.tokens_file(index)
        hashes[name] = list(result.block_hashes[name])
    lengths = arrays[token_store.LENGTHS]
    meta = StoreMeta(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        eos_token=tokenizer.eos_token,
        dtype=token_store.token_dtype(tokenizer.vocab_size),
        file_tokens=[result.num_tokens for result in results],
        **{name: sum(getattr(result, name) for result in results) for name in _COUNTS},
        splits=plan["splits"],
        split_seed=plan["split_seed"],
        append_eos=plan["append_eos"],
        tokenizer_hash=plan["tokenizer"],
        source_hash=plan["source"],
        content_hash=token_store.content_hash([result.sha256 for result in results], lengths),
        block_hashes=hashes,
    )
    token_store.write_meta(folder, meta)
    return meta


def _check_lost(results: Sequence[PartResult], accepted: bool) -> None:
    """Warns of characters that the tokens lack. Raises UserError if they are many."""
    lost = collections.Counter[str]()
    for result in results:
        lost.update(result.lost_characters)
    num_lost = sum(len(character.encode()) * count for character, count in lost.items())
    if not num_lost:
        return
    total = sum(result.num_bytes for result in results)
    most = ", ".join(f"{character!r} ({count:,})" for character, count in lost.most_common(5))
    message = (
        f"the tokenizer loses {num_lost:,} of {total:,} bytes of the text "
        f"({100 * num_lost / total:.2g} %), most of all {most}"
    )
    if num_lost > _MAX_LOST * total and not accepted:
        raise UserError(
            f"{message}; set another tokenizer, such as a byte-level BPE (--train_bpe), or "
            "accept_lossy_tokenizer (--accept_lossy_tokenizer)."
        )
    logger.warning("%s.", message)


def _nothing_found(results: Sequence[PartResult]) -> str:
    """Returns the message for a source without any text."""
    first = next((f" (the first: {r.first_bad_record})" for r in results if r.first_bad_record), "")
    return (
        f"The source has no text: {sum(r.num_empty for r in results)} empty documents, "
        f"{sum(r.num_bad_records for r in results)} bad records{first}; set paths to files with "
        "text."
    )


def _report(output_dir: str, meta: StoreMeta) -> str:
    """Returns a summary of the store in one sentence."""
    counts = {"empty documents": meta.num_empty, "bad records": meta.num_bad_records}
    return (
        f"{output_dir}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens of "
        f"{format_bytes(meta.num_bytes)} of text "
        f"({meta.num_bytes / meta.num_tokens:.2f} bytes per token)"
        + "".join(f", {count} {what} skipped" for what, count in counts.items() if count)
        + (f", {meta.num_divided} long documents divided" if meta.num_divided else "")
    )
