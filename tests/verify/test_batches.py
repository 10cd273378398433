"""Batches of `verify`: their content, and the effect of each change."""

from types import SimpleNamespace

import numpy as np
import pytest

from moelib.data.batches.pair_input import PairInput
from moelib.models.objective import DirectPreference
from moelib.verify import batches
from tests.tiny import model_config

BATCH = batches.packed_batch(8, 32, 50, seed=0)


def test_rows_have_two_documents_and_padding_the_last_only_padding():
    segments = BATCH["segment_ids"]
    assert {1, 2} <= set(segments[0].tolist())
    assert not segments[-1].any()
    assert len({int((row == 0).sum()) for row in segments[:-1]}) > 3
    labels, ids = BATCH["target_labels"], BATCH["input_ids"]
    counted = labels >= 0
    assert counted.any()
    assert not counted[segments == 0].any()
    np.testing.assert_array_equal(labels[:, :-1][counted[:, :-1]], ids[:, 1:][counted[:, :-1]])


def test_labels_do_not_cross_documents():
    segments, labels = BATCH["segment_ids"], BATCH["target_labels"]
    crosses = segments[:, :-1] != segments[:, 1:]
    assert (labels[:, :-1][crosses] < 0).all()


@pytest.mark.parametrize("document", [1, 2])
def test_one_document_is_changed_or_counted(document):
    inside = BATCH["segment_ids"] == document
    other = batches.with_other_segment(BATCH, document, 50, seed=1)
    changed = other["input_ids"] != BATCH["input_ids"]
    assert changed[inside].any()
    assert not changed[~inside].any()
    labels = batches.with_loss_of(BATCH, document)["target_labels"]
    assert (labels[inside] >= 0).any()
    assert (labels[~inside] < 0).all()


def test_only_padding_is_changed():
    other = batches.with_other_segment(BATCH, 0, 50, seed=1)
    changed = other["input_ids"] != BATCH["input_ids"]
    assert changed[BATCH["segment_ids"] == 0].any()
    assert not changed[BATCH["segment_ids"] > 0].any()


def test_twice_has_two_tokens_for_each_of_once():
    twice, once = batches.first_half_twice(BATCH), batches.first_half_padded(BATCH)
    assert (twice["segment_ids"] > 0).sum() == 2 * (once["segment_ids"] > 0).sum()
    np.testing.assert_array_equal(twice["input_ids"][:4], once["input_ids"][:4])
    assert (batches.all_padding(BATCH)["target_labels"] < 0).all()


def test_sequences_without_room_are_refused():
    with pytest.raises(ValueError, match=r"input\.seq_len=8"):
        batches.packed_batch(8, 8, 50, seed=0)


def test_an_objective_has_its_arrays():
    model = model_config(objective=DirectPreference.default_config())
    pairs = PairInput.default_config().set(global_batch_size=4, seq_len=16)
    config = SimpleNamespace(model=model, input=pairs)
    trainer = SimpleNamespace(config=config, model=model.instantiate(parent=None))
    drawn = batches.batches_of(trainer)
    first, second = next(drawn), next(drawn)
    assert DirectPreference.default_config().instantiate().applies_to(first)
    assert first["reference_log_probs"].shape == (4, 2)  # Of each pair's two answers.
    assert not np.array_equal(first["reference_log_probs"], second["reference_log_probs"])
