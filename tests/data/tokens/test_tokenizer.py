import json

import numpy as np
import pytest

from moelib.data.tokens.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    Tokenizer,
    train_bpe,
)

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 20,
    "Grüße, 世界! \U0001f642\t\x00\r\n",
    f"before {END_OF_TEXT} after",
    "",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe(TEXTS, 300, str(tmp_path_factory.mktemp("tokenizer")))


def _load(path: object, **fields: str) -> Tokenizer:
    return Tokenizer.default_config().set(path=str(path), **fields).instantiate()


def test_byte_tokenizer_gives_utf8_bytes():
    tokenizer = ByteTokenizer.default_config().instantiate()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.token_num_bytes().tolist() == [1] * 256 + [0]


def test_trained_tokenizer_round_trips_and_counts_bytes(trained, tmp_path):
    assert trained.vocab_size == 300
    for text, ids in zip(TEXTS, trained.encode_batch(TEXTS), strict=True):
        assert ids == trained.encode(text)
        assert trained.eos_id not in ids  # If a text has it, too.
        assert trained.decode(ids) == text
        assert trained.token_num_bytes()[ids].sum() == len(text.encode())
    assert trained.decode([72, trained.eos_id]) == "H" + END_OF_TEXT
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    again = train_bpe(TEXTS, 300, str(tmp_path / "other.json"))
    assert again.to_json() == trained.to_json()


def test_fingerprint_survives_saving_and_formatting(trained, tmp_path):
    trained.save(str(tmp_path))
    assert _load(tmp_path).fingerprint == trained.fingerprint
    content = json.loads(trained.to_json())
    (tmp_path / "compact.json").write_text(json.dumps(dict(reversed(content.items()))))
    assert _load(tmp_path / "compact.json").fingerprint == trained.fingerprint
    del content["model"]["merges"][-1]
    (tmp_path / "changed.json").write_text(json.dumps(content))
    assert _load(tmp_path / "changed.json").fingerprint != trained.fingerprint


def test_truncation_and_dropout_in_the_file_are_unset_the_latter_with_a_warning(
    trained, tmp_path, caplog
):
    content = json.loads(trained.to_json())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert _load(tmp_path).encode_batch(TEXTS) == trained.encode_batch(TEXTS)
    assert not caplog.text
    content |= {"truncation": None, "model": content["model"] | {"dropout": 0.5}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = _load(tmp_path)
    assert "model.dropout=0.5" in caplog.text
    assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])
    assert json.loads(loaded.to_json()) == json.loads(trained.to_json())  # Which workers read.
    assert loaded.fingerprint == trained.fingerprint


def test_bytes_of_a_tokenizer_with_space_markers(tmp_path):
    vocab = {"<0x41>": 0, "▁the": 1, "é": 2, "<eos>": 3}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "added_tokens": [{"id": 3, "content": "<eos>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<eos>"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = _load(tmp_path, eos_token="<eos>")
    assert loaded.token_num_bytes().tolist() == [1, 4, 2, 0]


def test_bytes_of_added_tokens_that_are_text_are_those_of_utf8(trained, tmp_path):
    content = json.loads(trained.to_json())
    added = content["added_tokens"][0] | {"content": "<｜U｜>", "special": False}
    content["added_tokens"].append(added | {"id": trained.vocab_size})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = _load(tmp_path)
    assert loaded.encode("<｜U｜>") == [trained.vocab_size]
    assert loaded.token_num_bytes()[-1] == 9  # Three of ASCII, and twice the three of U+FF5C.


def test_files_that_are_no_tokenizers_are_named(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        _load(tmp_path / "nowhere.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json"):
        _load(tmp_path / "a.json")
    (tmp_path / "b.model").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"b\.model.*SentencePiece"):
        _load(tmp_path / "b.model")
    trained.save(str(tmp_path))
    with pytest.raises(ValueError, match=r"'<\|endoftex\|>'.*<\|endoftext\|>"):
        _load(tmp_path, eos_token="<|endoftex|>")


def test_ids_beyond_the_vocabulary_and_trainings_without_room_are_refused(trained, tmp_path):
    with pytest.raises(ValueError, match=r"Token id 300.*300"):
        trained.decode(np.array([1, 300]))
    with pytest.raises(ValueError, match="vocab_size=256"):
        train_bpe(TEXTS, 256, str(tmp_path))
    with pytest.raises(ValueError, match="2 documents"):
        train_bpe(["", ""], 300, str(tmp_path))
