import dataclasses
import errno
import multiprocessing
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.data.sources import source as source_module
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import BadRecordError, BadRecords, InMemorySource, Part, Source
from moelib.data.tokens import preparation as preparation_module
from moelib.data.tokens import prepare_part
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, train_bpe
from moelib.runtime.lock import DirectoryInUseError, directory_lock
from tests.python_process import finish, start

TEXTS = [f"Text number {i}, " * (1 + i % 5) for i in range(40)]


@pytest.fixture(autouse=True)
def _ten_texts_per_part() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "_TEXTS_PER_PART", 10)
        yield


def _source(texts: list[str]) -> InMemorySource:
    cfg = InMemorySource.default_config()
    return cfg.set(texts=texts).instantiate()


BYTES = ByteTokenizer.default_config().instantiate()


def _prepare(source: Source, path: object, **options: Any) -> TokenStore:
    return prepare(source, BYTES, str(path), **options)


def _contents(store: TokenStore) -> dict[str, bytes]:
    folder = pathlib.Path(store.config.path)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_any_number_of_processes_makes_the_same_store(tmp_path):
    one, two = (_prepare(_source(TEXTS), tmp_path / str(n), num_processes=n) for n in (1, 2))
    assert _contents(one) == _contents(two)
    assert len(one.meta.file_tokens) == 4
    assert not os.path.exists(tmp_path / "1.partial")
    one.verify()
    with pytest.raises(ValueError, match="num_processes=0"):
        _prepare(_source(TEXTS), tmp_path / "store", num_processes=0)


def test_errors_of_worker_processes_arrive(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n{name}\n')
    source = JsonLines.default_config().set(paths=[str(tmp_path)]).instantiate()
    with pytest.raises(BadRecordError, match=r"[ab]\.jsonl:2:.*JSON.*--skip_bad_lines"):
        _prepare(source, tmp_path / "store", num_processes=2)


@dataclasses.dataclass(frozen=True)
class _DeadlyPart:
    name: str
    num_bytes: int = 100

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        del bad_records
        if multiprocessing.parent_process() is not None:
            os._exit(1)  # As one that is out of memory would.
        yield "text"


class _DeadlySource(Source):
    @config_class
    class Config(Source.Config):
        pass

    def parts(self) -> Sequence[Part]:
        return [_DeadlyPart("a"), _DeadlyPart("b")]


def test_a_worker_that_dies_is_noticed(tmp_path):
    source = _DeadlySource.default_config().instantiate()
    with pytest.raises(UserError, match="num_processes below 2"):
        _prepare(source, tmp_path / "store", num_processes=2)


@dataclasses.dataclass(frozen=True)
class _EndlessPart(_DeadlyPart):
    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        if multiprocessing.parent_process() is not None:
            pathlib.Path(self.name).touch()
            time.sleep(600)
        yield "text"


class _EndlessSource(_DeadlySource):
    def parts(self) -> Sequence[Part]:
        return [_EndlessPart("a"), _EndlessPart("b")]


def prepare_endlessly(folder: str) -> None:
    """Prepares in two processes, which create the files a and b and never end."""
    os.chdir(folder)
    _prepare(_EndlessSource.default_config().instantiate(), "store", num_processes=2)


def test_sigterm_ends_workers_and_prints_nothing(tmp_path):
    command = f"import {__name__} as x; x.prepare_endlessly({str(tmp_path)!r})"
    process = start("-c", command)
    deadline = time.monotonic() + 120
    while not all((tmp_path / name).exists() for name in "ab"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    ((_, errors),) = finish(process, code=143)
    assert errors == ""


def test_empty_documents_and_bad_records_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n{"text": ""}\n')
    source = JsonLines.default_config().set(paths=[str(tmp_path)]).instantiate()
    store = _prepare(source, tmp_path / "store", skip_bad_records=True)
    meta = store.meta
    assert (meta.num_documents, meta.num_empty, meta.num_bad_records) == (1, 1, 1)


def _lossy(folder: pathlib.Path, unknown: str | None, normalizer: Any = None) -> Tokenizer:
    """Returns a tokenizer of the characters "a" to "z" and the space."""
    vocab = {token: i for i, token in enumerate("abcdefghijklmnopqrstuvwxyz ?")}
    made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=unknown))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([END_OF_TEXT])
    made.save(str(folder / "lossy.json"))
    return Tokenizer.default_config().set(path=str(folder / "lossy.json")).instantiate()


