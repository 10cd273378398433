"""Baselines for a model: bits per byte of simple predictors on the same documents.

Letters: V vocabulary.
"""

import zlib

import numpy as np
import numpy.typing as npt

from moelib.core.errors import UserError
from moelib.data.token_source import TokenSource
from moelib.data.token_store import TokenStore


def unigram_bits_per_byte(train: TokenSource, validation: TokenSource) -> float:
    """Returns the bits per byte of a model that knows only the frequency of each token.

    The frequencies are those of `train`, with 1 added to each count. As in a language model's loss,
    the targets are all tokens but the first of each document, end-of-text tokens included, and the
    bytes are those that the targets cover.

    Raises:
        UserError: If the vocabularies differ, or there is nothing to predict.
    """
    if train.vocab_size != validation.vocab_size:
        raise UserError(
            f"{train.name} and {validation.name} have vocabularies of {train.vocab_size} and "
            f"{validation.vocab_size}; prepare both with one tokenizer."
        )
    learned, counts = _count_targets(train) + 1, _count_targets(validation)
    num_bytes = int(counts @ validation.token_num_bytes.astype(np.int64))
    if not num_bytes:
        raise UserError(f"{validation.name} has no text to predict; use a larger split.")
    bits = -np.log2(learned / learned.sum())
    return float(counts @ bits) / num_bytes


def _count_targets(source: TokenSource) -> npt.NDArray[np.int64]:
    """Returns the number of times that each token is a target [V]."""
    counts = np.zeros(source.vocab_size, np.int64)
    for index in range(source.num_documents):
        np.add.at(counts, source.document(index)[1:], 1)
    return counts


def gzip_bits_per_byte(store: TokenStore) -> float:
    """Returns the bits per byte of `gzip -9` on the concatenated documents of a store."""
    packer = zlib.compressobj(9, wbits=31)
    num_bytes = num_packed = 0
    for text in store.texts():
        data = text.encode()
        num_bytes += len(data)
        num_packed += len(packer.compress(data))
    num_packed += len(packer.flush())
    return 8 * num_packed / num_bytes
