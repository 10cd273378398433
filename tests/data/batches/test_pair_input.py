"""Pairs of answers as sequences: layout, order, and files that are not of use."""

import numpy as np
import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.data.batches.describe import describe_batch
from moelib.data.batches.pair_input import PAIRS, PairInput, arrays_of, write_pairs
from moelib.data.tokens.chat.labels import Example
from moelib.data.tokens.chat.pairs import Pair
from moelib.data.tokens.tokenizer import ByteTokenizer


def example(text, num_labels):
    is_label = np.arange(len(text)) >= len(text) - num_labels
    return Example(text, [*text.encode()], is_label)


PAIR = Pair(example("a?yes", 3), example("a?no", 2))


def opened(folder, pairs=(PAIR,), **fields):
    ByteTokenizer.default_config().instantiate().save(str(folder))
    arrays = arrays_of(pairs)
    arrays["reference_log_probs"] = np.arange(2.0 * len(pairs)).reshape(-1, 2).astype(np.float32)
    write_pairs(str(folder), arrays)
    fields = {"seq_len": 12, "global_batch_size": 2} | fields
    return PairInput.default_config().set(path=str(folder), **fields).instantiate()


def test_a_pair_is_two_documents_of_one_sequence(tmp_path):
    source = opened(tmp_path)
    batch = source.batch(0, range(1))
    ids, labels = batch["input_ids"][0], batch["target_labels"][0]
    assert bytes(ids[:9].astype(np.uint8)) == b"a?yesa?no"
    assert [chr(x) if x >= 0 else "-" for x in labels] == [*"-yes--no----"]
    assert batch["segment_ids"][0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]
    assert batch["reference_log_probs"].tolist() == [[0, 1]]
    abstract = source.config.abstract_batch(lambda: source)
    got = source.batch(0, range(2))
    assert {k: (x.shape, x.dtype) for k, x in abstract.items()} == {
        k: (x.shape, x.dtype) for k, x in got.items()
    }
    shown = describe_batch(batch, source.load_tokenizer(source.config), in_colour=True)
    assert "sequence 0: 2 documents, 9 of 12 tokens\n" in shown
    assert "[['a']] \x1b[32m'?ye'\x1b[0m [['s']]" in shown


def test_epochs_have_every_pair_once_and_positions_are_restored(tmp_path):
    pairs = [Pair(example(f"{i}y", 1), example(f"{i}n", 1)) for i in range(3)]
    source = opened(tmp_path, pairs)
    batches = source.iterator(range(1, 2))
    seen = [source.batch(step, range(2))["input_ids"][:, 0] for step in range(3)]
    first, second = np.split(np.concatenate(seen), 2)
    assert sorted(first) == sorted(second) == [ord(x) for x in "012"]
    next(batches)
    state = batches.state()
    again = source.iterator(range(1, 2))
    again.restore(state)
    assert next(again)["input_ids"][0, 0] == seen[1][1]
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        opened(tmp_path, pairs, seed=1).iterator().restore(state)


def test_another_batch_size_goes_on_with_the_next_pair(tmp_path):
    pairs = [Pair(example(f"{i}y", 1), example(f"{i}n", 1)) for i in range(8)]
    first_ids = lambda batch: batch["input_ids"][:, 0].tolist()
    want = opened(tmp_path, pairs, global_batch_size=16).batch(0, range(16))
    seen, state = [], {}
    for size in (2, 4, 5):
        batches = opened(tmp_path, pairs, global_batch_size=size).iterator()
        batches.follow(state)
        seen += first_ids(next(batches)) + first_ids(next(batches))
        state = batches.state()
    assert state["step"] == 6
    assert seen[:16] == first_ids(want)
    again = opened(tmp_path, pairs, global_batch_size=5).iterator()
    again.restore(state)
    assert first_ids(next(again)) == first_ids(next(batches))
    other = opened(tmp_path, pairs[:4], global_batch_size=4).iterator()
    other.follow(state)
    assert sorted(first_ids(next(other))) == [ord(x) for x in "0123"]
    assert other.state()["step"] == 7


def test_files_of_no_use_are_refused(tmp_path):
    with pytest.raises(UserError, match="set seq_len to 9 or more"):
        opened(tmp_path, seq_len=8)
    with pytest.raises(UserError, match="has no pair"):
        opened(tmp_path, [])
    cfg = opened(tmp_path).config
    (tmp_path / PAIRS).write_bytes((tmp_path / PAIRS).read_bytes()[:-40])
    with pytest.raises(UserError, match=r"pairs\.npz is damaged"):
        cfg.instantiate()
    (tmp_path / PAIRS).unlink()
    with pytest.raises(MissingFileError, match="prepare pairs"):
        cfg.instantiate()
