import gzip
import math

import pytest

from moelib.data.baselines import gzip_bits_per_byte, unigram_bits_per_byte
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.synthetic import SyntheticTokens
from moelib.data.token_source import InMemoryTokens
from moelib.data.tokenizer import ByteTokenizer


def _tokens(documents: list[list[int]], vocab_size: int = 4) -> InMemoryTokens:
    cfg = InMemoryTokens.default_config().set(documents=documents, vocab_size=vocab_size)
    return cfg.instantiate()


def test_unigram_bits_are_those_of_smoothed_counts():
    train, validation = _tokens([[3, 1, 1, 2, 0]]), _tokens([[3, 1, 2, 0], [1, 0]])
    # Counts of 0 to 3, with 1 added: 2, 3, 2, 1. Targets are 1, 2, 0 and 0; 0 covers no byte.
    bits = -(math.log2(3 / 8) + math.log2(2 / 8) + 2 * math.log2(2 / 8))
    assert unigram_bits_per_byte(train, validation) == pytest.approx(bits / 2)


def test_a_unigram_model_of_the_made_up_language_learns_nothing():
    cfg = SyntheticTokens.default_config().set(vocab_size=65, num_documents=400)
    train, validation = (cfg.clone(seed=seed).instantiate() for seed in (0, 1))
    assert unigram_bits_per_byte(train, validation) == pytest.approx(6, abs=0.1)


def test_vocabularies_must_agree_and_text_be_there():
    with pytest.raises(ValueError, match="4 and 5"):
        unigram_bits_per_byte(_tokens([[1, 2]]), _tokens([[1, 2]], 5))
    with pytest.raises(ValueError, match="InMemoryTokens"):
        unigram_bits_per_byte(_tokens([[1, 2]]), _tokens([[1]]))


def test_gzip_bits_are_those_of_gzip(tmp_path):
    texts = ["some text, and " * 20, "another Grüße " * 30]
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    tokenizer = ByteTokenizer.default_config().instantiate()
    store = prepare(source, tokenizer, str(tmp_path / "store"))
    data = "".join(texts).encode()
    assert gzip_bits_per_byte(store) == 8 * len(gzip.compress(data, 9)) / len(data)
