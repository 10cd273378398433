"""Preparing in three steps that any scheduler can map: `begin_store`, the parts, `finish_store`.

The work happens in `<output_dir>.partial`, which is renamed once it is complete. Each part of the
source becomes one file of tokens with a result, so a process that is killed resumes from finished
parts. The content of the store does not depend on the processes.

A process that works in the folder shares its lock, and one that begins a part locks the part. The
lock is exclusive for `prepare` as a whole, and for finishing.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moelib.core.errors import ExistingFileError, UserError
from moelib.data.sources.files import STORE_MARK
from moelib.data.sources.source import Part, Source, fingerprint
from moelib.data.tokens import token_store
from moelib.data.tokens.chat.labels import ChatOptions
from moelib.data.tokens.prepare_part import (
    PARTS,
    PartOptions,
    PartResult,
    part_file,
    read_result,
    synced_file,
    tokenize_part,
)
from moelib.data.tokens.store_check import hash_blocks
from moelib.data.tokens.token_store import StoreMeta, TokenStore
from moelib.data.tokens.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from moelib.runtime import storage
from moelib.runtime.lock import LOCK_FILE, directory_lock
from moelib.runtime.progress import format_bytes
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
_BEGIN_LOCK = ".begin.lock"  # Locked while the plan and the tokenizer are written.
_MAX_LOST = 0.01  # Fraction of the text that a tokenizer may lose without being accepted by name.
_SETTING = "output_dir (--output)"


@dataclasses.dataclass(frozen=True)
class Preparation:
    """A store to be made: plain data that a scheduler may send to any machine."""

    output_dir: str  # Folder of the store.
    parts: Sequence[Part]
    plan: Mapping[str, Any]  # Settings that decide the content of the store.
    options: PartOptions
    of_tokenizer: tuple[str, str | None, str]  # End of text, BOS, and the fingerprint.

    @property
    def folder(self) -> str:
        """The folder of the unfinished store."""
        return self.output_dir + ".partial"

    def job(self, index: int) -> "PartJob":
        """Returns a part for a worker process."""
        return PartJob(self.folder, index, self.parts[index], self.options, self.of_tokenizer)


class PartJob(NamedTuple):
    """A part to tokenize: what a worker process needs."""

    folder: str
    index: int
    part: Part
    options: PartOptions
    of_tokenizer: tuple[str, str | None, str]


def do_part(job: PartJob, tokenizer: Tokenizer | None = None) -> int:
    """Tokenizes a part that is not finished or damaged, and returns its index.

    Waits if another process does it.
    """
    folder, index, part, options, of_tokenizer = job
    locked, name = os.path.join(folder, PARTS), f"{index:05d}.lock"
    with directory_lock(locked, setting=_SETTING, name=name, wait=True):
        if read_result(folder, index, options) is None:
            tokenizer = tokenizer or _tokenizer_of(folder, *of_tokenizer)
            tokenize_part(folder, index, part, tokenizer, options)
    return index


@functools.lru_cache(maxsize=1)
def _tokenizer_of(folder: str, eos_token: str, bos_token: str | None, expected: str) -> Tokenizer:
    """Returns the tokenizer in a folder. Raises UserError if it is another one."""
    cfg = Tokenizer.default_config().set(path=folder, eos_token=eos_token, bos_token=bos_token)
    tokenizer: Tokenizer = cfg.instantiate()
    if tokenizer.fingerprint != expected:
        raise UserError(
            f"{folder} has the tokenizer {tokenizer.fingerprint:.12}, not {expected:.12}; begin "
            "again in a new folder."
        )
    return tokenizer


# -- Beginning -----------------------------------------------------------------------------------


def plan_store(
    source: Source,
    tokenizer: Tokenizer,
    output_dir: str,
    *,
    append_eos: bool = True,
    prepend_bos: bool = False,
    skip_bad_records: bool = False,
    chat: ChatOptions | None = None,
    splits: Mapping[str, float] | None = None,
    split_seed: int = 0,
) -> Preparation:
    """Returns the preparation of a store; writes nothing. See `moelib.data.tokens.prepare.prepare`.

    Raises:
        UserError: If a setting is wrong, or the source is empty.
    """
    splits = {"train": 1.0} if splits is None else dict(splits)
    token_store.check_splits(splits)
    storage.require_local(_SETTING, output_dir, "copy the store when it is complete")
    bos_token = tokenizer.bos_token if prepend_bos else None
    if prepend_bos and bos_token is None:
        raise UserError("prepend_bos=True: the tokenizer has no BOS; set its bos_token to one.")
    if chat is not None and (append_eos or prepend_bos):
        raise UserError(
            "chat: the template writes BOS and ends; set append_eos and prepend_bos to False."
        )
    parts = tuple(source.parts())
    hashed = fingerprint(parts)
    if chat is not None:
        chat = _with_day_of_store(chat, output_dir.rstrip("/"), hashed)
    plan = {
        "source": hashed,
        "tokenizer": tokenizer.fingerprint,
        "append_eos": append_eos,
        "bos_token": bos_token or "",
        "chat": None if chat is None else dataclasses.asdict(chat),
        "splits": splits,
        "split_seed": split_seed,
    }
    options = PartOptions(append_eos, skip_bad_records, prepend_bos, chat)
    of_tokenizer = tokenizer.eos_token, bos_token, tokenizer.fingerprint
    return Preparation(output_dir.rstrip("/"), parts, plan, options, of_tokenizer)


def _with_day_of_store(chat: ChatOptions, output_dir: str, source: str) -> ChatOptions:
    """Returns settings with the day of a store of the same source: the files may be touched."""
    for folder in (output_dir, output_dir + ".partial"):
        found = read_json(os.path.join(folder, STORE_MARK))
        if found.get("source") == source and found.get("chat"):
            return dataclasses.replace(chat, today=found["chat"]["today"])
    return chat


def begin_store(preparation: Preparation, tokenizer: Tokenizer) -> None:
    """Writes the plan and the tokenizer, unless they are there; any number may do so at once.

    Raises:
        ExistingFileError: If output_dir holds another store, or something else, or
            `<output_dir>.partial` something else, or a store that was begun with other settings.
    """
    with unfinished_store(preparation, shared=True) as unfinished:
        if unfinished:
            write_plan(preparation, tokenizer, start_over=False)


@contextlib.contextmanager
def unfinished_store(preparation: Preparation, *, shared: bool) -> Iterator[bool]:
    """Locks the folder of an unfinished store for the body. Yields False if it is finished.

    Raises:
        DirectoryInUseError: If the lock is not shared, and another process has locked the folder.
        ExistingFileError: If another store is finished there.
    """
    folder = preparation.folder
    if os.path.exists(preparation.output_dir):
        _check_finished(preparation)
        yield False
        return
    with directory_lock(folder, setting=_SETTING, shared=shared, wait=shared):
        if finished := os.path.exists(preparation.output_dir):  # Meanwhile, by another process.
            with contextlib.suppress(OSError):  # The lock has created the folder again.
                os.unlink(os.path.join(folder, LOCK_FILE))
                os.rmdir(folder)
            _check_finished(preparation)
        yield not finished


def write_plan(preparation: Preparation, tokenizer: Tokenizer, *, start_over: bool) -> None:
    """Writes the plan and the tokenizer, or keeps those of the same plan.

    What was prepared with another plan is deleted to `start_over`, or else an error.
    """
    folder = preparation.folder
    with directory_lock(folder, setting=_SETTING, name=_BEGIN_LOCK, wait=True):
        found = set(os.listdir(folder)) - {LOCK_FILE, _BEGIN_LOCK}
        if found and not start_over:
            _check_plan(preparation)
        elif found and (changed := _changed(folder, preparation.plan)):
            log(
                f"starting over, because {folder} was prepared with different "
                f"{' and '.join(changed)}."
            )
            paths = [os.path.join(folder, x) for x in sorted(found, key=STORE_MARK.__eq__)]
            for path in paths:  # The mark is the last.
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        # First: it marks the folder as ours.
        write_json(os.path.join(folder, STORE_MARK), preparation.plan)
        os.makedirs(os.path.join(folder, PARTS), exist_ok=True)
        tokenizer.save(folder)
        if (chat := preparation.options.chat) is not None:
            with storage.atomic_file(os.path.join(folder, CHAT_TEMPLATE_FILE)) as file:
                file.write(chat.template)


def _changed(folder: str, plan: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the entries (found, wanted) in which a plan differs from that of a folder, by name.

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
    return {name: (found.get(name), x) for name, x in plan.items() if found.get(name) != x}


def _check_plan(preparation: Preparation) -> None:
    """Raises ExistingFileError if the unfinished store was begun with another plan."""
    for name, (found, wanted) in _changed(preparation.folder, preparation.plan).items():
        raise ExistingFileError(
            f"{preparation.folder} was begun with {name}={found!s:.80}, and this process has "
            f"{name}={wanted!s:.80}; start all processes with the same settings, or delete the "
            "folder to begin again."
        )


def _check_finished(preparation: Preparation) -> None:
    """Raises ExistingFileError unless this plan made the finished store."""
    folder = preparation.output_dir
    changed = list(_changed(folder, preparation.plan))
    skip = preparation.options.skip_bad_records
    if not changed and not skip and token_store.read_meta(folder).num_bad_records:
        changed = ["skip_bad_records"]
    if changed:
        raise ExistingFileError(
            f"{folder} was prepared with different {' and '.join(changed)}; set output_dir "
            "(--output) to a new folder, or delete that one to prepare it again."
        )


# -- Parts ---------------------------------------------------------------------------------------


def make_part(preparation: Preparation, index: int) -> None:
    """Tokenizes a part, unless it is finished; the store may be, too.

    Any machine that sees the folder may call this, in any order, and again after a failure.

    Raises:
        BadRecordError: At a record without a document, unless such records are skipped.
        DiskFullError: If the disk becomes full.
        ExistingFileError: If the store was begun with other settings.
        UserError: If the part is damaged, or a file of it is written to meanwhile.
    """
    with unfinished_store(preparation, shared=True) as unfinished:
        if unfinished:
            _check_plan(preparation)
            do_part(preparation.job(index))


# -- Finishing -----------------------------------------------------------------------------------


def finish_store(preparation: Preparation, *, accept_lossy_tokenizer: bool = False) -> TokenStore:
    """Returns the store, which is joined from its parts unless it is finished.

    Raises:
        DirectoryInUseError: If a process works in the folder.
        UserError: If parts are missing, there is no text, or the tokenizer loses too much of it.
    """
    with unfinished_store(preparation, shared=False) as unfinished:
        if unfinished:
            _check_plan(preparation)
            tokenizer = _tokenizer_of(preparation.folder, *preparation.of_tokenizer)
            join_parts(preparation, tokenizer, accept_lossy_tokenizer)
    output_dir = preparation.output_dir
    for name in (LOCK_FILE, _BEGIN_LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(output_dir, name))
    shutil.rmtree(os.path.join(output_dir, PARTS), ignore_errors=True)
    return TokenStore.default_config().set(path=output_dir, split=None).instantiate()


def join_parts(preparation: Preparation, tokenizer: Tokenizer, accept_lossy: bool) -> None:
    """Finishes a store in the folder, which is locked, and renames it; see `finish_store`."""
    folder, output_dir = preparation.folder, preparation.output_dir
    results = _results(preparation, tokenizer)
    _check_lost(results, accept_lossy)
    if not any(result.num_tokens for result in results):
        shutil.rmtree(folder)
        raise UserError(_nothing_found(preparation.parts, results))
    meta = _finish(folder, preparation.plan, tokenizer, results)
    os.rename(folder, output_dir)
    sync_folder(os.path.dirname(output_dir) or ".")
    log(_report(output_dir, meta) + _report_of_chat(results))


def _results(preparation: Preparation, tokenizer: Tokenizer) -> list[PartResult]:
    """Returns the results of all parts. Raises UserError, which lists those that are missing."""
    folder, options = preparation.folder, preparation.options
    itemsize = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).itemsize
    results, missing = [], []
    for index in range(len(preparation.parts)):
        result = read_result(folder, index, options, read_tokens=False)
        path = os.path.join(folder, token_store.tokens_file(index))
        if result and os.path.getsize(path) == result.num_tokens * itemsize:
            results.append(result)
        else:
            missing.append(index)
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(preparation.parts)} parts are missing or damaged: "
            f"{', '.join(map(str, missing)):.200}; run `moelib prepare` with all shares again, or "
            "make these parts before the store is finished."
        )
    return results


def log(text: str) -> None:
    """Prints a message of the command."""
    print(f"prepare: {text}", file=sys.stderr, flush=True)


def _finish(
    folder: str,
    plan: Mapping[str, Any],
    tokenizer: Tokenizer,
    results: Sequence[PartResult],
) -> StoreMeta:
    """Joins the arrays of the parts and writes meta.json."""
    arrays = {}
    is_chat = plan["chat"] is not None
    names = (token_store.LENGTHS, token_store.NUM_BYTES, *token_store.OF_CHAT * is_chat)
    begins = np.cumsum([0, *(result.num_tokens for result in results)], dtype=np.uint64)
    for name in names:
        of_parts = [np.load(part_file(folder, index, name)) for index in range(len(results))]
        if name == token_store.LABELS:
            of_parts = [x + begin for x, begin in zip(of_parts, begins[:-1], strict=True)]
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
        bos_token=plan["bos_token"],
        num_label_spans=len(arrays[token_store.LABELS]) // 2 if is_chat else None,
        tokenizer_hash=plan["tokenizer"],
        source_hash=plan["source"],
        content_hash=token_store.content_hash(
            [result.sha256 for result in results], lengths, arrays.get(token_store.LABELS)
        ),
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


def _nothing_found(parts: Sequence[Part], results: Sequence[PartResult]) -> str:
    """Returns the message for a source without any text."""
    names = parts[0].name + (f" and {len(parts) - 1} other parts" if len(parts) > 1 else "")
    first = next((f" (the first: {r.first_bad_record})" for r in results if r.first_bad_record), "")
    left_out = _left_out(results)
    conversations = f", {left_out.total():,} conversations left out ({_reasons(left_out)})"
    return (
        f"There is no text of use in {names}: {sum(r.num_empty for r in results)} empty documents, "
        f"{sum(r.num_bad_records for r in results)} bad records{first}"
        f"{conversations if left_out else ''}; use other files"
        + (", or set the length (--seq_len) higher." if left_out else " with text.")
    )


def _left_out(results: Sequence[PartResult]) -> collections.Counter[str]:
    """Returns the numbers of conversations that are left out, by reason."""
    return sum((collections.Counter(r.left_out) for r in results), collections.Counter[str]())


def _reasons(left_out: collections.Counter[str]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in left_out.most_common())


def _report_of_chat(results: Sequence[PartResult]) -> str:
    """Returns what became of conversations; an empty text for a store of text."""
    if not (num_labels := sum(result.num_labels for result in results)):
        return ""
    left_out = _left_out(results)
    num_cut = sum(result.num_cut for result in results)
    return (
        f"\n  {num_labels:,} of the tokens are labels"
        + (f"; {num_cut:,} conversations cut" if num_cut else "")
        + (f"; {left_out.total():,} left out ({_reasons(left_out)})" if left_out else "")
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
