"""Streams: the documents of an epoch, their order, and positions that are restored."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest

from moelib.core.tree import Batch
from moelib.data.batches.input import batch_spec
from moelib.data.batches.packing import DocumentBoundary
from moelib.data.batches.prefetch import Prefetcher
from moelib.data.batches.streaming import StreamingInput
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import BadRecordError, InMemorySource
from moelib.data.tokens.tokenizer import ByteTokenizer

TEXTS = [f"{i:03d}" + "x" * (7 * i % 41) for i in range(40)]
RESET, CONTINUE = DocumentBoundary.RESET, DocumentBoundary.CONTINUE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lines")
    for index in range(4):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[index::4]).encode()
        if index % 2:
            (folder / f"{index}.jsonl.gz").write_bytes(gzip.compress(lines))
        else:
            (folder / f"{index}.jsonl").write_bytes(lines)
    return str(folder)


def _config(path: str, **fields: object) -> StreamingInput.Config:
    cfg = StreamingInput.default_config().set(
        source=JsonLines.default_config().set(paths=[path]),
        tokenizer=ByteTokenizer.default_config(),
        seq_len=16,
        global_batch_size=4,
        shuffle_buffer=8,
    )
    return cfg.set(**fields)


def _documents(batches: list[Batch]) -> list[str]:
    """Returns what the batches' rows hold one after another, cut at ends of text."""
    flat = []
    for batch in batches:
        for ids, targets in zip(batch["input_ids"], batch["target_labels"], strict=True):
            for token, target in zip(ids.tolist(), targets.tolist(), strict=True):
                flat.append(chr(token) + ("\n" if target == 256 else ""))
    return "".join(flat).split("\n")


def test_every_document_is_in_an_epoch_once(files):
    iterator = _config(files).instantiate().iterator()
    pairs = sum(map(len, TEXTS))  # Every character, with what follows or the end.
    batches = [next(iterator) for _ in range(1 + pairs // 64)]
    assert {name: a.shape for name, a in batches[0].items()} == batch_spec(4, 16)
    documents = _documents(batches)
    assert Counter(documents[: len(TEXTS)]) == Counter(TEXTS)
    assert documents[: len(TEXTS)] != TEXTS
    assert all((batch["segment_ids"] > 0).all() for batch in batches)


@pytest.mark.parametrize("boundary", [RESET, CONTINUE])
@pytest.mark.parametrize("step", [3, 13, 40])
def test_a_restored_stream_continues_as_an_unbroken_one(files, boundary, step):
    cfg = _config(files, document_boundary=boundary, seed=5)
    unbroken = cfg.instantiate().iterator()
    for _ in range(step):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.state()))
    restored = cfg.instantiate().iterator()
    restored.restore(state)
    for _ in range(30):
        expected, found = next(unbroken), next(restored)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_stream_after_another_input_begins_at_its_first_document_and_counts_on(files):
    want = next(_config(files).instantiate().iterator())
    batches = _config(files).instantiate().iterator()
    batches.follow({"step": 5, "input": {"source": {}}})
    np.testing.assert_array_equal(next(batches)["input_ids"], want["input_ids"])
    assert batches.state()["step"] == 6


def test_a_stream_predicts_across_documents(files):
    batch = next(_config(files, document_boundary=CONTINUE).instantiate().iterator())
    assert np.array_equal(batch["input_ids"].ravel()[1:], batch["target_labels"].ravel()[:-1])
    assert (batch["positions"] == np.arange(16)).all()
    assert (batch["input_ids"] == 256).any()


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_have_documents_of_their_own(files, num_hosts):
    seen: list[str] = []
    size = 4 // num_hosts
    for start in range(0, 4, size):
        iterator = _config(files).instantiate().iterator(range(start, start + size))
        batch = next(iterator)
        assert len(batch["input_ids"]) == size
        seen += _documents([batch])[:-1]
    assert len(set(seen)) == len(seen)


def test_more_hosts_than_files_share_the_lines(files):
    path = f"{files}/0.jsonl"
    seen = []
    for rows in (range(2), range(2, 4)):
        iterator = _config(path).instantiate().iterator(rows)
        seen.append(set(_documents([next(iterator) for _ in range(6)])[:-1]))
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(TEXTS[0::4])


def test_state_of_another_host_is_refused(files):
    state = _config(files).instantiate().iterator(range(2)).state()
    with pytest.raises(ValueError, match=r"rows was \[0, 2\] and is \[2, 4\]"):
        _config(files).instantiate().iterator(range(2, 4)).restore(state)
    with pytest.raises(ValueError, match=r"rows was \[0, 2\] and is \[0, 4\]"):
        _config(files).instantiate().iterator().restore(state)


def test_prefetching_keeps_the_position_of_the_batches_taken(files):
    cfg = _config(files)
    with Prefetcher(cfg.instantiate().iterator(), lambda batch: batch) as batches:
        for _ in range(12):
            next(batches)
        state = batches.state()
        expected = next(batches)
    iterator = cfg.instantiate().iterator()
    iterator.restore(state)
    assert np.array_equal(next(iterator)["input_ids"], expected["input_ids"])


def test_a_broken_line_is_named_or_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a good line"}\n\nbad\n')
    iterator = _config(str(tmp_path)).instantiate().iterator()
    with pytest.raises(BadRecordError, match=r"a.jsonl:3:.*JSON.*max_bad_records=0"):
        next(iterator)
    iterator = _config(str(tmp_path), max_bad_records=1000).instantiate().iterator()
    next(iterator)
    assert iterator.num_bad_records > 0


def test_a_stream_without_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match="0 records"):
        next(_config(str(tmp_path)).instantiate().iterator())


def test_a_vocabulary_beyond_the_models_is_refused(files):
    with pytest.raises(ValueError, match=r"vocab_size=256: .* 257"):
        _config(files, vocab_size=256).instantiate()


def test_a_buffer_of_one_keeps_the_order_of_the_source():
    source = InMemorySource.default_config().set(texts=TEXTS)
    iterator = _config("unused", source=source, shuffle_buffer=1).instantiate().iterator()
    batches = [next(iterator) for _ in range(1 + sum(map(len, TEXTS)) // 64)]
    assert _documents(batches)[: len(TEXTS)] == TEXTS


def test_bad_records_are_counted_once_after_a_restart(tmp_path):
    lines = [json.dumps({"text": text}) if i % 5 else "bad" for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cfg = _config(str(tmp_path), max_bad_records=100)
    unbroken, restored = (cfg.instantiate().iterator() for _ in range(2))
    for _ in range(25):  # Twice through the text, and some.
        next(unbroken)
    restored.restore(unbroken.state())
    for _ in range(5):
        next(unbroken), next(restored)
    position = restored.state()["position"]
    assert position == unbroken.state()["position"]
    assert position["bad_records"] == 8 * position["epoch"] > 0
