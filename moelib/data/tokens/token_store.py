"""The token store: tokenized documents on disk, of which batches read what they need.

A store is a folder:

    moelib_prepare.json   the request that made it; another request for the folder is refused
    meta.json             counts, hashes, sizes of files; written last
    tokenizer.json        the tokenizer that made it (absent if none did)
    tokens-00000.bin ...  ids, uint16 or uint32 little endian; documents follow one another
    lengths.npy           tokens of each document, uint32 [N]
    num_bytes.npy         UTF-8 bytes of each document's text, uint32 [N]
    token_num_bytes.npy   bytes of text that each token covers, int32 [V]
    label_bounds.npy      of conversations: begin and end, in turn, of spans of labels, uint64 [2 L]
    first_of_record.npy   of conversations: 1 for the first of each record's documents, uint8 [N]
    chat_template.jinja   of conversations: their template

meta.json holds its own SHA-256 and a hash of each block of the other files. Opening a store checks
all blocks but those of tokens, of which it checks a sample; training checks the rest in an epoch,
and `TokenStore.verify` checks all.

A hash of a document's index and the store's split seed assigns the document to a split (train,
validation); of conversations, a hash of the record's index. No file lists the assignment: the
fractions in meta.json determine it, so training and evaluation cannot disagree.

Letters: N documents, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.config_types import fits
from moelib.core.errors import MissingFileError, UserError
from moelib.data.hashing import random_uniform
from moelib.data.tokens import store_check
from moelib.data.tokens.token_source import TokenSource
from moelib.data.tokens.tokenizer import FILE_NAME, NoTokenizerError, Tokenizer
from moelib.runtime import storage
from moelib.runtime.storage import parse_json, readable, write_json

FORMAT = 1
META = "meta.json"
LENGTHS = "lengths.npy"
NUM_BYTES = "num_bytes.npy"
TOKEN_NUM_BYTES = "token_num_bytes.npy"
LABELS = "label_bounds.npy"
FIRST_OF_RECORD = "first_of_record.npy"
OF_CHAT = LABELS, FIRST_OF_RECORD  # Files of a store of conversations alone.


@dataclasses.dataclass
class StoreMeta:
    """The content of meta.json."""

    vocab_size: int
    eos_id: int
    eos_token: str  # Empty if no tokenizer made the store.
    dtype: str  # "uint16" or "uint32".
    file_tokens: list[int]  # Tokens of each file.
    num_documents: int
    num_tokens: int  # End-of-text tokens included.
    num_bytes: int  # UTF-8 bytes of all texts.
    num_empty: int  # Documents that were skipped because they were empty.
    num_bad_records: int  # Records that were skipped because they held no document.
    num_divided: int  # Long documents of the source that are several here.
    splits: dict[str, float]  # Fraction of documents in each split, in order; they sum to 1.
    split_seed: int
    append_eos: bool
    bos_token: str  # Token before each document; empty for none.
    # Number of spans of labels; None if all tokens are labels, as those of text.
    num_label_spans: int | None
    tokenizer_hash: str
    source_hash: str  # `fingerprint` of the source's parts.
    content_hash: str  # Of tokens and lengths.
    # Of each block of each file but this one and the request; see moelib.data.tokens.store_check.
    block_hashes: dict[str, list[str]]
    format: int = FORMAT


def token_dtype(vocab_size: int) -> str:
    """Returns the smallest dtype for ids: "uint16" or "uint32"."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def tokens_file(index: int) -> str:
    """Returns the name of a file of tokens."""
    return f"tokens-{index:05d}.bin"


def write_meta(path: str, meta: StoreMeta) -> None:
    """Writes a store's meta.json, with the hash of its own content."""
    content = dataclasses.asdict(meta)
    write_json(os.path.join(path, META), content | {"digest": json_digest(content)})


def read_meta(path: str) -> StoreMeta:
    """Returns the content of a store's meta.json.

    Raises:
        MissingFileError: If there is no store, or an unfinished one.
        UserError: If meta.json is damaged or of another format.
    """
    file_path = os.path.join(path, META)
    try:
        with storage.open_to_read(file_path, encoding="utf-8") as file:
            content = parse_json(file.read())
        if content.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if (digest := content.pop("digest", None)) != json_digest(content):
            raise ValueError(f"digest={digest!r:.20} is not that of its content")
        meta = StoreMeta(**content)
        _check_values(meta)
        _check_hashed(meta)
        return meta
    except FileNotFoundError:
        cure = "make one with `moelib prepare`, or set path to one."
        if os.path.isdir(path + ".partial"):
            cure = "it is unfinished: run the same `moelib prepare` again to complete it."
        where = path if os.path.isabs(path) else f"{path} (in {os.getcwd()})"
        raise MissingFileError(f"There is no token store at {where}; {cure}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file_path} is damaged ({error!s:.200}); copy it again, or prepare the store again."
        ) from None


