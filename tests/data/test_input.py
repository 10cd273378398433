import pytest

from moelib.data.input import batch_spec, empty_batch, rows_of_host
from moelib.data.synthetic import SyntheticInput


def test_an_empty_batch_is_all_padding_of_the_stated_shapes():
    batch = empty_batch(4, 8, eos_id=3)
    assert {name: array.shape for name, array in batch.items()} == batch_spec(4, 8)
    assert {array.dtype.name for array in batch.values()} == {"int32"}
    assert (batch["target_labels"] < 0).all()
    assert not batch["segment_ids"].any()


def test_sequences_are_distributed_over_hosts():
    assert [list(rows_of_host(6, host, 3)) for host in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_hosts_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"global_batch_size=6 .* 4 hosts"):
        rows_of_host(6, 0, 4)
    with pytest.raises(ValueError, match=r"host_index=2: .* num_hosts=2"):
        rows_of_host(6, 2, 2)


@pytest.mark.parametrize("field", ["seq_len", "global_batch_size"])
def test_sizes_must_be_positive(field):
    cfg = SyntheticInput.default_config().set(vocab_size=8, seq_len=4, global_batch_size=4)
    with pytest.raises(ValueError, match=f"{field}=0"):
        cfg.set(**{field: 0}).instantiate()
