import collections
import contextlib
import errno
import itertools
import json
import math
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens import store_check, token_store
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_source import InMemoryTokens
from moelib.data.tokens.token_store import TokenStore, split_of_documents, token_dtype
from moelib.data.tokens.tokenizer import ByteTokenizer
from tests.python_process import finish, start

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


def _change_meta(path: pathlib.Path, **changes: object) -> None:
    """Changes values of meta.json, whose hashes become those of the files as they are."""
    meta = json.loads((path / "meta.json").read_text())
    del meta["digest"]
    hashes = {name: store_check.hash_blocks(str(path / name)) for name in meta["block_hashes"]}
    meta |= {"block_hashes": hashes, **changes}
    digest = token_store.json_digest(meta)
    (path / "meta.json").write_text(json.dumps(meta | {"digest": digest}))


def _flip(path: pathlib.Path, position: int) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _texts(store: TokenStore) -> list[str]:
    return list(store.texts())


def test_all_documents_come_back_with_their_end_and_bytes(path):
    store = _open(path, split=None)
    assert _texts(store) == TEXTS
    assert {int(store.document(i)[-1]) for i in range(len(TEXTS))} == {store.eos_id}
    assert store.num_bytes.tolist() == [len(text) for text in TEXTS]
    assert store.meta.num_bytes == sum(map(len, TEXTS))
    assert store.num_tokens == store.meta.num_tokens == sum(map(len, TEXTS)) + len(TEXTS)
    assert store.token_num_bytes.tolist() == [1] * 256 + [0]
    store.verify()


def test_splits_are_disjoint_and_cover_all_documents(path):
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


def test_a_missing_store_is_named_with_the_cure(tmp_path):
    with pytest.raises(FileNotFoundError, match="`moelib"):
        _open(tmp_path / "store")
    (tmp_path / "store.partial").mkdir()
    with pytest.raises(FileNotFoundError, match=r"/store; .*`moelib prepare`"):
        _open(tmp_path / "store")


def test_splits_and_tokenizers_that_the_store_does_not_have_are_refused(path):
    with pytest.raises(ValueError, match=r"'test'.*\['train', 'vali"):
        _open(path, split="test")
    own = _open(path).meta.tokenizer_hash
    _open(path, tokenizer_hash=own)
    with pytest.raises(ValueError, match=f"tokenizer {own[:12]}"):
        _open(path, tokenizer_hash="abcdef" * 10)
    content = json.loads((path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["use_regex"] = False
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        _open(path).tokenizer()
    _change_meta(path, splits={"train": 1 - 1e-9, "validation": 1e-9})
    with pytest.raises(ValueError, match=r"'validation'.*1e-09.*200 documents"):
        _open(path, split="validation")


def test_a_damaged_store_is_refused(path):
    tokens = path / token_store.tokens_file(1)
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=rf"tokens-00001.bin.*{len(content) - 2} bytes"):
        _open(path)
    tokens.unlink()
    with pytest.raises(ValueError, match=r"tokens-00001\.bin"):
        _open(path)
    tokens.write_bytes(content)
    np.save(path / "lengths.npy", np.ones(3, np.uint32))
    _change_meta(path)
    with pytest.raises(ValueError, match=r"damaged: lengths.npy.*3 entries.*200"):
        _open(path)
    np.save(path / "lengths.npy", np.ones(200, np.uint32))
    _change_meta(path)
    with pytest.raises(ValueError, match=r"damaged: lengths.npy.*200"):
        _open(path)


class _Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return pathlib.Path.touch, (pathlib.Path(self._path),)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("lengths.npy", kind) for kind in ("objects", "pickle", "zip", "negative")),
        ("num_bytes.npy", "objects"),
        ("token_num_bytes.npy", "objects"),
    ],
)
def test_arrays_that_are_not_counts_are_refused(path, name, kind):
    hostile = np.full(len(np.load(path / name)), _Hostile(path / "ran"), object)
    with open(path / name, "wb") as file:
        if kind == "objects":
            np.save(file, hostile, allow_pickle=True)
        elif kind == "pickle":
            hostile.dump(file)
        elif kind == "zip":
            np.savez(file, np.ones(len(hostile), np.uint32))
        else:
            np.save(file, np.full(len(hostile), -1))
    _change_meta(path)
    with pytest.raises(UserError, match=f"damaged: {name}"):
        _ = _open(path).num_bytes
    assert not (path / "ran").exists()


