"""Pieces of a document have the ids of the whole, with every kind of tokenizer."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from moelib.data import document_pieces
from moelib.data.document_pieces import PieceCutter
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
    words = [
        "the",
        "it's",
        "Don't",
        "12345",
        "3.14",
        '"quoted',
        'text"',
        "f(x)",
        "x=[1]",
        "e\u0301te\u0301",
    ]
    words += [
        "中文文本",
        "文。字，",
        "🙂",
        "👩‍👩‍👧",
        "<b>",
        "</b>",
        "...",
        "--",
        "_",
        "ÜBER",
        "ǅ",
        "# a",
    ]
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


_CUT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
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
}
_WHOLE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "no pre-tokenizer": lambda: _bpe(None),
    "Llama 2": lambda: _bpe(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Gemma": lambda: _bpe(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    ),
    "Metaspace whole": lambda: _bpe(pre_tokenizers.Metaspace(split=False)),
    "quotes": lambda: _bpe(_split(r'"[^"]*"|\S+|\s+')),
    "sentences": lambda: _bpe(_split(r"[^.]*\.")),
}


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", [*_CUT, *_WHOLE])
def test_pieces_have_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(document_pieces, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(document_pieces, "_WINDOW", 100)
    tokenizer = (_CUT | _WHOLE)[name]()
    cutter = PieceCutter(tokenizer)
    for seed in range(2):
        text = _text(2000, seed=seed)
        pieces = list(cutter.pieces(text))
        assert "".join(pieces) == text
        ids = list(itertools.chain.from_iterable(_ids(tokenizer, piece) for piece in pieces))
        assert ids == _ids(tokenizer, text)
        assert (max(map(len, pieces)) < 1000) == (name in _CUT)


def test_texts_without_words_are_not_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(document_pieces, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(document_pieces, "_WINDOW", 100)
    cutter = PieceCutter(_CUT["byte-level"]())
    for text in ("", "a" * 1000, " " * 1000, "\n" * 1000):
        assert list(cutter.pieces(text)) == [text] * bool(text)
    chinese = "中文文本，" * 200
    assert max(map(len, cutter.pieces(chinese))) <= 300
