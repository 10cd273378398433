"""The tokenizer of a corpus: a BPE trained on a sample of the documents that are not held out."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moelib.core.errors import UserError
from moelib.data.hashing import random_permutation
from moelib.data.sources.files import text_pieces
from moelib.data.sources.source import BadRecords, Part, Source
from moelib.data.tokens.token_store import split_of_documents
from moelib.data.tokens.tokenizer import Tokenizer, train_bpe
from moelib.data.tokens.workers import in_processes
from moelib.runtime.lock import directory_lock

_PARALLEL_BYTES = 1 << 26  # Size of a corpus that is worth the start of processes.


def corpus_tokenizer(
    source: Source,
    vocab_size: int,
    path: str,
    *,
    num_bytes: int = 20_000_000,
    splits: Mapping[str, float] | None = None,
    split_seed: int = 0,
    allow_fewer: bool = False,
    flag: str = "vocab_size",
    num_processes: int = 1,
    wait: bool = False,
) -> Tokenizer:
    """Returns the tokenizer at `path`, a byte-level BPE that is trained now if the file is missing.

    Args:
        source: The corpus.
        vocab_size: Number of tokens.
        path: The tokenizer.json.
        num_bytes: UTF-8 bytes of text to train on; 20 MB suffice for 32k tokens.
        splits: Splits of the token store to be made; training sees the split "train" alone, or
            everything if there is no other split.
        split_seed: Seed of the token store's splits.
        allow_fewer: Whether a tokenizer with fewer tokens serves too.
        flag: Name of the setting in the message about another size.
        num_processes: Processes that read a large corpus; the tokenizer is the same with any.
        wait: Whether to wait for another process that trains it.

    Raises:
        DirectoryInUseError: If another process trains it, and this one does not wait.
        UserError: If there is no text, or the tokenizer is of another size.
    """
    trained: Tokenizer | None = None
    if not os.path.exists(path):
        with _locked(path, wait):
            if not os.path.exists(path):  # Another process may have just trained it.
                texts = _texts(source, num_bytes, splits, split_seed, num_processes)
                trained = train_bpe(texts, vocab_size, path)
    tokenizer = trained or Tokenizer.default_config().set(path=path).instantiate()
    found = tokenizer.vocab_size
    if found != vocab_size and not (allow_fewer and found < vocab_size):
        little = ", or there was too little text for more" if found < vocab_size else ""
        reason = f"it was trained for another size{little}; delete the file to train it again"
        if trained:
            reason = "the text has no more; delete the file to train it on more text"
        raise UserError(
            f"{path} has {found} tokens, and {flag} is {vocab_size}: {reason}, or set {flag} to "
            f"{found}."
        )
    return tokenizer


@contextlib.contextmanager
def _locked(path: str, wait: bool) -> Iterator[None]:
    """Locks the training of the tokenizer at `path` for the body."""
    folder = f"{path}.partial"
    with directory_lock(folder, setting="output_dir (--output)", wait=wait):
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # The process that was waited for did so.


def _texts(
    source: Source,
    num_bytes: int,
    splits: Mapping[str, float] | None,
    split_seed: int,
    num_processes: int,
) -> Iterator[str]:
    """Yields the texts to train on, some `num_bytes` of them."""
    if splits is None or len(splits) == 1 or "train" not in splits:
        return sample_documents(source, num_bytes)
    parts = source.parts()
    total = sum(part.num_bytes for part in parts)
    share = num_bytes / max(splits["train"] * total, 1)
    num_processes = num_processes if total >= _PARALLEL_BYTES else 1
    return _spread_over_split(parts, splits, split_seed, share, num_processes)


def _spread_over_split(
    parts: Sequence[Part],
    splits: Mapping[str, float],
    split_seed: int,
    share: float,
    num_processes: int,
) -> Iterator[str]:
    """Yields about this share of the text of the split train, spread evenly over it.

    The lengths of all documents are read first: they decide which are held out, and are taken.
    """

    def mapped[Job, Result](function: Callable[[Job], Result], jobs: list[Job]) -> Iterator[Result]:
        purpose = "reading the sample for a tokenizer"
        return in_processes(function, jobs, num_processes, purpose=purpose, in_order=True)

    of_parts = list(mapped(_lengths, list(parts)))
    ends = np.cumsum([len(lengths) for lengths in of_parts])
    lengths = np.concatenate(of_parts)
    which = split_of_documents(len(lengths), list(splits.values()), split_seed)
    members = np.flatnonzero(which == list(splits).index("train"))
    taken = members[spread(lengths[members], share)]
    local = np.split(taken, np.searchsorted(taken, ends[:-1]))
    starts = [0, *ends[:-1]]
    jobs = [(p, x - start) for p, x, start in zip(parts, local, starts, strict=True) if len(x)]
    for texts in mapped(_texts_at, jobs):
        yield from texts


def _documents(part: Part) -> Iterator[str]:
    """Yields the documents that a token store has of a part."""
    pieces = (piece for text in part.documents(BadRecords()) for piece in text_pieces(text))
    return filter(None, pieces)


def _lengths(part: Part) -> npt.NDArray[np.uint32]:
    """Returns the characters of each document of a part."""
    return np.fromiter(map(len, _documents(part)), np.uint32)


def _texts_at(job: tuple[Part, npt.NDArray[np.int64]]) -> list[str]:
    """Returns the documents of a part with some indices, which ascend."""
    part, indices = job
    wanted = np.zeros(indices[-1] + 1, bool)
    wanted[indices] = True
    return list(itertools.compress(_documents(part), wanted))


def spread(lengths: npt.NDArray[np.uint32], share: float) -> npt.NDArray[np.bool_]:
    """Returns which texts [N] to take for about this share (0 to 1) of all characters."""
    seen = taken = 0
    chosen = np.zeros(len(lengths), bool)
    for index, length in enumerate(lengths.tolist()):
        seen += length
        if taken <= share * seen:
            taken += length
            chosen[index] = True
    return chosen


def sample_documents(source: Source, num_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yields documents from all parts of a source, without reading everything.

    They have `num_bytes` of UTF-8 text, to within a document. Records without a document are
    skipped. `seed` decides the order of parts, of which the first suffice if there are many.
    """
    parts, least = source.parts(), max(num_bytes // 64, 1)
    order = random_permutation(len(parts), seed).tolist()
    unread = [parts[index].documents(BadRecords()) for index in order]
    while unread:  # Again if some parts have less than their share.
        share = max(num_bytes // len(unread), least)
        for documents in list(unread):
            left = min(share, num_bytes)
            while left > 0:
                if (text := next(documents, None)) is None:
                    unread.remove(documents)
                    break
                yield text
                left -= len(text.encode())
                num_bytes -= len(text.encode())
            if num_bytes <= 0:
                return
