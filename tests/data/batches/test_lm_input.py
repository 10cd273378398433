import json
import re
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from moelib.core.tree import Batch
from moelib.data.batches.input import batch_spec, check_rows, empty_batch
from moelib.data.batches.lm_input import InputMode, LMInput, LMInputIterator
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import (
    DocumentBoundary,
    EpochPlan,
    LongDocuments,
    Packing,
    make_plan,
)
from moelib.data.batches.synthetic import SyntheticInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_source import InMemoryTokens
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import ByteTokenizer
from tests.oracles.packing import check_epochs

LENGTHS = [1, 2, 40, 9, 8, 17, 3, 3, 1, 25, 16, 2, 31, 5]


def _documents(first: int = 0) -> list[list[int]]:
    """Returns documents whose tokens are all different."""
    ends = first + np.cumsum(LENGTHS)
    return [list(range(end - n, end)) for end, n in zip(ends.tolist(), LENGTHS, strict=True)]


def _tokens(first: int = 0) -> InMemoryTokens.Config:
    return InMemoryTokens.default_config().set(documents=_documents(first), vocab_size=1000)


def _config(**fields: object) -> LMInput.Config:
    cfg = LMInput.default_config().set(source=_tokens(), seq_len=16, global_batch_size=4)
    return cfg.set(**fields)


def _pairs(batches: list[Batch]) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        valid = batch["target_labels"] >= 0
        ids, targets = batch["input_ids"][valid], batch["target_labels"][valid]
        pairs.update(zip(ids.tolist(), targets.tolist(), strict=True))
    return pairs


def _all_pairs(documents: list[list[int]]) -> Counter[tuple[int, int]]:
    return Counter((ids[i], ids[i + 1]) for ids in documents for i in range(len(ids) - 1))


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("seq_len", [1, 5, 16, 64])
def test_an_epoch_and_an_evaluation_have_every_target_once(packing, seq_len):
    cfg = _config(packing=packing, seq_len=seq_len, seed=3)
    check_epochs(cfg)
    lm_input = cfg.set(mode=InputMode.EVALUATE).instantiate()
    shapes = [batch["input_ids"].shape for batch in lm_input.iterator()]
    assert shapes == [(4, seq_len)] * lm_input.num_batches


def test_arrays_have_the_stated_shapes():
    batch = _config().instantiate().batch(0)
    assert {name: array.shape for name, array in batch.items()} == batch_spec(4, 16)
    assert {array.dtype.name for array in batch.values()} == {"int32"}


@pytest.mark.parametrize("packing", list(Packing))
def test_segments_and_positions_restart_with_each_document(packing):
    lm_input = _config(packing=packing, mode=InputMode.EVALUATE).instantiate()
    where = {token: (d, i) for d, ids in enumerate(_documents()) for i, token in enumerate(ids)}
    for batch in lm_input.iterator():
        for ids, targets, segments, positions in zip(
            *(batch[name] for name in list(batch_spec(1, 1))[:4]), strict=True
        ):
            valid = segments > 0
            assert (targets[~valid] == -1).all()
            assert (ids[~valid] == lm_input.eos_id).all()
            assert not positions[~valid].any()
            assert valid[: valid.sum()].all()  # Padding stands at the end.
            assert set(segments[valid].tolist()) == set(range(1, segments.max() + 1))
            for segment in range(1, segments.max() + 1):
                mine = segments == segment
                found = [where[token] for token in ids[mine].tolist()]
                assert len({document for document, _ in found}) == 1
                assert positions[mine].tolist() == list(range(mine.sum()))
                offsets = [offset for _, offset in found]
                assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
                assert np.array_equal(ids[mine][1:], targets[mine][:-1])


def test_a_stream_has_one_segment_and_predicts_across_documents():
    cfg = _config(document_boundary=DocumentBoundary.CONTINUE, mode=InputMode.EVALUATE)
    batches = list(cfg.instantiate().iterator())
    ids = np.concatenate([batch["input_ids"] for batch in batches])
    targets = np.concatenate([batch["target_labels"] for batch in batches])
    segments = np.concatenate([batch["segment_ids"] for batch in batches])
    positions = np.concatenate([batch["positions"] for batch in batches])
    valid = segments > 0
    assert set(np.unique(segments)) <= {0, 1}
    assert np.array_equal(positions, np.arange(16) * valid)
    inner = valid[:, 1:]
    assert np.array_equal(targets[:, :-1][inner], ids[:, 1:][inner])
    assert (targets >= 0).sum() == sum(LENGTHS) - 1
    within = _all_pairs(_documents())
    assert within <= _pairs(batches)


