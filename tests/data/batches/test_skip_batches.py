"""Batches that training skips, by their positions."""

import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.data.batches.input import BatchIterator
from moelib.data.batches.lm_input import LMInputIterator
from moelib.data.batches.skip_batches import SKIPPED, SkippingBatches, merged, parse_range
from moelib.tasks.input import TaskInput
from tests import tiny


def ids(batch):
    return batch["input_ids"].tolist()


@pytest.mark.parametrize("text", ["3", "3:3", "4:3", "-1:3", "a:b", "3:4:5", ""])
def test_a_text_that_is_no_range_is_refused(text):
    with pytest.raises(UserError, match=f"skip_batches has {text!r}"):
        parse_range(text)


def test_ranges_are_merged():
    assert parse_range("3:12") == [3, 12]
    assert merged([(7, 9), [1, 3], [2, 4], [4, 5], (7, 8)]) == [[1, 5], [7, 9]]


def test_batches_are_those_of_the_other_positions_on_any_number_of_hosts():
    lm_input = tiny.input_config().instantiate()
    half = lm_input.config.global_batch_size // 2
    for rows in (range(half), range(half, 2 * half)):
        skipping = SkippingBatches(lm_input.iterator(rows), [[0, 2], [3, 4]])
        for position in (2, 4, 5):
            want = lm_input.batch(position, rows)["input_ids"].tolist()
            assert ids(next(skipping)) == want
            assert skipping.state()["step"] == position + 1
    whole = SkippingBatches(lm_input.iterator(), [[0, 2], [3, 4], [7, 9]])
    whole.restore(skipping.state())  # On another number of hosts, with one more range.
    assert ids(next(whole)) == ids(lm_input.batch(6))
    assert ids(next(whole)) == ids(lm_input.batch(9))


def test_the_end_of_the_data_may_be_skipped():
    lm_input = tiny.input_config(mode=tiny.InputMode.EVALUATE).set(max_batches=4).instantiate()
    assert len(list(SkippingBatches(lm_input.iterator(), [[2, 9]]))) == 2


def test_examples_of_a_task_are_skipped():
    cfg = TaskInput.default_config().set(global_batch_size=2, shuffle=False)
    cfg.examples = [{"x": i} for i in range(10)]
    batches = SkippingBatches(cfg.instantiate().iterator(), [[1, 3]])
    found = [next(batches)["batch"]["x"].tolist() for _ in range(3)]
    np.testing.assert_array_equal(found, [[0, 1], [6, 7], [8, 9]])


def test_batches_that_have_been_trained_on_are_refused():
    lm_input = tiny.input_config().instantiate()
    batches = SkippingBatches(lm_input.iterator(), [[1, 3]])
    state = {**lm_input.iterator().state(), "step": 2}
    with pytest.raises(UserError, match=r"skip_batches=1:3: .* at position 2; set rewind_to"):
        batches.restore(state)
    with pytest.raises(UserError, match=r"skip_batches=1:3: .* at position 2; set rewind_to"):
        batches.follow({**state, "input": {"kind": "another"}})
    batches.restore({**state, "step": 1})
    batches.restore({**state, "step": 2, SKIPPED: [[0, 3]]})
    later = SkippingBatches(lm_input.iterator(), [[1, 8]])  # A range that has grown in time.
    later.restore({**state, "step": 5, SKIPPED: [[1, 5]]})
    with pytest.raises(UserError, match="skip_batches=1:8"):
        later.restore({**state, "step": 6, SKIPPED: [[1, 5]]})


class Stream(LMInputIterator):
    """An iterator without positions, as those of streaming inputs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.can_seek = BatchIterator.can_seek


def test_a_stream_is_refused():
    with pytest.raises(UserError, match="skip_batches=1:3: Stream cannot go to a batch"):
        SkippingBatches(Stream(tiny.input_config().instantiate(), range(8)), [[1, 3]])
