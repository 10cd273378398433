"""One part of a source becomes its files of a store, whole or not at all."""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.data.sources import files
from moelib.data.sources.files import TextFiles
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import BadRecordError, BadRecords, Part, TextsPart
from moelib.data.tokens import prepare_part
from moelib.data.tokens.prepare_part import (
    PARTS,
    DiskFullError,
    PartOptions,
    PartResult,
    part_file,
    read_result,
    tokenize_part,
)
from moelib.data.tokens.store_check import hash_blocks
from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer

TEXTS = ("ab", "", "Grüße", "c")
OPTIONS = PartOptions(append_eos=True, skip_bad_records=False)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return ByteTokenizer.default_config().instantiate()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    (tmp_path / "store" / PARTS).mkdir(parents=True)
    return str(tmp_path / "store")


def _tokens(folder: str, index: int, dtype: str = "<u2") -> list[int]:
    return np.fromfile(os.path.join(folder, f"tokens-{index:05d}.bin"), dtype).tolist()


def _broken_part(folder: pathlib.Path) -> Part:
    """Returns a part of a document, a broken line, and an empty document."""
    (folder / "a.jsonl").write_text('{"text": "good"}\nbad\n{"text": ""}\n')
    (part,) = JsonLines.default_config().set(paths=[str(folder / "a.jsonl")]).instantiate().parts()
    return part


def test_a_part_leaves_its_tokens_lengths_and_bytes(folder, tokenizer):
    tokenize_part(folder, 3, TextsPart(TEXTS), tokenizer, OPTIONS)
    end = tokenizer.eos_id
    names = ("tokens-00003.bin", "parts/00003.lengths.npy", "parts/00003.num_bytes.npy")
    expected = [*b"ab", end, *"Grüße".encode(), end, *b"c", end]
    assert _tokens(folder, 3) == expected
    assert np.load(part_file(folder, 3, "lengths.npy")).tolist() == [3, 8, 2]
    assert np.load(part_file(folder, 3, "num_bytes.npy")).tolist() == [2, 7, 1]
    assert read_result(folder, 3, OPTIONS) == PartResult(
        num_tokens=13,
        num_documents=3,
        num_bytes=10,
        num_empty=1,
        num_bad_records=0,
        first_bad_record="",
        num_divided=0,
        sha256=hashlib.sha256(np.array(expected, "<u2").tobytes()).hexdigest(),
        block_hashes={name: hash_blocks(os.path.join(folder, name)) for name in names},
        lost_characters={},
    )


def test_documents_can_go_without_an_end_and_a_part_without_text(folder, tokenizer):
    options = dataclasses.replace(OPTIONS, append_eos=False)
    tokenize_part(folder, 0, TextsPart(("ab", "c")), tokenizer, options)
    assert _tokens(folder, 0) == [97, 98, 99]
    result = tokenize_part(folder, 1, TextsPart(("",)), tokenizer, OPTIONS)
    assert _tokens(folder, 1) == []
    assert read_result(folder, 1, OPTIONS) == result
    assert (result.num_documents, result.num_empty) == (0, 1)


def test_ids_of_a_large_vocabulary_have_four_bytes(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "vocab_size", (1 << 16) + 1)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [[1 << 16] for _ in texts])
    tokenize_part(folder, 0, TextsPart(("a",)), tokenizer, OPTIONS)
    assert _tokens(folder, 0, "<u4") == [1 << 16, tokenizer.eos_id]


@pytest.mark.parametrize(("characters", "most"), [(1, 1), (3, 2)])
def test_text_is_tokenized_a_little_at_a_time(folder, tokenizer, monkeypatch, characters, most):
    whole = tokenize_part(folder, 0, TextsPart(TEXTS * 5), tokenizer, OPTIONS)
    sizes: list[int] = []
    encode = tokenizer.encode_batch
    monkeypatch.setattr(prepare_part, "BATCH_CHARACTERS", characters)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda t: sizes.append(len(t)) or encode(t))
    result = tokenize_part(folder, 1, TextsPart(TEXTS * 5), tokenizer, OPTIONS)
    assert _tokens(folder, 1) == _tokens(folder, 0)
    assert [*result.block_hashes.values()] == [*whole.block_hashes.values()]
    assert result._replace(block_hashes=whole.block_hashes) == whole
    assert sum(sizes) == 15
    assert max(sizes) == most