def _shares(num_hosts: int, global_batch_size: int = 4) -> list[range]:
    size = global_batch_size // num_hosts
    return [range(start, start + size) for start in range(0, global_batch_size, size)]


@pytest.mark.parametrize("num_hosts", [1, 2, 4])
def test_any_number_of_hosts_has_the_same_global_batch(num_hosts):
    for cfg in (_config(), _mixed()):
        lm_input = cfg.instantiate()
        for step in (0, 7, 100):
            parts = [lm_input.batch(step, rows) for rows in _shares(num_hosts)]
            for name, expected in lm_input.batch(step).items():
                together = np.concatenate([part[name] for part in parts])
                assert np.array_equal(together, expected)


def _mixed(**fields: object) -> LMInput.Config:
    sources = {"a": _tokens(), "b": _tokens(500)}
    weights = {"a": 3.0, "b": 1.0}
    mixture = Mixture.default_config().set(sources=sources, weights=weights)
    return _config(source=mixture, **fields)


def test_a_mixture_has_the_sequences_of_each_source_in_order():
    alone = _config(source=_tokens(500), global_batch_size=1).instantiate()
    lm_input = _mixed().instantiate()
    rows = np.concatenate([lm_input.batch(step)["input_ids"] for step in range(50)])
    of_b = rows[rows[:, 0] >= 500]
    assert len(of_b) == 50
    expected = np.concatenate([alone.batch(step)["input_ids"] for step in range(50)])
    assert np.array_equal(of_b, expected)


def _in_order(cfg: LMInput.Config, names: list[str]) -> LMInput.Config:
    """Returns the config of a mixture with its sources and weights listed in this order."""
    cfg = cfg.clone()
    mixture: Any = cfg.source
    sources = {name: mixture.sources[name] for name in names}
    return cfg.set(source=mixture.clone(sources=sources, weights=dict.fromkeys(names, 1.0)))


def _first_batches(iterator: LMInputIterator) -> list[list[int]]:
    return [next(iterator)["input_ids"].ravel().tolist() for _ in range(6)]


def test_the_order_of_a_mixtures_sources_has_no_effect():
    # Equal weights, which do not divide the pattern: ties are broken by name.
    a, b = (_in_order(_mixed(), names).instantiate() for names in (["a", "b"], ["b", "a"]))
    assert list(a.identity["weights"]) == list(b.identity["weights"])
    assert a.identity == b.identity
    assert _first_batches(a.iterator()) == _first_batches(b.iterator())


def test_a_mixtures_epoch_reads_every_source():
    lm_input = _mixed(global_batch_size=1).instantiate()
    batches = [lm_input.batch(step) for step in range(lm_input.sequences_per_epoch)]
    assert set(_pairs(batches)) == set(_all_pairs(_documents())) | set(_all_pairs(_documents(500)))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_restored_iterator_continues_as_an_unbroken_one(num_hosts):
    lm_input = _mixed().instantiate()
    unbroken = lm_input.iterator()
    for _ in range(5):
        next(unbroken)
    state = json.loads(json.dumps(unbroken.state()))
    others = [_mixed().instantiate().iterator(rows) for rows in _shares(num_hosts)]
    for other in others:
        other.restore(state)
    for _ in range(20):
        expected, parts = next(unbroken), [next(other) for other in others]
        for name in expected:
            assert np.array_equal(np.concatenate([part[name] for part in parts]), expected[name])
    assert unbroken.state() == others[0].state()


def test_the_position_of_another_input_is_refused_with_the_changes():
    state = _config(seed=1).instantiate().iterator().state()
    with pytest.raises(ValueError, match="seq_len was 16 and is 8, seed was 1 and is 0"):
        _config(seq_len=8).instantiate().iterator().restore(state)
    with pytest.raises(ValueError, match=r"\{.*\}.*\{"):
        _config(seed=1, source=_tokens(1)).instantiate().iterator().restore(state)
    with pytest.raises(ValueError, match="None"):
        _mixed(seed=1).instantiate().iterator().restore(state)
    with pytest.raises(ValueError, match="elsewhere"):
        _config().instantiate().iterator().restore({"elsewhere": 1})