def test_meta_that_names_a_file_outside_the_store_is_refused(path):
    meta = token_store.read_meta(str(path))
    meta.block_hashes["../secret"] = ["0"]
    token_store.write_meta(str(path), meta)
    with pytest.raises(UserError, match=r"block_hashes.*'../secret'"):
        _open(path)


@pytest.mark.parametrize(
    ("name", "left"), [("tokens-00000.bin", {}), (None, {}), ("lengths.npy", {"num_bytes.npy": []})]
)
def test_meta_without_the_hashes_of_a_file_is_refused(path, name, left):
    meta = token_store.read_meta(str(path))
    meta.block_hashes = {k: x for k, x in meta.block_hashes.items() if name and k != name} | left
    token_store.write_meta(str(path), meta)
    with pytest.raises(UserError, match=f"block_hashes: '{'.*' if left or not name else name}' is"):
        _open(path)


def test_tokens_that_cannot_be_read_are_named(path, monkeypatch):
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = _open(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(UserError, match=r"tokens-0000.\.bin.*Input/output error"):
            store.document(0)
    store = _open(path)
    shutil.rmtree(path)
    with pytest.raises(MissingFileError, match=r"tokens-0000.\.bin cannot be read: No such file"):
        store.document(0)


@pytest.mark.parametrize(
    "name", ["tokens-00001.bin", "lengths.npy", "num_bytes.npy", "token_num_bytes.npy"]
)
def test_a_flipped_bit_is_found_when_the_store_is_opened(path, name):
    _flip(path / name, (path / name).stat().st_size // 2)
    with pytest.raises(ValueError, match=f"{path}.*damaged: bytes 0 to .* of {name}"):
        _open(path)


def test_blocks_that_opening_leaves_out_are_found_batch_by_batch(path, monkeypatch):
    monkeypatch.setattr(store_check, "BLOCK_BYTES", 64)
    monkeypatch.setattr(store_check, "SAMPLED_BLOCKS", 3)
    name, meta = token_store.tokens_file(1), token_store.read_meta(str(path))
    for file in meta.block_hashes:
        meta.block_hashes[file] = store_check.hash_blocks(str(path / file))
    token_store.write_meta(str(path), meta)
    _open(path).verify()
    _flip(path / name, 100)
    store = _open(path)
    with pytest.raises(ValueError, match=f"damaged: bytes 64 to 128 of {name}"):
        store.verify()
    found = 0
    for host in range(2):  # Only one of two hosts has the block.
        with contextlib.suppress(ValueError):
            for check in store.checks()[host::2]:
                check()
            found += 1
    assert found == 1
    cfg = LMInput.default_config().set(source=store.config, seq_len=16)
    # Each run checks the store again, and the whole in an epoch: one of one batch, too.
    for step, batch_size in ((0, 2), (1000, 2), (0, 1000)):
        lm_input = cfg.set(global_batch_size=batch_size).instantiate()
        batches = lm_input.iterator()
        batches.step = step
        with pytest.raises(ValueError, match=f"damaged: bytes 64 to 128 of {name}"):
            collections.deque(itertools.islice(batches, lm_input.num_batches), maxlen=0)
    cfg.mode = InputMode.EVALUATE  # One block per batch, and further ones in the next evaluation.
    for batch_size in (1, 1000):
        lm_input = cfg.set(global_batch_size=batch_size).instantiate()
        evaluations = itertools.chain.from_iterable(lm_input.iterator() for _ in store.checks())
        with pytest.raises(ValueError, match=f"damaged: bytes 64 to 128 of {name}"):
            collections.deque(evaluations, maxlen=0)


def test_tokens_that_a_file_has_lost_are_named(path):
    file = _open(path).file(0)
    os.truncate(path / token_store.tokens_file(0), 25)
    assert list(file[0:10]) == list(TEXTS[0].encode())[:10]
    with pytest.raises(UserError, match=rf"{path / token_store.tokens_file(0)}.* 20:"):
        file[10:20]


_READER = """
import os, sys
from moelib.runtime.command_line import run_command
from moelib.data.tokens.token_store import TokenStore

def run(flags, arguments):
    store = TokenStore.default_config().set(path=arguments[0]).instantiate()
    store.document(0)
    os.truncate(os.path.join(arguments[0], "tokens-00000.bin"), 0)
    store.document(1)

class Flags: pass
import dataclasses
sys.exit(run_command("reader", dataclasses.dataclass(Flags), run, sys.argv[1:]))
"""


def test_a_file_that_shrinks_ends_a_command_with_one_line(path):
    # In mapped memory, the signal SIGBUS ended the process without a message.
    [(_, err)] = finish(start("-c", _READER, path), code=2)
    assert len(err.splitlines()) == 1
    assert f"{path / 'tokens-00000.bin'} ends before" in err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_id", -1),
        ("eos_id", 257),
        ("eos_id", True),
        ("vocab_size", 10**30),
        ("vocab_size", "257"),
        ("dtype", "float16"),
        ("dtype", ["uint16"]),
        ("num_tokens", 7),
        ("num_documents", -1),
        ("file_tokens", [1.5]),
        ("file_tokens", {"a": 1}),
        ("splits", {"train": math.nan}),
        ("splits", {"train": "1"}),
        ("splits", {"": 1.0}),
        ("splits", {}),
        ("splits", {"train": 0.5}),
        ("splits", {"train": 1.5, "validation": -0.5}),
        ("append_eos", 1),
        ("tokenizer_hash", None),
    ],
)
def test_a_wrong_value_in_meta_is_named(path, key, value):
    _change_meta(path, **{key: value})
    with pytest.raises(UserError, match=re.escape(f"{key}=")):
        _open(path)


