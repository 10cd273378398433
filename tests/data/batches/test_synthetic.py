import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from moelib.data.batches.lm_input import InputMode
from moelib.data.batches.synthetic import SyntheticInput, SyntheticTokens, random_walk, step_entropy


def test_measured_entropy_of_a_step_is_the_stated_one():
    walk = random_walk(200_000, 17, seed=0, document=0)
    after: dict[int, Counter[int]] = defaultdict(Counter)
    for word, following in zip(walk[:-1].tolist(), walk[1:].tolist(), strict=True):
        after[word][following] += 1
    nats = -sum(
        count * math.log(count / counts.total())
        for counts in after.values()
        for count in counts.values()
    )
    assert nats / (len(walk) - 1) == pytest.approx(step_entropy(), abs=0.003)
    frequencies = np.bincount(walk) / len(walk)
    assert np.allclose(frequencies, 1 / 17, atol=0.003)


def test_input_has_words_and_ends_and_needs_no_disk():
    cfg = SyntheticInput.default_config().set(vocab_size=64, seq_len=32, global_batch_size=8)
    batch = cfg.instantiate().batch(0)
    assert batch["input_ids"].min() >= 1
    assert batch["input_ids"].max() < 64
    assert (batch["target_labels"] == 0).any()
    again = cfg.clone().instantiate().batch(0)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)
    other = cfg.clone(seed=1).instantiate().batch(0)
    assert not np.array_equal(batch["input_ids"], other["input_ids"])


def test_an_evaluation_can_have_documents_of_its_own():
    source = SyntheticTokens.default_config().set(vocab_size=64, seed=7, num_documents=8)
    cfg = SyntheticInput.default_config().set(seq_len=32, global_batch_size=8, source=source)
    lm_input = cfg.set(mode=InputMode.EVALUATE, vocab_size=64).instantiate()
    assert lm_input.sources[0].num_documents == 8
    assert len(list(lm_input.iterator())) == lm_input.num_batches


def test_vocabulary_must_be_set_and_leave_words():
    cfg = SyntheticInput.default_config().set(seq_len=32, global_batch_size=8)
    with pytest.raises(ValueError, match="vocab_size=None"):
        cfg.instantiate()
    with pytest.raises(ValueError, match="vocab_size=5"):
        cfg.set(vocab_size=5).instantiate()