def test_bytes_of_targets_are_those_of_the_text(tmp_path):
    texts = ["Grüße", "x", "a longer text \U0001f642 that goes over rows"]
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    prepare(source, ByteTokenizer.default_config().instantiate(), str(tmp_path / "store"))
    store = TokenStore.default_config().set(path=str(tmp_path / "store"))
    lm_input = _config(source=store, mode=InputMode.EVALUATE).instantiate()
    total = sum(int(batch["target_num_bytes"].sum()) for batch in lm_input.iterator())
    # A byte a token, and the first token of a document is no target.
    assert total == sum(len(text.encode()) - 1 for text in texts)
    batch = lm_input.batch(0)
    ends = batch["target_labels"] == lm_input.eos_id
    valid = batch["target_labels"] >= 0
    assert np.array_equal(batch["target_num_bytes"], (valid & ~ends).sum(1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 38, "long_documents": LongDocuments.ERROR}, "seq_len=38: document 2.*40 tok"),
        ({"seq_len": 10_000_000}, f"seq_len=10000000:.*{sum(LENGTHS)} tokens"),
        ({"seq_len": 10_000_000, "mixed": True}, f"seq_len=10000000:.*{2 * sum(LENGTHS)} tokens"),
        ({"mode": InputMode.EVALUATE, "mixed": True}, "mode=EVALUATE"),
        ({"vocab_size": 512}, "999.*vocab_size.*1000"),
    ],
)
def test_data_that_do_not_fit_the_settings_are_refused(fields, message):
    config = _mixed if fields.pop("mixed", False) else _config
    with pytest.raises(ValueError, match=message):
        config(**fields).instantiate()


def test_data_that_just_fit_the_settings_are_taken():
    whole = _config(seq_len=39, long_documents=LongDocuments.ERROR).instantiate()
    assert _pairs([whole.batch(0)]).total() > 0
    all_pairs = sum(LENGTHS) - len(LENGTHS)
    padded = _config(seq_len=1000, mode=InputMode.EVALUATE).instantiate()  # A small split.
    assert (padded.num_batches, _pairs([padded.batch(0)]).total()) == (1, all_pairs)
    assert _config(seq_len=sum(LENGTHS)).instantiate().sequences_per_epoch == 1
    assert _config(vocab_size=1000).instantiate().batch(0)["input_ids"].max() <= 999


def test_an_epoch_is_planned_ahead_in_a_thread(monkeypatch):
    threads = []

    def plan(*args: Any) -> EpochPlan:
        threads.append(threading.current_thread())
        return make_plan(*args)

    expected = [_config().instantiate().batch(step) for step in range(15)]
    monkeypatch.setattr("moelib.data.batches.lm_input.make_plan", plan)
    lm_input = _config().instantiate()
    for step, batch in enumerate(expected):
        found = lm_input.batch(step)
        assert all(np.array_equal(found[name], batch[name]) for name in batch)
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, *[False] * (len(threads) - 1)]
    assert len(threads) >= 4


def test_an_evaluation_can_be_cut_short():
    lm_input = _config(mode=InputMode.EVALUATE, max_batches=2, global_batch_size=1).instantiate()
    assert lm_input.num_batches == len(list(lm_input.iterator())) == 2


@pytest.mark.parametrize("max_batches", [0, 2, 300])  # Of fewer than 20 an epoch.
def test_batches_of_training_end_after_max_batches(max_batches):
    for cfg in (_config(max_batches=max_batches), _mixed(max_batches=max_batches)):
        lm_input = cfg.instantiate()
        batches = list(lm_input.iterator())
        assert len(batches) == lm_input.num_batches == max_batches
        endless = cfg.clone(max_batches=None).instantiate()
        for step, batch in enumerate(batches):
            assert np.array_equal(batch["input_ids"], endless.batch(step)["input_ids"])


