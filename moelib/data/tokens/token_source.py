"""Token sources: tokenized documents with random access, as packing reads them.

A source is a sequence of documents inside a few flat arrays of tokens ("files"), so that any piece
of a document is one slice. Positions of tokens are global: the files follow one another.

Letters: N documents, V vocabulary, P pieces.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import NoTokenizerError, Tokenizer


class TokenSource(Configurable):
    """Tokenized documents. A subclass sets the attributes and implements `file`."""

    @config_class
    class Config(Configurable.Config):
        pass

    name: str  # In messages.
    vocab_size: int  # Every id is below it.
    eos_id: int
    bos_token: str = ""  # Token before each document; empty for none.
    # Ascending begin and end, in turn, of the spans of tokens that are labels; None: all are.
    label_bounds: npt.NDArray[np.int64] | None = None
    fingerprint: str  # Hash of the tokens and their division into documents.
    token_num_bytes: npt.NDArray[np.int32]  # [V] bytes of text that each token covers.
    starts: npt.NDArray[np.int64]  # [N] position of each document's first token.
    lengths: npt.NDArray[np.int64]  # [N] tokens of each document, end of text included.
    file_starts: npt.NDArray[np.int64]  # Position of each file's first token; last, the total.

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer of a source with this config, without opening its tokens.

        Raises NoTokenizerError if no tokenizer made the token ids.
        """
        raise NoTokenizerError(f"{cls.__name__} has no tokenizer: its token ids stand for no text.")

    @abstractmethod
    def file(self, index: int) -> Any:
        """Returns all tokens of a file: a flat array, or an object whose slices are arrays."""

    def checks(self) -> Sequence[Callable[[], None]]:
        """Returns checks of the data that opening the source did not check.

        Training calls all in its first epoch; hosts share them. They raise UserError at damage.
        """
        return ()

    @property
    def num_documents(self) -> int:
        """Number of documents N."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, end of text included."""
        return int(self.lengths.sum())

    def document(self, index: int) -> npt.NDArray[np.int32]:
        """Returns the ids of a document. Raises IndexError if there is no such document."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"{self.name} has {self.num_documents} documents, not {index + 1}.")
        out = np.empty(self.lengths[index], np.int32)
        self.read(self.starts[index : index + 1], self.lengths[index : index + 1], out, [0])
        return out

    def read(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        out: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64] | Sequence[int],
    ) -> None:
        """Copies P pieces, each inside one document, into a flat array.

        Args:
            starts: Position of each piece's first token [P].
            lengths: Tokens of each piece [P].
            out: The array to write.
            offsets: Index in `out` of each piece's first token [P].
        """
        files = np.searchsorted(self.file_starts, starts, side="right") - 1
        local = starts - self.file_starts[files]
        get = self.file
        for index, offset, start, length in zip(
            files.tolist(),
            np.asarray(offsets).tolist(),
            local.tolist(),
            lengths.tolist(),
            strict=True,
        ):
            out[offset : offset + length] = get(index)[start : start + length]

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Returns single tokens [P]."""
        files = np.searchsorted(self.file_starts, positions, side="right") - 1
        local = positions - self.file_starts[files]
        pairs = zip(files.tolist(), local.tolist(), strict=True)
        return np.array([self.file(i)[j : j + 1][0] for i, j in pairs], np.int32)


class InMemoryTokens(TokenSource):
    """Documents of token ids given in the config: for tests and examples."""

    @config_class
    class Config(TokenSource.Config):
        documents: Sequence[Sequence[int]] = REQUIRED  # Token ids of each document.
        vocab_size: int = REQUIRED  # Number of token ids.
        eos_id: int = 0  # Id of the end-of-text token.

    def __init__(self, cfg: Config) -> None:
        """Checks the ids. Raises UserError if one is not in the vocabulary, or there is none."""
        super().__init__(cfg)
        cfg = self.config
        if not cfg.documents:
            raise UserError("InMemoryTokens has no documents; set documents to at least one.")
        self._hold([np.asarray(ids, np.int64) for ids in cfg.documents], cfg.vocab_size, cfg.eos_id)

    def _hold(
        self, documents: Sequence[npt.NDArray[np.integer]], vocab_size: int, eos_id: int
    ) -> None:
        self.name = f"{type(self).__name__} of {len(documents)} documents"
        tokens = np.concatenate(documents)
        check_vocabulary(tokens, vocab_size, self.name)
        self._tokens = tokens.astype(np.int32)
        self.vocab_size, self.eos_id = vocab_size, eos_id
        self.token_num_bytes = np.ones(vocab_size, np.int32)
        self.token_num_bytes[eos_id] = 0
        self.lengths = np.array([len(ids) for ids in documents], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.file_starts = np.array([0, len(tokens)], np.int64)
        content = hashlib.sha256(self._tokens.astype("<i4").tobytes())
        content.update(self.lengths.astype("<i8").tobytes())
        self.fingerprint = content.hexdigest()

    def file(self, index: int) -> npt.NDArray[np.int32]:
        """Returns all tokens."""
        del index
        return self._tokens


def check_vocabulary(tokens: npt.NDArray[np.integer], vocab_size: int, name: str) -> None:
    """Raises UserError if an id is negative or not below `vocab_size`."""
    if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab_size):
        index = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise UserError(
            f"{name}: token id {tokens.flat[index]} (token {index}) is beyond the vocabulary of "
            f"{vocab_size}; set vocab_size above every id, or use the matching tokenizer."
        )
