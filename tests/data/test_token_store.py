import json
import pathlib
import re

import numpy as np
import pytest

from moelib.data import token_store
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.token_store import TokenStore, check_splits, split_of_documents, token_dtype
from moelib.data.tokenizer import ByteTokenizer

TEXTS = [f"document {i} " + "x" * (i % 7) for i in range(200)]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    source = InMemorySource.default_config().set(texts=TEXTS).instantiate()
    tokenizer = ByteTokenizer.default_config().instantiate()
    splits = {"train": 0.75, "validation": 0.25}
    prepare(source, tokenizer, str(tmp_path / "store"), splits=splits, split_seed=3)
    return tmp_path / "store"


def _open(path: pathlib.Path, **fields: object) -> TokenStore:
    return TokenStore.default_config().set(path=str(path), **fields).instantiate()


def _texts(store: TokenStore) -> list[str]:
    return list(store.texts())


def test_all_documents_come_back_with_their_end_and_bytes(path: pathlib.Path):
    store = _open(path, split=None)
    assert _texts(store) == TEXTS
    assert {int(store.document(i)[-1]) for i in range(len(TEXTS))} == {store.eos_id}
    assert store.num_bytes.tolist() == [len(text) for text in TEXTS]
    assert store.meta.num_bytes == sum(map(len, TEXTS))
    assert store.num_tokens == store.meta.num_tokens == sum(map(len, TEXTS)) + len(TEXTS)
    assert store.token_num_bytes.tolist() == [1] * 256 + [0]
    store.verify()


def test_splits_are_disjoint_and_cover_all_documents(path: pathlib.Path):
    train, validation = (_open(path, split=split) for split in ("train", "validation"))
    assert sorted(_texts(train) + _texts(validation)) == sorted(TEXTS)
    assert 30 < validation.num_documents < 70
    assert train.fingerprint != validation.fingerprint


def test_split_of_a_document_does_not_depend_on_how_many_there_are():
    few, many = (split_of_documents(n, [0.9, 0.05, 0.05], 7) for n in (1000, 100_000))
    assert np.array_equal(few, many[:1000])
    assert np.allclose(np.bincount(many) / len(many), [0.9, 0.05, 0.05], atol=0.005)
    assert not np.array_equal(few, split_of_documents(1000, [0.9, 0.05, 0.05], 8))


def test_ids_are_stored_in_the_smallest_type():
    assert [token_dtype(size) for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


@pytest.mark.parametrize("splits", [{}, {"train": 0.5}, {"train": 1.5, "validation": -0.5}])
def test_fractions_that_make_no_whole_are_refused(splits: dict[str, float]):
    with pytest.raises(ValueError, match=re.escape(str(splits))):
        check_splits(splits)


def test_a_missing_store_is_named_with_the_cure(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="`moelib"):
        _open(tmp_path / "store")
    (tmp_path / "store.partial").mkdir()
    with pytest.raises(FileNotFoundError, match=r"/store; .*`moelib prepare`"):
        _open(tmp_path / "store")


def test_an_unknown_split_is_named(path: pathlib.Path):
    with pytest.raises(ValueError, match=r"'test'.*\['train', 'vali"):
        _open(path, split="test")


def test_a_split_without_documents_is_refused(path: pathlib.Path):
    meta = json.loads((path / "meta.json").read_text())
    meta["splits"] = {"train": 1 - 1e-9, "validation": 1e-9}
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"Split 'validation'.*1e-09.*200 documents"):
        _open(path, split="validation")


def test_another_tokenizer_is_refused(path: pathlib.Path):
    own = _open(path).meta.tokenizer_hash
    _open(path, tokenizer_hash=own)
    with pytest.raises(ValueError, match=f"tokenizer {own[:12]}"):
        _open(path, tokenizer_hash="abcdef" * 10)


def test_a_changed_tokenizer_file_is_noticed(path: pathlib.Path):
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = False
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        _open(path).tokenizer()


def test_a_damaged_store_is_refused(path: pathlib.Path):
    tokens = path / token_store.tokens_file(1)
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=rf"damaged: tokens-00001.bin.*{len(content) - 2} bytes"):
        _open(path)
    tokens.unlink()
    with pytest.raises(ValueError, match=r"damaged: tokens-00001.bin"):
        _open(path)
    tokens.write_bytes(content)
    np.save(path / "lengths.npy", np.ones(3, np.uint32))
    with pytest.raises(ValueError, match=r"damaged: lengths.npy.*3 entries.*200"):
        _open(path)
    np.save(path / "lengths.npy", np.ones(200, np.uint32))
    with pytest.raises(ValueError, match=r"damaged: lengths.npy.*200"):
        _open(path)
    (path / "lengths.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"damaged: lengths.npy"):
        _open(path)


def test_changed_tokens_are_found_by_verify(path: pathlib.Path):
    tokens = path / token_store.tokens_file(0)
    content = bytearray(tokens.read_bytes())
    content[0] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        _open(path).verify()
    content[:2] = b"\x01\x01"
    tokens.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens-00000.bin:.*id 257 \(token 0\)"):
        _open(path).verify()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "not of format 1"),
        ('{"format": 1}', "damaged .*missing"),
    ],
)
def test_damaged_meta_is_named(path: pathlib.Path, content: str, message: str):
    (path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=rf"meta.json.*{message}"):
        _open(path)