def test_a_restored_iterator_ends_where_an_unbroken_one_does():
    cfg = _config(max_batches=7)
    unbroken = cfg.instantiate().iterator()
    for _ in range(3):
        next(unbroken)
    restored = cfg.instantiate().iterator()
    restored.restore(json.loads(json.dumps(unbroken.state())))
    assert len(list(restored)) == len(list(unbroken)) == 4
    longer = cfg.clone(max_batches=9).instantiate().iterator()
    longer.restore(unbroken.state())
    assert len(list(longer)) == 2


def test_an_empty_batch_is_all_padding_of_the_stated_shapes():
    batch = empty_batch(4, 8, eos_id=3)
    assert {name: array.shape for name, array in batch.items()} == batch_spec(4, 8)
    assert {array.dtype.name for array in batch.values()} == {"int32"}
    assert (batch["target_labels"] < 0).all()
    assert not batch["segment_ids"].any()


@pytest.mark.parametrize(
    "rows", [range(0), range(3), range(1, 3), range(4, 8), range(-2, 0), range(0, 4, 2)]
)
def test_rows_that_are_no_share_of_the_batch_are_refused_at_once(rows):
    with pytest.raises(ValueError, match=re.escape(f"{rows=} ") + ".*global_batch_size=4"):
        _config().instantiate().iterator(rows)
    assert [check_rows(rows, 6) for rows in (None, range(2, 4))] == [range(6), range(2, 4)]


@pytest.mark.parametrize("field", ["seq_len", "global_batch_size"])
def test_sizes_must_be_positive(field):
    cfg = SyntheticInput.default_config().set(vocab_size=8, seq_len=4, global_batch_size=4)
    with pytest.raises(ValueError, match=f"{field}=0"):
        cfg.set(**{field: 0}).instantiate()


def _rows(batches: list[Batch]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["input_ids"]]


def _followed(first: LMInput.Config, second: LMInput.Config, num: int) -> tuple[list, Any]:
    """Returns the rows of `num` batches of an input, and the iterator of another after them."""
    batches = first.instantiate().iterator()
    rows = _rows([next(batches) for _ in range(num)])
    after = second.instantiate().iterator()
    after.follow(json.loads(json.dumps(batches.state())))
    return rows, after


def test_another_batch_size_goes_on_with_the_next_sequence() -> None:
    want = _config(global_batch_size=1).instantiate().iterator()
    want = _rows([next(want) for _ in range(3 * 4 + 2 * 6 + 5)])
    rows, after = _followed(_config(), _config(global_batch_size=6), 3)
    rows += _rows([next(after) for _ in range(2)])
    assert after.state()["step"] == 5
    last = _config(global_batch_size=5).instantiate().iterator()
    last.follow(after.state())
    assert rows + _rows([next(last)]) == want


def _mixture(**weights: float) -> LMInput.Config:
    firsts = {"a": 0, "b": 200, "c": 400}
    sources = {name: _tokens(firsts[name]) for name in weights}
    return _config(source=Mixture.default_config().set(sources=sources, weights=weights))


def test_the_sources_of_another_mixture_go_on_where_they_were() -> None:
    num_batches = 40, 30, 50
    rows, after = _followed(_mixture(a=0.7, b=0.3), _mixture(b=0.5, c=0.5), num_batches[0])
    rows += _rows([next(after) for _ in range(num_batches[1])])
    last = _mixture(a=0.2, b=0.3, c=0.5).instantiate().iterator()
    last.follow(after.state())
    rows += _rows([next(last) for _ in range(num_batches[2])])
    for first in (0, 200, 400):
        mine = [row for row in rows if first <= row[0] < first + 200]
        alone = _config(source=_tokens(first), global_batch_size=1).instantiate().iterator()
        assert mine == _rows([next(alone) for _ in mine])
    again = _mixture(a=0.2, b=0.3, c=0.5).instantiate().iterator()
    again.restore(last.state())
    np.testing.assert_array_equal(next(again)["input_ids"], next(last)["input_ids"])


def test_another_length_begins_anew() -> None:
    _, after = _followed(_config(), _config(seq_len=8), 3)
    first = next(_config(seq_len=8).instantiate().iterator())
    np.testing.assert_array_equal(next(after)["input_ids"], first["input_ids"])