def json_digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of an object, independent of the order of keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_values(meta: StoreMeta) -> None:
    """Raises ValueError if a value of meta.json is of a wrong type or out of range."""
    for name, annotation in typing.get_type_hints(StoreMeta).items():
        value = getattr(meta, name)
        counts = annotation is int and name != "split_seed"
        if not fits(value, annotation) or (counts and not 0 <= value < 1 << 48):
            raise ValueError(f"{name}={value!r:.80}")
    if not 0 <= meta.eos_id < meta.vocab_size <= 1 << 31:
        raise ValueError(f"eos_id={meta.eos_id} with vocab_size={meta.vocab_size}")
    if meta.dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype={meta.dtype!r}")
    if min(meta.file_tokens, default=0) < 0 or sum(meta.file_tokens) != meta.num_tokens:
        raise ValueError(f"num_tokens={meta.num_tokens} is not the sum of file_tokens")
    check_splits(meta.splits)


def _check_hashed(meta: StoreMeta) -> None:
    """Raises ValueError unless meta.json has hashes of all files of a store, and of no others."""
    tokens = {tokens_file(index) for index, count in enumerate(meta.file_tokens) if count}
    hashed = {name for name, hashes in meta.block_hashes.items() if hashes}
    arrays = {LENGTHS, NUM_BYTES, TOKEN_NUM_BYTES}
    arrays |= set() if meta.num_label_spans is None else set(OF_CHAT)
    if wrong := sorted(hashed ^ (tokens | arrays)):
        reason = "not a file of the store" if wrong[0] in hashed else "without hashes"
        raise ValueError(f"block_hashes: {wrong[0]!r:.80} is {reason}")


def split_of_documents(
    num_documents: int, fractions: Sequence[float], seed: int
) -> npt.NDArray[np.int8]:
    """Returns the index of each document's split [N], by a hash of its index and the seed."""
    uniform = random_uniform(num_documents, seed)
    bounds = np.cumsum(fractions)[:-1]
    return np.searchsorted(bounds, uniform, side="right").astype(np.int8)


def check_splits(splits: Mapping[str, float]) -> None:
    """Raises UserError if a name is empty, or fractions are not positive or do not sum to 1."""
    fractions = splits.values()
    if not all(splits) or not (
        all(fraction > 0 for fraction in fractions) and abs(sum(fractions) - 1) <= 1e-9
    ):
        raise UserError(
            f"splits={dict(splits)!s:.200}: set names and positive fractions that sum to 1, for "
            "example {'train': 0.95, 'validation': 0.05}."
        )


