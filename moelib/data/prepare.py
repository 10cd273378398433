"""Preparing: tokenizes a source into a token store, with many processes.

Work happens in `<output_dir>.partial`, which is renamed when everything is there. Each part of the
source becomes one file of tokens: a run that is killed goes on from its finished parts. What the
store holds does not depend on the number of processes.
"""

import concurrent.futures
import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from moelib.core.files import write_json
from moelib.core.progress import Progress, format_bytes
from moelib.data import token_store
from moelib.data.files import STORE_MARK
from moelib.data.prepare_part import (
    PARTS,
    PartOptions,
    PartResult,
    check_no_bad_records,
    part_file,
    read_result,
    tokenize_part,
)
from moelib.data.source import BadRecords, Part, Source, fingerprint
from moelib.data.token_store import StoreMeta, TokenStore
from moelib.data.tokenizer import Tokenizer

_SAMPLE_BYTES = 1 << 18  # Text whose tokens are counted to foresee the disk space.


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    output_dir: str,
    *,
    num_processes: int = 1,
    append_eos: bool = True,
    skip_bad_records: bool = False,
    splits: Mapping[str, float] | None = None,
    split_seed: int = 0,
) -> TokenStore:
    """Returns the token store of a source, made now, or found if the same one is there already.

    A program that calls this with several processes needs `if __name__ == "__main__":`, because
    they are spawned.

    Args:
        source: Where documents come from. Empty ones are left out, and counted.
        tokenizer: What turns them into ids.
        output_dir: The store's folder; `<output_dir>.partial` is used while working.
        num_processes: Worker processes; 1 works in this process.
        append_eos: Whether each document ends with the end-of-text token.
        skip_bad_records: Whether records that hold no document are counted; else they are errors.
        splits: Fraction of documents in each split; all are in "train" if None.
        split_seed: Decides which documents are in which split.

    Returns:
        The store, with all its documents.

    Raises:
        FileExistsError: If output_dir holds another store, or something else, or
            `<output_dir>.partial` something that was not made here.
        ValueError: If the source is empty or broken, or a split fraction is wrong.
        OSError: If the disk is too small, or becomes full; finished parts are kept.
    """
    splits = {"train": 1.0} if splits is None else dict(splits)
    token_store.check_splits(splits)
    if num_processes < 1:
        raise ValueError(f"num_processes is {num_processes}; set it to 1 or more.")
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
    else:
        folder = output_dir + ".partial"
        _begin(folder, plan, tokenizer)
        options = PartOptions(append_eos, skip_bad_records)
        _tokenize(folder, parts, tokenizer, options, num_processes)
        meta = _finish(folder, plan, tokenizer, len(parts))
        os.rename(folder, output_dir)
        _log(_report(output_dir, meta))
    shutil.rmtree(os.path.join(output_dir, PARTS), ignore_errors=True)
    return TokenStore.default_config().set(path=output_dir, split=None).instantiate()


def documents_of_split(
    source: Source, splits: Mapping[str, float], split: str, *, split_seed: int = 0
) -> Iterator[str]:
    """Yields the documents that a store of the source has in a split, in order, without the store.

    For what is learned from text before there is a store, such as a tokenizer, and must not see
    what is held out. Broken records are passed over, as with `skip_bad_records`.

    Raises:
        ValueError: If a split fraction is wrong or there is no such split.
    """
    token_store.check_splits(splits)
    if split not in splits:
        raise ValueError(f"There is no split {split!r} in {list(splits)}.")
    fractions, wanted = list(splits.values()), list(splits).index(split)
    chosen, index = np.zeros(0, bool), 0
    for part in source.parts():
        for text in filter(None, part.documents(BadRecords())):
            if index == len(chosen):
                of_each = token_store.split_of_documents(2 * index + 1024, fractions, split_seed)
                chosen = of_each == wanted
            if chosen[index]:
                yield text
            index += 1


def _log(text: str) -> None:
    print(f"prepare: {text}", file=sys.stderr, flush=True)


