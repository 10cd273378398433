import os
import pathlib
import threading
import time

import numpy as np
import pytest

from moelib.data.sources.source import InMemorySource
from moelib.data.tokens import corpus_tokenizer as module
from moelib.data.tokens.corpus_tokenizer import (
    corpus_tokenizer,
    sample_documents,
    spread,
)
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.tokenizer import ByteTokenizer, train_bpe
from moelib.runtime.lock import DirectoryInUseError, directory_lock

TEXTS = [f"text number {i}" for i in range(200)]


def _source(texts: list[str]) -> InMemorySource:
    cfg = InMemorySource.default_config()
    return cfg.set(texts=texts).instantiate()


def test_a_tokenizer_is_trained_once_and_one_of_another_size_is_refused(tmp_path, capsys):
    path = str(tmp_path / "new" / "tokenizer.json")
    trained = corpus_tokenizer(_source(TEXTS), 270, path)
    assert "a BPE of 270 tokens" in capsys.readouterr().err
    assert corpus_tokenizer(_source(TEXTS), 270, path).to_json() == trained.to_json()
    assert not capsys.readouterr().err
    corpus_tokenizer(_source(TEXTS), 280, path, allow_fewer=True)
    for size, allow_fewer in ((280, False), (260, True)):
        with pytest.raises(ValueError, match=rf"270 tokens.*--size.*{size}:.*--size"):
            corpus_tokenizer(_source(TEXTS), size, path, allow_fewer=allow_fewer, flag="--size")


def test_two_processes_do_not_train_the_same_tokenizer(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    with (
        directory_lock(f"{path}.partial", setting="output_dir"),
        pytest.raises(DirectoryInUseError, match=rf"process {os.getpid()} .*--output"),
    ):
        corpus_tokenizer(_source(TEXTS), 270, path)
    corpus_tokenizer(_source(TEXTS), 270, path)
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_text_with_too_few_tokens_is_told_from_another_size(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    for reason in ("the text has no more", "trained for another size"):
        with pytest.raises(ValueError, match=rf"--size is 2000: .*{reason}.* set --size to \d+\."):
            corpus_tokenizer(_source(["a text"]), 2000, path, flag="--size")


def test_documents_that_are_held_out_train_no_tokenizer(tmp_path, monkeypatch):
    seen: list[str] = []
    train = module.train_bpe
    monkeypatch.setattr(
        module, "train_bpe", lambda texts, *args: train(seen.extend(texts) or seen, *args)
    )
    splits = {"validation": 0.3, "train": 0.7}
    path = str(tmp_path / "tokenizer.json")
    corpus_tokenizer(_source(TEXTS), 270, path, splits=splits, split_seed=2)
    assert seen == _texts_of_split(tmp_path, TEXTS, splits, 2)
    assert 0 < len(seen) < len(TEXTS)


def _texts_of_split(
    folder: pathlib.Path, texts: list[str], splits: dict[str, float], seed: int
) -> list[str]:
    """Returns the texts that a token store has in the split train."""
    tokenizer, path = ByteTokenizer.default_config().instantiate(), str(folder / "store")
    store = prepare(_source(texts), tokenizer, path, splits=splits, split_seed=seed)
    return list(store.config.clone(split="train").instantiate().texts())


@pytest.mark.parametrize("num_bytes", [600, 10_000])
def test_any_number_of_processes_reads_the_same_sample(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(module, "_PARALLEL_BYTES", 1)
    texts = [f"Text {i} " * (i % 4) for i in range(200)]  # Four parts; some are empty.
    splits = {"test": 0.4, "train": 0.6}
    one, three = (list(module._texts(_source(texts), num_bytes, splits, 1, n)) for n in (1, 3))
    assert one == three
    whole = _texts_of_split(tmp_path, texts, splits, 1)
    assert [text for text in whole if text in set(one)] == one
    assert (one == whole) == (num_bytes == 10_000)


def test_a_share_waits_for_the_tokenizer_that_another_one_trains(tmp_path, caplog):
    path = str(tmp_path / "tokenizer.json")
    options = {"args": (_source(TEXTS), 270, path), "kwargs": {"wait": True}}
    thread = threading.Thread(target=corpus_tokenizer, **options)
    with module._locked(path, wait=False):
        thread.start()
        deadline = time.monotonic() + 60
        while not caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        trained = train_bpe(TEXTS, 270, path)
    thread.join()
    assert f"{path}.partial/.lock (process {os.getpid()} on" in caplog.messages[0]
    assert corpus_tokenizer(_source(TEXTS), 270, path).fingerprint == trained.fingerprint
    assert os.listdir(tmp_path) == ["tokenizer.json"]


def test_a_sample_or_share_comes_from_all_over_and_has_the_asked_size():
    texts = [f"{i:04d}" for i in range(1000)]
    source = _source(texts)
    sample = list(sample_documents(source, 400))
    assert len(sample) == 100
    assert len({int(text) // 64 for text in sample}) == 15  # Parts, of 16.
    assert sample == list(sample_documents(source, 400))
    assert sorted(sample_documents(source, 10_000)) == texts
    few = InMemorySource.default_config().set(texts=["no"] * 64 + texts).instantiate()
    sizes = [sum(map(len, sample_documents(few, 3000, seed))) for seed in range(4)]
    assert all(3000 <= size < 3004 for size in sizes)  # Although the first part has 128 bytes.
    lengths = np.full(1000, 4, np.uint32)
    taken = np.flatnonzero(spread(lengths, 0.1)).tolist()
    assert len(taken) == 101  # The first, and then a tenth.
    assert {number // 100 for number in taken} == set(range(10))
    assert spread(lengths, 1.0).all()
