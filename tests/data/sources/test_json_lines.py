import gzip
import json
import os

import numpy as np
import pyarrow
import pytest

from moelib.core.errors import UserError
from moelib.data.sources import files
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import BadRecordError, BadRecords


def _zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


_SKIPPED = bytes.fromhex("502a4d18 04000000 2a000000")
TEXTS = ["one", "zwei\nlines ü", "", "four" * 50]


def _json_lines(path: object, **fields: str) -> JsonLines:
    return JsonLines.default_config().set(paths=[str(path)], **fields).instantiate()


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".jsonl", bytes),
        (".json", bytes),
        (".jsonl.gz", gzip.compress),
        (".jsonl.zst", _zstd),
        # As parallel compressors and `cat` write it: several members, or frames.
        (".json.gz", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:])),
        (".json.gz", lambda data: gzip.compress(b"") + gzip.compress(data) + gzip.compress(b"")),
        (".json.zst", lambda data: _zstd(data[:20]) + _zstd(data[20:])),
        (".json.zst", lambda data: _zstd(b"") + _zstd(data[:20]) + _zstd(b"") + _zstd(data[20:])),
        # pzstd's frames begin with one to skip, which has the size of the next.
        (".json.zst", lambda data: _SKIPPED + _zstd(data[:20]) + _SKIPPED + _zstd(data[20:])),
    ],
)
def test_every_packing_gives_the_same_documents(tmp_path, ending, pack):
    (tmp_path / f"a{ending}").write_bytes(pack(_lines(TEXTS)))
    assert list(_json_lines(tmp_path).documents()) == TEXTS


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", _zstd)])
def test_many_members_of_many_buffers_are_read_to_the_end(tmp_path, ending, pack):
    random = np.random.default_rng(0)  # Its digits compress to half.
    texts = [" ".join(map(str, random.integers(1 << 40, size=9000))) for _ in range(30)]
    (tmp_path / f"a.jsonl{ending}").write_bytes(b"".join(pack(_lines([x])) for x in texts))
    assert list(_json_lines(tmp_path).documents()) == texts


@pytest.mark.parametrize("size", [1, 7, 40, 64])
def test_ranges_of_bytes_give_every_line_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "_MIN_PART_BYTES", size)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", size)
    (tmp_path / "a.jsonl").write_bytes(_lines(TEXTS).rstrip(b"\n"))
    source = _json_lines(tmp_path)
    assert len(source.parts()) > 3
    assert list(source.documents()) == TEXTS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON"),
        (b"[", "not JSON"),
        (b"[1]", "a list, not an object"),
        (b'{"body": "x"}', r"'text'.*\['body'\].*text_field"),
        (b'{"text": null}', "'text'.*None"),
        (b'{"text": "\\ud800"}', "'text'.*surrogate"),
        (b'{"messages": []}', "set text_field .*--format=chat"),
        (b"\xff", "not UTF-8 .*; save the file as UTF-8"),
    ],
)
@pytest.mark.parametrize("size", [16, 1 << 20])
def test_a_broken_line_is_named_or_counted(tmp_path, monkeypatch, line, reason, size):
    monkeypatch.setattr(files, "_MIN_PART_BYTES", size)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", size)
    (tmp_path / "a.jsonl").write_bytes(_lines(["good"]) + b"\n" + line + b"\n" + _lines(["end"]))
    with pytest.raises(BadRecordError, match=r"a\.jsonl:3: .*" + reason):
        list(_json_lines(tmp_path).documents())
    bad = BadRecords()
    assert list(_json_lines(tmp_path).documents(bad)) == ["good", "end"]
    assert bad.count == 1
    assert "a.jsonl:3" in bad.first


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".zst", _zstd)])
def test_a_truncated_archive_is_named(tmp_path, ending, pack):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=rf"a\.jsonl{ending}"):
        list(_json_lines(path).documents())
    path.write_bytes(pack(_lines([str(i) for i in range(10_000)]))[:-2000])
    with pytest.raises(ValueError, match=rf"a\.jsonl{ending}"):
        list(_json_lines(path).documents())


def test_another_field_can_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "here"}\n')
    assert list(_json_lines(tmp_path, text_field="content").documents()) == ["here"]


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "x" * 10_000 + '"}\n' + '{"text": "y"}\n' * 10_000)
    (part,) = JsonLines.default_config().set(paths=[str(path)]).instantiate().parts()
    documents = part.documents(BadRecords())  # The last line is cut, too.
    next(documents)
    os.truncate(path, len('{"text": ""}\n') + 10_000)
    with pytest.raises(UserError, match=rf"{path} ends at byte \d+ instead of 15\d\d\d\d"):
        list(documents)