def test_a_change_of_meta_is_noticed(path):
    text = (path / "meta.json").read_text()
    (path / "meta.json").write_text(text.replace('"eos_id": 256', '"eos_id": 255'))
    with pytest.raises(UserError, match=r"meta.json.*digest="):
        _open(path)
    meta = json.loads(text)
    del meta["digest"]
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"meta.json.*digest=None"):
        _open(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "not of format 1"),
        ('{"format": 1}', "digest=None"),
    ],
)
def test_damaged_meta_is_named(path, content, message):
    (path / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=rf"meta.json.*{message}"):
        _open(path)


def _tokens(documents: list[list[int]], vocab_size: int = 10) -> InMemoryTokens:
    cfg = InMemoryTokens.default_config().set(documents=documents, vocab_size=vocab_size)
    return cfg.instantiate()


def test_documents_are_read_back():
    source = _tokens([[1, 2, 3], [4], [5, 6]])
    assert [source.document(i).tolist() for i in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert (source.num_documents, source.num_tokens) == (3, 6)
    with pytest.raises(IndexError, match=r"3 documents.*4"):
        source.document(3)


def test_pieces_go_where_they_are_told():
    source, out = _tokens([[1, 2, 3], [4, 5, 6]]), np.zeros(5, np.int32)
    source.read(np.array([4, 0]), np.array([2, 1]), out, [0, 4])
    assert out.tolist() == [5, 6, 0, 0, 1]
    assert source.at(np.array([5, 0])).tolist() == [6, 1]


def test_fingerprint_sees_tokens_and_boundaries():
    documents = ([[1, 2], [3]], [[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])
    prints = [_tokens(some).fingerprint for some in documents]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("wrong", [10, -1])
def test_id_beyond_the_vocabulary_is_named(wrong):
    with pytest.raises(ValueError, match=rf"id {wrong} \(token 2\).*10"):
        _tokens([[1, 2], [wrong]])


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="InMemoryTokens"):
        _tokens([])