class TokenStore(TokenSource):
    """A prepared store, or one split of it."""

    @config_class
    class Config(TokenSource.Config):
        path: str = REQUIRED  # Folder of the store.
        split: str | None = "train"  # Name of a split; None: all documents.
        tokenizer_hash: str | None = None  # If set, a store of another tokenizer is refused.

    def __init__(self, cfg: Config) -> None:
        """Opens the store and checks some of its blocks; tokens are read on use.

        Raises:
            MissingFileError: If there is no store.
            UserError: If it is incomplete, of another tokenizer, or has no such split or documents.
        """
        super().__init__(cfg)
        cfg = self.config
        self.meta = meta = read_meta(cfg.path)
        self.name = f"token store {cfg.path}"
        if cfg.tokenizer_hash not in (None, meta.tokenizer_hash):
            raise UserError(
                f"{self.name} was made by tokenizer {meta.tokenizer_hash:.12}, not by "
                f"{cfg.tokenizer_hash:.12}; prepare it again, or use the tokenizer in its folder."
            )
        self.vocab_size, self.eos_id = meta.vocab_size, meta.eos_id
        self.bos_token = meta.bos_token
        self.file_starts = np.concatenate([[0], np.cumsum(meta.file_tokens, dtype=np.int64)])
        self._check_files()
        self._check_blocks(self._blocks()[0])
        self.token_num_bytes = self._array(TOKEN_NUM_BYTES, meta.vocab_size)
        lengths = self._array(LENGTHS, meta.num_documents).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        if lengths.sum() != meta.num_tokens:
            raise self._damaged(f"{LENGTHS} sums to {lengths.sum()}, not to {meta.num_tokens}")
        if meta.num_label_spans is not None:
            bounds = self._array(LABELS, 2 * meta.num_label_spans).astype(np.int64)
            if not len(bounds) or np.any(np.diff(bounds) < 0) or bounds[-1] > meta.num_tokens:
                raise self._damaged(f"{LABELS} has no ascending positions of its tokens")
            self.label_bounds = bounds
        members = self._members()
        self.starts, self.lengths = starts[members], lengths[members]
        split = "" if cfg.split is None else f" {cfg.split} {meta.splits} {meta.split_seed}"
        self.fingerprint = hashlib.sha256((meta.content_hash + split).encode()).hexdigest()
        self._open = functools.lru_cache(maxsize=256)(_TokenFile)  # Limits the open files.

    def _members(self) -> npt.NDArray[np.bool_] | slice:
        """Returns an index of the documents in the split."""
        meta, split = self.meta, self.config.split
        if split is None:
            return slice(None)
        if split not in meta.splits:
            raise UserError(
                f"{self.name} has no split {split!r}; set split to one of "
                f"{list(meta.splits)!s:.200}, or to None for all documents."
            )
        fractions, wanted = list(meta.splits.values()), list(meta.splits).index(split)
        members = split_of_documents(meta.num_documents, fractions, meta.split_seed) == wanted
        if meta.num_label_spans is not None:
            is_first = self._array(FIRST_OF_RECORD, meta.num_documents)
            members = members[np.cumsum(is_first, dtype=np.int64) - 1]
        if not members.any():
            raise UserError(
                f"Split {split!r} of {self.name} is empty: {meta.splits[split]} of "
                f"{meta.num_documents} documents; prepare it with a larger fraction."
            )
        return members

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self.name} is damaged: {reason}; copy it again, or delete the folder and prepare it "
            "again."
        )

    def _check_files(self) -> None:
        """Raises UserError if a file is missing or has a wrong size."""
        itemsize = np.dtype(self.meta.dtype).itemsize
        for index, tokens in enumerate(self.meta.file_tokens):
            path = self._path(name := tokens_file(index))
            try:
                size = storage.size(path)
            except FileNotFoundError:
                raise self._damaged(f"{name} is missing") from None
            except OSError as error:  # Such as a link to itself.
                raise self._damaged(f"{name} cannot be read ({error.strerror})") from error
            if size != tokens * itemsize:
                raise self._damaged(f"{name} has {size} bytes, not {tokens * itemsize}")

    def _blocks(self) -> tuple[list[store_check.Block], list[store_check.Block]]:
        """Returns the blocks that are checked on opening, with a sample of tokens, and the rest."""
        hashes = self.meta.block_hashes.items()
        blocks = [(name, number) for name, of_file in hashes for number in range(len(of_file))]
        tokens = [block for block in blocks if block[0].startswith("tokens-")]
        stride = max(-(-len(tokens) // store_check.SAMPLED_BLOCKS), 1)
        rest = set(tokens) - set(tokens[::stride])
        return [each for each in blocks if each not in rest], sorted(rest)

    def _check_blocks(self, blocks: Iterable[store_check.Block]) -> None:
        """Raises UserError if a block is not as it was written."""
        for block in blocks:
            hashes = self.meta.block_hashes[block[0]]
            if found := store_check.damage(self.config.path, block, hashes):
                raise self._damaged(found)

    def checks(self) -> Sequence[Callable[[], None]]:
        """Returns a check of each block that opening the store did not read."""
        return [functools.partial(self._check_blocks, [block]) for block in self._blocks()[1]]

    def _array(self, name: str, size: int) -> npt.NDArray[Any]:
        """Returns an array of the store. Raises UserError if it is damaged."""
        try:
            with storage.open_to_read(self._path(name), "rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except OSError as error:
            raise self._damaged(f"{name} cannot be read ({error})") from None
        except Exception as error:  # NumPy's parser of the header raises errors of many classes.
            raise self._damaged(f"{name} is not an array ({error})") from None
        if array.shape != (size,) or array.dtype.kind not in "iu" or array.min(initial=0) < 0:
            raise self._damaged(f"{name} has {array.size} entries of {array.dtype}, not {size}")
        return array

    def _path(self, name: str) -> str:
        return os.path.join(self.config.path, name)

    def read(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64] | Sequence[int],
    ) -> None:
        """Copies pieces, as any source does; those of a URL are requested at the same time."""
        if not storage.is_remote(self.config.path):
            super().read(starts, lengths, out, offsets)
            return
        dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        files = np.searchsorted(self.file_starts, starts, side="right") - 1
        begins = (starts - self.file_starts[files]) * dtype.itemsize
        ends = begins + lengths * dtype.itemsize
        paths = [self._path(tokens_file(index)) for index in files.tolist()]
        with readable(self.config.path):
            pieces = storage.read_ranges(paths, begins.tolist(), ends.tolist())
        for piece, length, offset in zip(pieces, lengths.tolist(), offsets, strict=True):
            ids = np.frombuffer(piece, dtype)
            if len(ids) != length:
                raise self._damaged("it has been cut short while it was in use")
            out[offset : offset + length] = ids

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Returns single tokens [P]."""
        if not storage.is_remote(self.config.path):
            return super().at(positions)
        out = np.empty(len(positions), np.int32)
        self.read(positions, np.ones_like(positions), out, range(len(positions)))
        return out

    def file(self, index: int) -> "_TokenFile":
        """Returns the tokens of a file, which are read on use."""
        return self._open(self._path(tokens_file(index)), self.meta.dtype)

    @property
    def num_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of UTF-8 text of each document of the split [N]."""
        return self._array(NUM_BYTES, self.meta.num_documents).astype(np.int64)[self._members()]

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer that made the store.

        Raises:
            MissingFileError: If there is no store.
            NoTokenizerError: If no tokenizer made the store.
            UserError: If the file in the folder is not the tokenizer that made the store.
        """
        meta = read_meta(cfg.path)
        if not meta.eos_token:
            raise NoTokenizerError(f"Token store {cfg.path} was not made from text.")
        of_store = Tokenizer.default_config().set(path=cfg.path, eos_token=meta.eos_token)
        tokenizer: Tokenizer = of_store.set(bos_token=meta.bos_token or None).instantiate()
        if tokenizer.fingerprint != meta.tokenizer_hash:
            raise UserError(
                f"{FILE_NAME} of token store {cfg.path} has changed ({tokenizer.fingerprint:.12}, "
                f"was {meta.tokenizer_hash:.12}); restore the original, or prepare the store again."
            )
        return tokenizer

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made the store; see `load_tokenizer`."""
        return self.load_tokenizer(self.config)

    def texts(self) -> Iterator[str]:
        """Yields the documents as text, without BOS and end-of-text tokens."""
        tokenizer, begin = self.tokenizer(), bool(self.meta.bos_token)
        for index in range(self.num_documents):
            ids = self.document(index)
            yield tokenizer.decode(ids[begin : len(ids) - self.meta.append_eos])

    def verify(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Reads all files. Raises UserError if one is not as it was written.

        `on_bytes` is called with the number of bytes after each block.
        """
        for block in itertools.chain(*self._blocks()):
            self._check_blocks([block])
            on_bytes(store_check.BLOCK_BYTES)
        if self.meta.eos_token:
            self.tokenizer()


class _TokenFile:
    """The tokens of a file, which slices read.

    A file that is cut short while it is in use is an error; in mapped memory it would be fatal.
    """

    def __init__(self, path: str, dtype: str) -> None:
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("<")
        with readable(path):
            self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __getitem__(self, index: slice) -> npt.NDArray[np.unsignedinteger]:
        size = self._dtype.itemsize
        num_bytes = (index.stop - index.start) * size
        with readable(self._path):
            data = os.pread(self._descriptor, num_bytes, index.start * size)
        if len(data) != num_bytes:
            raise UserError(
                f"{self._path} ends before token {index.stop}: it has been cut short while it was "
                "in use, or its disk fails; restore the file and run the same command again."
            )
        return np.frombuffer(data, self._dtype)


def content_hash(
    file_hashes: Sequence[str],
    lengths: npt.NDArray[np.unsignedinteger],
    label_bounds: npt.NDArray[np.unsignedinteger] | None = None,
) -> str:
    """Returns a store's content hash: of its files' SHA-256, lengths of documents, and labels."""
    content = hashlib.sha256(lengths.astype("<u4").tobytes())
    if label_bounds is not None:
        content.update(label_bounds.astype("<u8").tobytes())
    content.update("".join(file_hashes).encode())
    return content.hexdigest()
