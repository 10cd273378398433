"""Pieces of a document have the ids of the whole, with every kind of tokenizer."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from moelib.data import document_pieces
from moelib.data.document_pieces import encode_in_pieces, is_local
from moelib.data.tokenizer import ByteTokenizer

# Of cl100k_base and Llama 3; the last two alternatives are those of GPT-2 and most others, too.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _text(num_words: int, seed: int = 0) -> str:
    """Returns words, numbers, quotes, code, Chinese and emoji with all kinds of white space."""
    rng = random.Random(seed)
    words = ["the", "it's", "Don't", "12345", "3.14", '"quoted', 'text"', "f(x)", "x=[1]"]
    words += ["e\u0301te\u0301", "中文文本", "文。字，", "🙂", "👩‍👩‍👧", "<b>", "</b>", "..."]
    words += ["--", "_", "ÜBER", "ǅ", "# a"]
    spaces = [" "] * 12 + ["\n", "\n\n", "  ", "\t", "\r\n", "\u00a0", "", "\n    ", " \n"]
    return "".join(rng.choice(words) + rng.choice(spaces) for _ in range(num_words))


def _bpe(pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=False, unk_token="?"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["?"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_text(1000, seed=1)], trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _split(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, unk_token="?", special_tokens=["?"]
    )
    tokenizer.train_from_iterator([_text(1000, seed=1)], trainer)
    return tokenizer


def _llama(pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    """Returns a tokenizer without words, trained with words."""
    tokenizer = _bpe(pre_tokenizers.Metaspace())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return tokenizer


def _with_added_tokens() -> tokenizers.Tokenizer:
    tokenizer = _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens(["  ", "    ", tokenizers.AddedToken("f(x)", lstrip=True), "3.14 <b>"])
    return tokenizer


def _bert() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="?"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=["?"])
    tokenizer.train_from_iterator([_text(1000, seed=1)], trainer)
    return tokenizer


_TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": lambda: ByteTokenizer.default_config().instantiate()._tokenizer,
    "byte-level": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level with a prefix": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "cl100k": lambda: _bpe(_split(_CL100K)),
    "Qwen": lambda: _bpe(_split(_CL100K.replace("{1,3}", "")), normalizers.NFC()),
    "DeepSeek": lambda: _bpe(_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK)),
    "digits": lambda: _bpe(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    ),
    "Metaspace": lambda: _bpe(pre_tokenizers.Metaspace()),
    "Metaspace first": lambda: _bpe(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "Metaspace never": lambda: _bpe(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "Unigram": _unigram,
    "added tokens": _with_added_tokens,
    "white space": lambda: _bpe(pre_tokenizers.Whitespace()),
    "punctuation": lambda: _bpe(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    ),
    "BERT": _bert,
    "no pre-tokenizer": lambda: _bpe(None),
    "Llama 2": lambda: _llama(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Gemma": lambda: _bpe(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    ),
    "Metaspace whole": lambda: _llama(pre_tokenizers.Metaspace(split=False)),
    "phrases": lambda: _bpe(pre_tokenizers.Metaspace("▁", "never", split=False)),
    "quotes": lambda: _bpe(_split(r'"[^"]*"|\S+|\s+')),
    "sentences": lambda: _bpe(_split(r"[^.]*\.")),
    "thousands": lambda: _bpe(_split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\p{N}]+")),
    "thousands of words": lambda: _bpe(_split(r"\d{1,3}(?=(\d{3})*\b)|\D+")),
}
_NOT_LOCAL = ("quotes", "thousands", "thousands of words")


_tokenizer = functools.cache(lambda name: _TOKENIZERS[name]())


def _encode(name: str) -> Callable[[str], list[int]]:
    return lambda text: _tokenizer(name).encode(text, add_special_tokens=False).ids


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that are encoded; documents of 700 bytes are already long."""
    monkeypatch.setattr(document_pieces, "_MARGIN", 100)
    monkeypatch.setattr(document_pieces, "PIECE_BYTES", 700)
    return []


def _check(name: str, text: str, encoded: list[int]) -> None:
    """Raises AssertionError if the pieces of a text have other ids."""
    encode = _encode(name)
    whole = encode(text)

    def counted(text: str) -> list[int]:
        encoded.append(len(text.encode()))
        return encode(text)

    pieces = encode_in_pieces(counted, text.encode(), 700, "a.jsonl")
    texts, ids = zip(*pieces, strict=True)
    assert "".join(texts) == text
    assert list(itertools.chain.from_iterable(ids)) == whole, text


@pytest.mark.parametrize("name", _TOKENIZERS)
def test_pieces_have_the_ids_of_the_whole(name, encoded):
    assert is_local(_tokenizer(name)) == (name not in _NOT_LOCAL)
    if name in _NOT_LOCAL:
        return
    for seed in range(2):
        _check(name, _text(1000, seed), encoded)
    assert max(encoded) <= 700


_LONG_WORDS = {
    "emoji": "🙂👩‍👩‍👧🙃" * 300,
    "Chinese": "中文文本，" * 300,
    "digits": "".join(random.Random(3).choices("0123456789", k=5000)),
    "genome": "".join(random.Random(4).choices("ACGT", k=5000)),
    "letter": "a" * 5001,
    "spaces": "a" + " " * 5001 + "b",
    "lines": "\n" * 5001,
    "base64": "".join(random.Random(5).choices("abcXYZ0189+/", k=5000)),
}


@pytest.mark.parametrize("text", _LONG_WORDS.values(), ids=_LONG_WORDS)
@pytest.mark.parametrize("name", ["byte-level", "cl100k", "no pre-tokenizer", "Llama 2", "Unigram"])
def test_long_words_have_the_ids_of_the_whole(name, text, encoded):
    _check(name, text, encoded)
    if name in ("byte-level", "cl100k", "no pre-tokenizer"):
        assert max(encoded) <= 700
