"""Data from outside: whatever a file or flag holds, reading it ends or raises one UserError."""

import gzip
import json
import random
from collections.abc import Callable

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks import corruption
from moelib.cli.prepare import read_splits
from moelib.core.errors import UserError
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.tables import Tables
from moelib.data.tokens.token_store import TokenStore, check_splits, json_digest
from moelib.runtime.command_line import one_line

_NUM_CASES = [200, pytest.param(10_000, marks=pytest.mark.slow)]
_TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\n"),
    *(b"\\ud83d", b"\x00", b"\xff", b"\xe4", b"null", b"true", b"NaN", b"-Infinity", b"1e999"),
    *(b"-0", b'"text"', b"[" * 100_000, b'{"a":' * 20_000, b"9" * 5000, b"-" * 5000),
    *(str(1 << 64).encode(), b"\xef\xbb\xbf", "é🙂".encode(), b" " * 10_000),
]
_VALUES = [
    *(None, True, -1, 0, 1, 1 << 31, 1 << 64, 10**4000, 0.5, float("nan"), float("inf"), "", "256"),
    *("uint16", "x" * 10_000, [], [[]], [1.5], ["a"], {}, {"train": 1}, {"a": {"b": []}}),
]


def _mutated(content: bytes, rng: random.Random) -> bytes:
    """Returns content with some bytes replaced, inserted, removed or repeated."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 1, 10, 1000]))
        new = rng.choice(
            [b"", rng.choice(_TOKENS), rng.randbytes(rng.randrange(1, 9)), content[start:end] * 2]
        )
        content = content[:start] + new + content[end:]
    return content


def _check(read: Callable[[], object], case: object, name: str = "") -> None:
    """Raises AssertionError unless reading ends, or raises a short UserError with a name."""
    message = name
    try:
        read()
    except UserError as error:
        message = one_line(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} of {case!r:.300}") from error
    assert name in message
    assert len(message) < 1000


@pytest.mark.parametrize("num_cases", _NUM_CASES)
def test_meta_of_a_store(tmp_path, num_cases):
    rng = random.Random(0)
    corruption.token_store(str(tmp_path))
    path = tmp_path / "store" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["digest"]
    cfg = TokenStore.default_config().set(path=str(tmp_path / "store"))

    def read() -> None:
        store = cfg.instantiate()
        store.document(store.num_documents - 1)
        assert len(store.num_bytes) == store.num_documents

    for number in range(num_cases):
        if number % 2:
            content = _mutated(json.dumps(meta).encode(), rng)
        else:
            changes = {
                rng.choice([*meta, "other"]): rng.choice(_VALUES)
                for _ in range(rng.randrange(1, 3))
            }
            changed = meta | changes
            digest = json_digest(changed)  # Otherwise every case ends at the digest.
            content = json.dumps(changed | {"digest": digest}).encode()
        path.write_bytes(content)
        _check(read, content, str(tmp_path))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("num_cases", _NUM_CASES)
def test_lines_of_json(tmp_path, num_cases, ending):
    rng, path = random.Random(1), tmp_path / f"a.{ending}"
    lines = [json.dumps({"text": f"é🙂 {index}" * index, "id": index}) for index in range(20)]
    plain = "\n".join(lines).encode()
    pack = {
        "jsonl": bytes,
        "jsonl.gz": gzip.compress,
        "jsonl.zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
    }[ending]
    for number in range(num_cases):
        content = pack(_mutated(plain, rng)) if number % 2 else _mutated(pack(plain), rng)
        path.write_bytes(content)
        source = JsonLines.default_config().set(paths=[str(path)]).instantiate()
        _check(lambda source=source: list(source.documents()), content, str(path))


@pytest.mark.parametrize("num_cases", _NUM_CASES)
def test_parquet_files(tmp_path, num_cases):
    rng, path = random.Random(2), tmp_path / "a.parquet"
    texts = [None if index == 7 else f"é🙂 {index}" * index for index in range(200)]
    contents = []
    for compression in ("none", "snappy", "zstd"):
        parquet.write_table(
            pyarrow.table({"text": texts}), path, compression=compression, row_group_size=50
        )
        contents.append(path.read_bytes())
    for _ in range(num_cases):
        content = _mutated(rng.choice(contents), rng)
        path.write_bytes(content)
        source = Tables.default_config().set(paths=[str(path)]).instantiate()
        _check(lambda source=source: list(source.documents()), content, str(path))


def test_half_a_surrogate_pair_in_meta_is_refused(tmp_path):
    corruption.token_store(str(tmp_path))
    path = tmp_path / "store" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"splits": {"train": 0.5, "\ud83d": 0.5}}))
    with pytest.raises(UserError, match=str(path)):
        TokenStore.default_config().set(path=str(path.parent)).instantiate()


@pytest.mark.parametrize("num_cases", _NUM_CASES)
def test_splits(num_cases):
    rng = random.Random(3)
    parts = ["train", "=", ",", "0.5", "1", "nan", "inf", "-", "1e999", "validation", " "]
    parts += ["9" * 5000, "é", "\n", "_"]
    for _ in range(num_cases):
        first = rng.choice(["", "train=0.5,validation="])
        text = first + "".join(rng.choices(parts, k=rng.randrange(9)))

        def read(text: str = text) -> None:
            splits = read_splits(text)
            check_splits(splits)
            assert abs(sum(splits.values()) - 1) < 1e-6
            assert all(name.strip() for name in splits)

        _check(read, text)


@pytest.mark.parametrize(
    "text", ["train=nan", "train=0.5,train=0.5", "=1", " =1", "train=1,", "train=-1,b=2"]
)
def test_wrong_splits_are_refused(text):
    with pytest.raises(UserError, match="splits"):
        check_splits(read_splits(text))