# -- Beginning -----------------------------------------------------------------------------------


def _changed(folder: str, plan: Mapping[str, Any]) -> list[str]:
    """Returns the names of what a plan has otherwise than the one that began a folder.

    Whether bad records are skipped is no part of a plan: it changes nothing where there are none.

    Raises:
        FileExistsError: If no plan began the folder.
    """
    try:
        with open(os.path.join(folder, STORE_MARK), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        raise FileExistsError(
            f"{folder} exists and was not made by `moelib prepare`; set output_dir to a new folder."
        ) from None
    return [name for name, value in plan.items() if found.get(name) != value]


def _check_finished(folder: str, plan: Mapping[str, Any], skip_bad_records: bool) -> None:
    """Raises FileExistsError unless this very plan made the store in a folder."""
    changed = _changed(folder, plan)
    if not changed and not skip_bad_records and token_store.read_meta(folder).num_bad_records:
        changed = ["skip_bad_records"]
    if changed:
        raise FileExistsError(
            f"{folder} was prepared with another {' and '.join(changed)}; set output_dir to a new "
            "folder, or delete that one to prepare it again."
        )


def _begin(folder: str, plan: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Makes the working folder, or keeps one that the same plan began.

    Raises:
        FileExistsError: If there is something that no plan began, such as files of the user's.
    """
    if os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)  # Killed before the mark was there.
    if os.path.exists(folder) and (changed := _changed(folder, plan)):
        _log(f"starting over, because {folder} was prepared with another {' and '.join(changed)}.")
        shutil.rmtree(folder)
    os.makedirs(folder, exist_ok=True)
    write_json(os.path.join(folder, STORE_MARK), plan)  # First: it says that the rest is ours.
    os.makedirs(os.path.join(folder, PARTS), exist_ok=True)
    tokenizer.save(folder)


def _check_disk(folder: str, parts: Sequence[Part], tokenizer: Tokenizer) -> None:
    """Raises OSError if what the parts will need is more than what is free."""
    num_bytes = num_tokens = 0
    for text in parts[0].documents(BadRecords()):
        text = text[:_SAMPLE_BYTES]
        num_bytes += len(text.encode())
        num_tokens += 1 + len(tokenizer.encode(text))
        if num_bytes >= _SAMPLE_BYTES:
            break
    itemsize = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).itemsize
    per_byte = itemsize * num_tokens / max(num_bytes, 1)
    need = 1.05 * per_byte * sum(part.num_bytes for part in parts)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(
            errno.ENOSPC,
            f"the store needs some {format_bytes(need)} and {format_bytes(free)} are free; free "
            "space, or set output_dir to a larger disk",
            folder,
        )


# -- Working -------------------------------------------------------------------------------------


def _tokenize(
    folder: str,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    options: PartOptions,
    num_processes: int,
) -> None:
    """Tokenizes the parts that are not finished, the largest first."""
    results = [read_result(folder, index) for index in range(len(parts))]
    if not options.skip_bad_records:
        check_no_bad_records(results)
    todo = [index for index, result in enumerate(results) if result is None]
    todo.sort(key=lambda index: -parts[index].num_bytes)
    if len(todo) < len(parts):
        _log(f"{len(parts) - len(todo)} of {len(parts)} parts are finished; going on.")
    if not todo:
        return
    _check_disk(folder, [parts[index] for index in todo], tokenizer)
    total, left = (sum(parts[i].num_bytes for i in some) for some in (range(len(parts)), todo))
    show = Progress("prepare", total, start=total - left, unit="B", seconds_between_lines=10.0)
    with show as progress:
        if num_processes == 1 or len(todo) == 1:
            for index in todo:
                tokenize_part(folder, index, parts[index], tokenizer, options)
                progress.advance(parts[index].num_bytes)
        else:
            jobs = [(folder, index, parts[index], options) for index in todo]
            for index in _in_processes(jobs, min(num_processes, len(todo)), tokenizer.eos_token):
                progress.advance(parts[index].num_bytes)


_Job = tuple[str, int, Part, PartOptions]
_worker_tokenizer: list[Tokenizer] = []  # One, in a worker process.


def _in_processes(jobs: Sequence[_Job], num_processes: int, eos_token: str) -> Iterator[int]:
    """Does jobs in spawned processes, and yields the index of each part that is finished."""
    folder = jobs[0][0]
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),  # A fork would copy JAX's threads, half alive.
        _start_worker,
        (folder, eos_token),
    )
    try:
        futures = [pool.submit(_do_job, job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"A worker process died (out of memory?) while preparing {folder}; finished parts are "
            "kept: run the same again, with a smaller num_processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(folder: str, eos_token: str) -> None:
    """Loads the tokenizer in a worker; threads of its own would only be in each other's way."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cfg = Tokenizer.default_config().set(path=folder, eos_token=eos_token)
    _worker_tokenizer.append(cfg.instantiate())


def _die_with_parent() -> None:
    """Ends a worker whose parent was killed: it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do_job(job: _Job) -> int:
    folder, index, part, options = job
    tokenize_part(folder, index, part, _worker_tokenizer[0], options)
    return index


# -- Finishing -----------------------------------------------------------------------------------


def _finish(folder: str, plan: Mapping[str, Any], tokenizer: Tokenizer, num: int) -> StoreMeta:
    """Joins the arrays of `num` parts and writes meta.json."""
    results = [result for index in range(num) if (result := read_result(folder, index))]
    assert len(results) == num
    if not any(result.num_tokens for result in results):
        shutil.rmtree(folder)
        raise ValueError(_nothing_found(results))
    arrays = {}
    for name in (token_store.LENGTHS, token_store.NUM_BYTES):
        arrays[name] = np.concatenate([np.load(part_file(folder, i, name)) for i in range(num)])
        np.save(os.path.join(folder, name), arrays[name])
    np.save(os.path.join(folder, token_store.TOKEN_NUM_BYTES), tokenizer.token_num_bytes())
    lengths = arrays[token_store.LENGTHS]
    meta = StoreMeta(
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        eos_token=tokenizer.eos_token,
        dtype=token_store.token_dtype(tokenizer.vocab_size),
        file_tokens=[result.num_tokens for result in results],
        num_documents=len(lengths),
        num_tokens=sum(result.num_tokens for result in results),
        num_bytes=sum(result.num_bytes for result in results),
        num_empty=sum(result.num_empty for result in results),
        num_bad_records=sum(result.num_bad_records for result in results),
        splits=plan["splits"],
        split_seed=plan["split_seed"],
        append_eos=plan["append_eos"],
        tokenizer_hash=plan["tokenizer"],
        source_hash=plan["source"],
        content_hash=token_store.content_hash([result.sha256 for result in results], lengths),
    )
    write_json(os.path.join(folder, token_store.META), dataclasses.asdict(meta))
    return meta


def _nothing_found(results: Sequence[PartResult]) -> str:
    """Returns the message for a source without any text."""
    first = next((f" (the first: {r.first_bad_record})" for r in results if r.first_bad_record), "")
    return (
        f"The source has no text: {sum(r.num_empty for r in results)} empty documents, "
        f"{sum(r.num_bad_records for r in results)} bad records{first}; set paths to files with "
        "text."
    )


def _report(output_dir: str, meta: StoreMeta) -> str:
    """Returns what was made, as a sentence."""
    left_out = [
        f"{count} {what} left out"
        for count, what in (
            (meta.num_empty, "empty documents"),
            (meta.num_bad_records, "bad records"),
        )
        if count
    ]
    return (
        f"{output_dir}: {meta.num_documents} documents, {meta.num_tokens} tokens of "
        f"{format_bytes(meta.num_bytes)} of text "
        f"({meta.num_bytes / meta.num_tokens:.2f} bytes a token)"
        + "".join(f", {text}" for text in left_out)
    )