def test_bad_records_are_an_error_with_a_cure_or_are_counted(tmp_path, folder, tokenizer):
    part = _broken_part(tmp_path)
    with pytest.raises(BadRecordError, match=r"a\.jsonl:2:.*JSON.*skip_bad_records"):
        tokenize_part(folder, 0, part, tokenizer, OPTIONS)
    assert read_result(folder, 0, OPTIONS) is None
    options = dataclasses.replace(OPTIONS, skip_bad_records=True)
    tokenize_part(folder, 0, part, tokenizer, options)
    result = read_result(folder, 0, options)
    assert result is not None
    assert (result.num_documents, result.num_empty, result.num_bad_records) == (1, 1, 1)
    assert "a.jsonl:2: not JSON" in result.first_bad_record
    assert read_result(folder, 0, OPTIONS) is None


@pytest.mark.parametrize("text", ["{", '{"num_token": 13}', '{"num_tokens": 13, "digest": "0"}'])
def test_a_damaged_result_is_that_of_an_unfinished_part(folder, tokenizer, caplog, text):
    assert read_result(folder, 0, OPTIONS) is None
    result = tokenize_part(folder, 0, TextsPart(TEXTS), tokenizer, OPTIONS)
    assert read_result(folder, 0, OPTIONS) == result
    pathlib.Path(part_file(folder, 0, "json")).write_text(text)
    assert not caplog.text
    assert read_result(folder, 0, OPTIONS) is None
    assert "00000.json" in caplog.text


def test_a_tokenizer_with_ids_beyond_its_vocabulary_is_refused(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [[1, 300] for _ in texts])
    with pytest.raises(ValueError, match=r"id 300 \(token 1\)"):
        tokenize_part(folder, 0, TextsPart(TEXTS), tokenizer, OPTIONS)
    assert read_result(folder, 0, OPTIONS) is None


@pytest.mark.parametrize("source", [JsonLines, TextFiles])
def test_a_file_that_is_written_to_while_it_is_read_is_named(tmp_path, folder, tokenizer, source):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n')
    (part,) = source.default_config().set(paths=[str(path)]).instantiate().parts()
    os.utime(path, ns=(0, 0))
    with pytest.raises(UserError, match=r"a\.jsonl was written to"):
        tokenize_part(folder, 0, part, tokenizer, OPTIONS)
    assert read_result(folder, 0, OPTIONS) is None


@dataclasses.dataclass(frozen=True)
class _FailingPart:
    """Fails as the system does after its first document."""

    code: int
    name: str = "part seven"
    num_bytes: int = 2

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        del bad_records
        yield "ab"
        raise OSError(self.code, os.strerror(self.code), "where")


def test_a_full_disk_is_named_with_the_cure_and_another_error_as_it_is(folder, tokenizer):
    with pytest.raises(DiskFullError, match="output_dir") as caught:
        tokenize_part(folder, 0, _FailingPart(errno.ENOSPC), tokenizer, OPTIONS)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, folder)
    assert read_result(folder, 0, OPTIONS) is None
    with pytest.raises(OSError, match=r"\[Errno 5\] .*'where'"):
        tokenize_part(folder, 0, _FailingPart(errno.EIO), tokenizer, OPTIONS)


@pytest.mark.parametrize("file", ["lengths.npy", "json"])
def test_a_disk_that_is_full_at_the_end_leaves_no_finished_part(
    folder, tokenizer, monkeypatch, file
):
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((np, "save") if file == "lengths.npy" else (json, "dump")), full)
    with pytest.raises(OSError, match="documents in memory"):
        tokenize_part(folder, 0, TextsPart(TEXTS), tokenizer, OPTIONS)
    assert read_result(folder, 0, OPTIONS) is None


def test_a_long_document_is_divided_after_line_ends_and_counted(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(files, "MAX_DOCUMENT_CHARS", 6)
    texts = ("ab", "ab\ncd\nef\n", "abcdefgh")
    result = tokenize_part(folder, 0, TextsPart(texts), tokenizer, OPTIONS)
    assert (result.num_divided, result.num_documents, result.num_bytes) == (2, 5, 2 + 9 + 8)
    sizes = np.load(part_file(folder, 0, "num_bytes.npy"))
    np.testing.assert_array_equal(sizes, [2, 6, 3, 6, 2])
