import errno
import re
import threading
import traceback

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moelib.core.tree import Batch
from moelib.data.batches import prefetch
from moelib.data.batches.input import BatchIterator, State
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.prefetch import Prefetcher, host_rows, put_batch
from moelib.data.batches.synthetic import SyntheticInput


def _input(**fields: object) -> LMInput:
    cfg = SyntheticInput.default_config().set(vocab_size=64, seq_len=32, global_batch_size=8)
    return cfg.set(**fields).instantiate()


def _sharding(shape: tuple[int, ...], names: tuple[str, ...], spec: PartitionSpec) -> NamedSharding:
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, spec)


def _same(batch: Batch) -> Batch:
    return batch


def test_batches_come_in_order_and_end():
    lm_input = _input(mode=InputMode.EVALUATE)
    with Prefetcher(lm_input.iterator(), _same) as batches:
        taken = list(batches)
        with pytest.raises(StopIteration):
            next(batches)
    for batch, expected in zip(taken, lm_input.iterator(), strict=True):
        assert np.array_equal(batch["input_ids"], expected["input_ids"])


def test_state_is_the_position_after_what_was_taken_not_read():
    lm_input = _input()
    read = threading.Semaphore(0)

    def put(batch: Batch) -> Batch:
        read.release()
        return batch

    with Prefetcher(lm_input.iterator(), put, num_batches=3) as batches:
        assert batches.state()["step"] == 0
        next(batches)
        for _ in range(4):  # One taken and three kept ready.
            assert read.acquire(timeout=10)
        assert batches.state()["step"] == 1
        other = lm_input.iterator()
        other.restore(batches.state())
        assert np.array_equal(next(other)["input_ids"], next(batches)["input_ids"])


class _Failing(BatchIterator):
    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> Batch:
        self.count += 1
        if self.count == 3:
            raise ValueError("index=2")
        return {}

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        raise NotImplementedError


def test_an_error_arrives_where_its_batch_would_have():
    with Prefetcher(_Failing(), _same) as batches:
        next(batches)
        next(batches)
        for _ in range(2):  # And again, should anyone ask.
            with pytest.raises(ValueError, match="index=2") as raised:
                next(batches)
        lines = "".join(traceback.format_exception(raised.value))
        assert 'raise ValueError("index=2")' in lines


class _Flaky(BatchIterator):
    """Fails once before its second batch, after which it has lost its position."""

    def __init__(self, error: Exception) -> None:
        self.step = 0
        self._error: Exception | None = error

    def __next__(self) -> Batch:
        self.step += 1
        if self.step == 2 and self._error is not None:
            error, self._error = self._error, None
            self.step = 100
            raise error
        return {"step": np.array(self.step)}

    def state(self) -> State:
        return {"step": self.step}

    def restore(self, state: State) -> None:
        self.step = state["step"]


def _caused(cause: Exception) -> Exception:
    error = ValueError("cannot be read")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "gone"), _caused(OSError(errno.ESTALE, "x")), TimeoutError("late")]
)
def test_a_batch_is_read_again_after_a_transient_error(error, monkeypatch, caplog):
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: pauses.append(seconds))
    pauses: list[float] = []
    batches = Prefetcher(_Flaky(error), _same, num_batches=0)
    assert [int(next(batches)["step"]) for _ in range(3)] == [1, 2, 3]
    assert pauses == [1]
    assert re.search(r"NO BATCH of _Flaky, after step 1: .*Next try in 1 s", caplog.text)


@pytest.mark.parametrize(
    ("error", "num_retries"), [(FileNotFoundError(2, "no file"), 5), (OSError(errno.EIO, "x"), 0)]
)
def test_other_errors_are_raised_and_name_input_and_position(error, num_retries):
    batches = Prefetcher(_Flaky(error), _same, num_batches=0, num_retries=num_retries)
    next(batches)
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value.__notes__ == ["No batch of _Flaky, after step 1."]


def test_a_lasting_error_ends_the_retries(monkeypatch):
    class Lasting(_Flaky):
        def restore(self, state: State) -> None:
            raise OSError(errno.ETIMEDOUT, "still away")

    pauses: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: pauses.append(seconds))
    batches = Prefetcher(Lasting(OSError(errno.EIO, "x")), _same, num_batches=0, num_retries=3)
    next(batches)
    with pytest.raises(OSError, match="still away"):
        next(batches)
    assert pauses == [1, 2, 4]


def test_a_stalled_read_is_reported_with_the_calls_of_its_thread(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "_REPORT_SECONDS", 0.05)
    go_on = threading.Event()

    class Stalled(_Flaky):
        def __next__(self) -> Batch:
            while "no batch for" not in caplog.text:
                go_on.wait(0.01)
            return {}

    with Prefetcher(Stalled(OSError()), _same) as batches:
        next(batches)
    assert re.search(r"after step 0; its thread is in .*__next__ \(test_prefetch", caplog.text)


def test_closing_ends_the_thread_at_any_time():
    threads = threading.active_count()
    batches = Prefetcher(_input().iterator(), _same)
    assert threading.active_count() == threads + 1
    batches.close()
    batches.close()
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="prefetcher"):
        next(batches)


def test_batches_lie_on_devices_as_told():
    sharding = _sharding((4, 2), ("data", "seq"), PartitionSpec("data", "seq"))
    lm_input = _input()
    iterator = lm_input.iterator(host_rows(sharding, 8))
    with Prefetcher(iterator, lambda batch: put_batch(batch, sharding, 8)) as batches:
        placed = next(batches)
    for name, expected in lm_input.batch(0).items():
        assert np.array_equal(placed[name], expected)
    assert placed["input_ids"].sharding == sharding
    assert placed["target_num_bytes"].sharding.spec == PartitionSpec("data")


def test_one_process_holds_all_sequences():
    for spec in (PartitionSpec(("data", "seq")), PartitionSpec(None, "seq"), PartitionSpec()):
        sharding = _sharding((4, 2), ("data", "seq"), spec)
        assert host_rows(sharding, 8) == range(8)
    sharding = _sharding((8,), ("data",), PartitionSpec("data"))
    with pytest.raises(ValueError, match="global_batch_size=6"):
        host_rows(sharding, 6)


def test_batches_are_read_on_request_if_none_is_kept_ready():
    read = []
    with Prefetcher(_input().iterator(), read.append, num_batches=0) as batches:
        next(batches)
        assert len(read) == 1
        assert batches.state()["step"] == 1
    with pytest.raises(ValueError, match="num_batches=-1"):
        Prefetcher(_input().iterator(), _same, num_batches=-1)


class _OneOfSeveral:
    """The sharding of a process that addresses only some devices of a mesh."""

    def __init__(self, *rows: slice) -> None:
        self._rows = rows

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, tuple[slice]]:
        del shape
        return {device: (rows,) for device, rows in enumerate(self._rows)}


def test_a_process_with_some_devices_gets_their_share(monkeypatch):
    monkeypatch.setattr(
        "moelib.data.batches.prefetch.row_sharding", lambda sharding, ndim: sharding
    )
    both = _OneOfSeveral(slice(4, 6), slice(6, 8), slice(4, 6))  # Two devices share rows.
    assert host_rows(both, 8) == range(4, 8)  # type: ignore[arg-type]
    apart = _OneOfSeveral(slice(0, 2), slice(4, 6))
    with pytest.raises(ValueError, match=r"\[\(0, 2\), \(4, 6\)\].*8"):
        host_rows(apart, 8)  # type: ignore[arg-type]
