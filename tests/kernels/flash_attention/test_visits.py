import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import visits as v
from moelib.kernels.flash_attention.reference import MaskSpec


def _table(found):
    """Returns [row, column, first, last, seen, whole] of each visit."""
    found = np.asarray(found)
    reads = v.row, v.column, v.is_first, v.is_last, v.is_seen, v.is_whole
    return np.stack([np.asarray(read(found), int) for read in reads], axis=1).tolist()


def _blocks(*starts, size=4):
    return np.asarray(starts, np.int32)[:, None] + np.arange(size, dtype=np.int32)


def test_a_causal_sequence_visits_the_keys_before():
    index = _blocks(0, 4, 8)
    assert _table(v.visits(index, index, MaskSpec(1.0), by_keys=False)) == [
        [0, 0, 1, 1, 1, 0],
        [1, 0, 1, 0, 1, 1],
        [1, 1, 0, 1, 1, 0],
        [2, 0, 1, 0, 1, 1],
        [2, 1, 0, 0, 1, 1],
        [2, 2, 0, 1, 1, 0],
    ]


def test_by_keys_rows_are_blocks_of_keys():
    index = _blocks(0, 4)
    assert _table(v.visits(index, index, MaskSpec(1.0), by_keys=True)) == [
        [0, 0, 1, 0, 1, 0],
        [0, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 0],
    ]


def test_with_a_window_the_visits_are_linear_in_the_sequence():
    index = _blocks(*range(0, 64, 4))
    found = _table(v.visits(index, index, MaskSpec(1.0, window=4), by_keys=False))
    assert len(found) == 2 * 16 - 1
    assert not any(whole for *_, whole in found)


def test_without_causality_only_padding_is_masked():
    index, keys = _blocks(0, 4), _blocks(0, 4)
    keys[1, 2:] = v.PAST_END
    found = _table(v.visits(index, keys, MaskSpec(1.0, causal=False), by_keys=False))
    assert [whole for *_, whole in found] == [1, 0, 1, 0]


def test_a_row_that_sees_nothing_is_visited_once_for_its_zeros():
    found = v.visits(_blocks(0), _blocks(8, 12), MaskSpec(1.0), by_keys=False)
    assert _table(found) == [[0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(
    "spec", [MaskSpec(1.0), MaskSpec(1.0, window=6), MaskSpec(1.0, causal=False)]
)
def test_a_list_made_on_the_device_sees_the_same_and_loads_nothing_else(spec, by_keys):
    index = _blocks(12, 0, 8, 4)
    known = _table(v.visits(index, index, spec, by_keys=by_keys))
    made = _table(v.visits(jnp.asarray(index), jnp.asarray(index), spec, by_keys=by_keys))
    assert len(made) == 16
    seen = lambda found: sorted((row, column, w) for row, column, _, _, s, w in found if s)
    assert seen(made) == seen(known)
    loads = lambda found: {(row, column) for row, column, *_ in found}
    assert loads(made) == loads(known)
    for row in range(4):
        of_row = [visit for visit in made if visit[0] == row]
        assert [visit[2:4] for visit in of_row] == [[1, 0], [0, 0], [0, 0], [0, 1]]