@pytest.mark.parametrize(
    ("unknown", "normalizer", "text", "lost", "piece_bytes"),
    [
        ("?", None, "caf\u00e9 \u6771", 2 + 3, 1 << 17),  # UTF-8: two and three bytes.
        (None, None, "caf\u00e9 \u6771", 2 + 3, 1 << 17),
        (None, normalizers.Lowercase(), "The End", 2, 1 << 17),
        (None, normalizers.Strip(), " end  ", 3, 1 << 17),
        ("?", None, "caf\u00e9 \u6771", 2 + 3, 2),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused_unless_accepted(
    tmp_path, monkeypatch, caplog, unknown, normalizer, text, lost, piece_bytes
):
    monkeypatch.setattr(prepare_part, "BATCH_CHARACTERS", piece_bytes)
    tokenizer, out = _lossy(tmp_path, unknown, normalizer), str(tmp_path / "store")
    with pytest.raises(UserError, match=f"loses {lost} of .*accept_lossy_tokenizer"):
        prepare(_source([text, "the end"]), tokenizer, out)
    monkeypatch.setattr(preparation_module, "tokenize_part", None)  # The part is finished.
    prepare(_source([text, "the end"]), tokenizer, out, accept_lossy_tokenizer=True)
    monkeypatch.undo()
    prepare(_source([text, "z" * 100 * lost]), tokenizer, out + "2")
    assert caplog.text.count(f"loses {lost} of") == 2


def test_a_source_without_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\nbad\n')
    source = JsonLines.default_config().set(paths=[str(tmp_path)]).instantiate()
    with pytest.raises(ValueError, match=r"1 empty.*1 bad.*a.json"):
        _prepare(source, tmp_path / "store", skip_bad_records=True)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl"]


def _fails_after(count: int, error: Exception) -> Callable[..., Any]:
    """Returns a `tokenize_part` that fails once `count` parts are finished."""
    left, tokenize_part = [count], prepare_part.tokenize_part

    def tokenize(*args: Any) -> prepare_part.PartResult:
        if not left[0]:
            raise error
        left[0] -= 1
        return tokenize_part(*args)

    return tokenize


def _killed(path: object, count: int = 2, **options: Any) -> None:
    """Prepares a store, until some parts are finished; with all, while they are joined."""
    source = options.pop("source", _source(TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation_module, "tokenize_part", _fails_after(count, KeyboardInterrupt()))
        patch.setattr(preparation_module, "_finish", _fails_after(0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            _prepare(source, path, **options)


def test_a_killed_run_resumes_from_its_finished_parts(tmp_path, monkeypatch, capsys):
    whole, path = _prepare(_source(TEXTS), tmp_path / "whole"), tmp_path / "store"
    _killed(path)
    # A part that was cut off while being written counts as unfinished.
    cut = pathlib.Path(f"{path}.partial", "tokens-00003.bin")
    cut.write_bytes(cut.read_bytes()[:3] if cut.exists() else b"abc")
    left = _fails_after(2, AssertionError("more than the two parts that were left"))
    monkeypatch.setattr(preparation_module, "tokenize_part", left)
    store = _prepare(_source(TEXTS), path)
    assert "2 of 4 parts are finished" in capsys.readouterr().err
    assert _contents(store) == _contents(whole)


def test_a_finished_part_that_is_damaged_is_tokenized_again(tmp_path):
    whole = _prepare(_source(TEXTS), tmp_path / "whole")
    path = str(tmp_path / "store")
    _killed(path, 4)
    folder = pathlib.Path(path + ".partial")
    for name in ("tokens-00000.bin", "parts/00001.lengths.npy", "parts/00002.num_bytes.npy"):
        data = bytearray((folder / name).read_bytes())
        data[-4] ^= 1
        (folder / name).write_bytes(data)
    result = folder / "parts/00003.json"
    result.write_text(result.read_text().replace('"num_bytes": ', '"num_bytes": 1'))
    assert _contents(_prepare(_source(TEXTS), path)) == _contents(whole)


@pytest.mark.parametrize("change", ["source", "tokenizer"])
def test_an_unfinished_run_of_something_else_starts_over(tmp_path, capsys, change):
    path = str(tmp_path / "store")
    _killed(path)
    source, tokenizer = _source(TEXTS[1:] if change == "source" else TEXTS), BYTES
    if change == "tokenizer":
        tokenizer = train_bpe(TEXTS, 270, str(tmp_path / "tokenizer.json"))
    store = prepare(source, tokenizer, path)
    message = capsys.readouterr().err
    assert f"{path}.partial" in message
    assert re.search(rf"\b{change}\b", message)
    store.verify()
    assert store.num_documents == len(source.config.texts)


def test_a_finished_store_is_found_again_and_never_replaced(tmp_path, capsys):
    path = tmp_path / "store"
    _prepare(_source(TEXTS), path)
    assert "40 documents" in capsys.readouterr().err
    for skip in (False, True):  # Without bad records, it is also that without them.
        _prepare(_source(TEXTS), path, skip_bad_records=skip)
        assert "is prepared already" in capsys.readouterr().err
    other = train_bpe(TEXTS, 270, str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileExistsError, match="output_dir"):
        prepare(_source(TEXTS[1:]), other, str(path))
    os.mkdir(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="`moelib prepare`"):
        _prepare(_source(TEXTS), tmp_path / "mine")


def test_files_of_the_work_that_a_kill_left_in_a_finished_store_are_removed(tmp_path):
    store = _prepare(_source(TEXTS), tmp_path / "store")
    before = _contents(store)
    (tmp_path / "store/parts").mkdir()
    for name in (".lock", ".begin.lock", "parts/00000.json"):
        (tmp_path / "store" / name).touch()
    assert _contents(_prepare(_source(TEXTS), tmp_path / "store")) == before


def test_a_partial_folder_of_something_else_is_kept(tmp_path):
    mine = tmp_path / "store.partial" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("years of work")
    with pytest.raises(FileExistsError, match=r"store\.partial.*`moelib"):
        _prepare(_source(TEXTS), tmp_path / "store")
    assert mine.read_text() == "years of work"
    mine.unlink()  # An empty one may be one of ours that was killed at once.
    _prepare(_source(TEXTS), tmp_path / "store").verify()


def test_two_at_a_time_are_refused(tmp_path):
    path = str(tmp_path / "store")
    with (
        directory_lock(f"{path}.partial", setting="output_dir"),
        pytest.raises(DirectoryInUseError, match=rf"store\.partial .*process {os.getpid()} "),
    ):
        _prepare(_source(TEXTS), path)
    _prepare(_source(TEXTS), path)
    assert not (tmp_path / "store/.lock").exists()


def test_a_run_that_was_killed_while_beginning_resumes(tmp_path, monkeypatch):
    def killed(path: str) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BYTES, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            _prepare(_source(TEXTS), tmp_path / "store")
    store = _prepare(_source(TEXTS), tmp_path / "store")
    assert store.tokenizer().fingerprint == BYTES.fingerprint


def _broken_source(folder: pathlib.Path) -> JsonLines:
    """Returns a source of two parts, of which the second has a broken line."""
    (folder / "a.jsonl").write_text('{"text": "a good and long line"}\n')
    (folder / "b.jsonl").write_text('{"text": "good"}\nbad\n')
    return JsonLines.default_config().set(paths=[str(folder)]).instantiate()


def test_skipping_bad_records_keeps_the_parts_that_were_finished_without(tmp_path, capsys):
    source, path = _broken_source(tmp_path), str(tmp_path / "store")
    with pytest.raises(BadRecordError, match=r"b\.jsonl:2:.*JSON"):
        _prepare(source, path)
    store = _prepare(source, path, skip_bad_records=True)
    assert "1 of 2 parts are finished" in capsys.readouterr().err
    assert (store.meta.num_documents, store.meta.num_bad_records) == (2, 1)
    whole = _prepare(source, tmp_path / "whole", skip_bad_records=True)
    assert _contents(store) == _contents(whole)


def test_parts_and_stores_without_their_bad_records_are_used_only_where_they_are_skipped(tmp_path):
    source, path = _broken_source(tmp_path), tmp_path / "store"
    _killed(path, source=source, skip_bad_records=True)
    with pytest.raises(BadRecordError, match=r"b\.jsonl:2:.*JSON.*--skip_bad_lines"):
        _prepare(source, path)
    _prepare(source, path, skip_bad_records=True).verify()
    with pytest.raises(FileExistsError, match="skip_bad_records"):
        _prepare(source, path)


def test_too_small_a_disk_is_noticed_before_the_work(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"\d+\.\d kB and 1\.0 kB .*/store"):
        _prepare(_source(TEXTS), tmp_path / "store")


def test_a_full_disk_keeps_finished_parts(tmp_path, monkeypatch):
    path = str(tmp_path / "store")
    finished: list[str] = []

    def write(file: str, content: Any) -> None:
        if len(finished) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        finished.append(file)
        write_json(file, content)

    write_json = prepare_part.write_json
    with monkeypatch.context() as patch:
        patch.setattr(prepare_part, "write_json", write)
        with pytest.raises(OSError, match="/store"):
            _prepare(_source(TEXTS), path)
    assert len(finished) == 2
    _prepare(_source(TEXTS), path).verify()


def _write_corpus(folder: pathlib.Path, last: str = "end") -> JsonLines:
    folder.mkdir(exist_ok=True)
    lines = [f'{{"text": "{text}"}}\n' for text in (*TEXTS, "", last)]
    (folder / "a.jsonl").write_text("".join(lines))
    return JsonLines.default_config().set(paths=[str(folder)]).instantiate()


def test_a_corpus_is_known_by_the_relative_paths_and_sizes_of_its_files(tmp_path, capsys):
    path = str(tmp_path / "store")
    _prepare(_write_corpus(tmp_path / "here"), path)
    _prepare(_write_corpus(tmp_path / "there"), path)
    assert "is prepared already" in capsys.readouterr().err
    (tmp_path / "there" / "sub").mkdir()
    (tmp_path / "there" / "sub" / "b.jsonl").write_text("")
    for last in ("end", "longer"):
        with pytest.raises(FileExistsError, match="different source"):
            _prepare(_write_corpus(tmp_path / "there", last), path)
