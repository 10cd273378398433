"""Long documents in pieces: their ids, one after another, are those of the whole document.

The memory that `tokenizers` takes is some 200 bytes per byte of text, until the text is encoded. A
piece is therefore encoded with some text that follows it, and the next piece begins at a token from
which that text alone has the same ids. Part of a sequence of tokens is the encoding of its own text
in BPE and Unigram, so that the ids stay equal between words as well as inside long ones.
"""

import codecs
import logging
from collections.abc import Callable, Iterator
from typing import Any

from moelib.runtime.progress import format_bytes

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 17
_MARGIN = 512  # Least number of characters that are encoded after the end of a piece.

_OPENED = "It's 1, \"a 'b `c (d [e {f g <h <!--i /*j " + "word " * _MARGIN
_ENDS = (*"\"'`)]}>.1x\n", "-->", "*/")
_RUN_CHARACTERS = "1aA中. \n"
_RUN = 4 * _MARGIN  # Characters.


def is_local(tokenizer: Any) -> bool:
    """Returns whether words and ids of a `tokenizers.Tokenizer` depend on nearby text alone.

    They do not if a regular expression looks for a closing quote, or groups digits from the right,
    for example.
    """

    def begin(text: str) -> tuple[list[int], list[int]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids[:_MARGIN], encoding.word_ids[:_MARGIN]

    def words(text: str) -> set[tuple[int, int]]:
        """Returns (word, start) of the words in the first half of a run."""
        encoding = tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        first = dict(zip(reversed(encoding.word_ids), reversed(starts), strict=True))
        return {(word, start) for word, start in first.items() if start < _RUN // 2}

    return all(begin(_OPENED + end) == begin(_OPENED) for end in _ENDS) and all(
        words(character * (_RUN + more)) == words(character * _RUN)
        for character in _RUN_CHARACTERS
        for more in (1, 2, 3)
    )


def encode_in_pieces(
    encode: Callable[[str], list[int]], data: bytes, piece_bytes: int, name: str
) -> Iterator[tuple[str, list[int]]]:
    """Yields the pieces of a document in UTF-8, of some `piece_bytes`, and their ids.

    Pieces are longer where the following text alone has other ids; a warning then names the file.
    """
    start = 0
    while len(data) - start > piece_bytes:
        text, _ = codecs.utf_8_decode(data[start : start + piece_bytes])
        ids = encode(text)
        for end in range(len(text) - _MARGIN, max(len(text) - 2 * _MARGIN, 0), -1):
            following = encode(text[end:])
            if ids[len(ids) - len(following) :] == following:
                yield text[:end], ids[: len(ids) - len(following)]
                start += len(text[:end].encode())
                break
        else:
            piece_bytes *= 2
    if min(piece_bytes, len(data)) > 4 * PIECE_BYTES:
        logger.warning(
            "%s: %s of a document were encoded at once, in some %s of memory, because the ids of "
            "this tokenizer depend on text far behind.",
            name,
            *map(format_bytes, (min(piece_bytes, len(data)), 200 * min(piece_bytes, len(data)))),
        )
    text = data[start:].decode()
    yield text, encode(text)
