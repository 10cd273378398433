"""Shares of the work on a store: processes on several machines that see its folder."""

import json
import os
import pathlib
import threading
import time
from typing import Any

import pytest

from moelib.cli.prepare import read_share
from moelib.core.errors import UserError
from moelib.data.sources.json_lines import JsonLines
from moelib.data.tokens import preparation as preparation_module
from moelib.data.tokens import prepare_part
from moelib.data.tokens.preparation import (
    Preparation,
    begin_store,
    finish_store,
    make_part,
    plan_store,
)
from moelib.data.tokens.prepare import prepare, prepare_share
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from moelib.runtime.lock import DirectoryInUseError, directory_lock
from tests.python_process import finish, start

NUM_PARTS = 7


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns a folder of files, each a part."""
    (tmp_path / "corpus").mkdir()
    for i in range(NUM_PARTS):
        texts = [f"Document {j} of file {i}. " * (1 + (i + j) % 4) for j in range(30)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"corpus/{i}.jsonl").write_text("".join(lines))
    return tmp_path / "corpus"


BYTES: Tokenizer = ByteTokenizer.default_config().instantiate()


def _source(corpus: pathlib.Path) -> JsonLines:
    return JsonLines.default_config().set(paths=[str(corpus)]).instantiate()


def _plan(corpus: pathlib.Path, **options: Any) -> Preparation:
    tokenizer = options.pop("tokenizer", BYTES)
    path = options.pop("path", corpus.parent / "store")
    return plan_store(_source(corpus), tokenizer, str(path), **options)


def _contents(store: TokenStore | str) -> dict[str, bytes]:
    folder = pathlib.Path(store if isinstance(store, str) else store.config.path)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def whole(corpus: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of the store that one process makes."""
    return _contents(prepare(_source(corpus), BYTES, str(corpus.parent / "whole")))


@pytest.mark.parametrize(("count", "order"), [(1, [0]), (3, [2, 0, 1]), (9, range(9))])
def test_the_last_of_any_shares_in_any_order_makes_the_store(corpus, whole, count, order, capsys):
    preparation = _plan(corpus)
    stores = [prepare_share(preparation, BYTES, (index, count)) for index in order]
    made = [store is not None for store in stores]
    assert made.index(True) == min(count, NUM_PARTS) - 1  # Later shares have no part.
    assert _contents(str(corpus.parent / "store")) == whole
    assert os.path.exists(preparation.folder) is False
    assert ("parts are left" in capsys.readouterr().err) == (count > 1)


def test_parts_that_a_scheduler_maps_make_the_same_store(corpus, whole):
    preparation = _plan(corpus)
    threads = [threading.Thread(target=begin_store, args=(preparation, BYTES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (3, 0, 3, 6):
        make_part(preparation, index)
    with pytest.raises(UserError, match=r"4 of 7 parts are missing or damaged: 1, 2, 4, 5;"):
        finish_store(preparation)
    for index in (1, 2, 4, 5):
        make_part(preparation, index)
    assert _contents(finish_store(preparation)) == whole
    make_part(preparation, 2)  # Of a task that a scheduler runs again.
    begin_store(preparation, BYTES)
    assert _contents(finish_store(preparation)) == whole
    assert not os.path.exists(preparation.folder)


def _command(corpus: pathlib.Path, *flags: str) -> Any:
    output = f"--output={corpus.parent / 'store'}"
    flags = (*flags, "--num_processes=1", "--tokenizer=bytes")
    return start("-m", "moelib", "prepare", f"--source={corpus}", output, *flags)


def test_shares_that_start_at_once_make_the_same_store(corpus, whole):
    finish(*(_command(corpus, f"--share={i}/3") for i in (1, 2, 3)))
    assert _contents(str(corpus.parent / "store")) == whole


def test_a_share_that_was_killed_resumes(corpus, whole, monkeypatch):
    preparation, tokenize_part = _plan(corpus), prepare_part.tokenize_part

    def killed(folder: str, index: int, *args: Any) -> None:
        if os.path.exists(os.path.join(folder, "tokens-00002.bin")):
            pathlib.Path(folder, f"tokens-{index:05d}.bin").write_bytes(b"cut")
            raise KeyboardInterrupt
        tokenize_part(folder, index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(preparation_module, "tokenize_part", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_share(preparation, BYTES, (0, 2))
    assert prepare_share(preparation, BYTES, (1, 2)) is None
    store = prepare_share(preparation, BYTES, (0, 2))
    assert store is not None
    assert _contents(store) == whole


def test_a_finished_part_that_is_damaged_is_found_when_its_share_is_run_again(corpus, whole):
    preparation = _plan(corpus)
    assert prepare_share(preparation, BYTES, (0, 2)) is None
    tokens = pathlib.Path(preparation.folder, "tokens-00002.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match="1 of 7 parts are missing or damaged: 2;"):
        prepare_share(preparation, BYTES, (1, 2))
    store = prepare_share(preparation, BYTES, (0, 2))
    assert store is not None
    assert _contents(store) == whole


@pytest.mark.parametrize("change", ["tokenizer", "splits", "source", "append_eos"])
def test_shares_with_other_settings_are_refused(corpus, change):
    prepare_share(_plan(corpus), BYTES, (0, 2))
    options: dict[str, Any] = {"append_eos": False} if change == "append_eos" else {}
    if change == "tokenizer":
        options["tokenizer"] = train_bpe(["a text"], 258, str(corpus.parent / "tokenizer.json"))
    elif change == "splits":
        options["splits"] = {"train": 0.5, "test": 0.5}
    else:
        (corpus / "more.jsonl").write_text('{"text": "more"}\n' * (change == "source"))
        if change != "source":
            (corpus / "more.jsonl").unlink()
    other = _plan(corpus, **options)
    for action in (begin_store, lambda plan, _: finish_store(plan), lambda p, _: make_part(p, 0)):
        with pytest.raises(FileExistsError, match=rf"{change}=.* and this .* {change}=.*; start"):
            action(other, options.get("tokenizer", BYTES))


def test_a_part_that_another_process_makes_is_waited_for(corpus, caplog, monkeypatch):
    preparation = _plan(corpus)
    begin_store(preparation, BYTES)
    parts = os.path.join(preparation.folder, "parts")
    thread = threading.Thread(target=make_part, args=(preparation, 4))
    with directory_lock(parts, setting="output_dir", name="00004.lock"):
        thread.start()
        deadline = time.monotonic() + 60
        while not caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not os.path.exists(os.path.join(parts, "00004.json"))
    thread.join()
    assert f"parts/00004.lock (process {os.getpid()} on " in caplog.messages[0]
    assert os.path.exists(os.path.join(parts, "00004.json"))


def test_prepare_without_a_share_excludes_shares(corpus, caplog):
    preparation = _plan(corpus)
    with (
        directory_lock(preparation.folder, setting="output_dir", shared=True),
        pytest.raises(DirectoryInUseError, match=rf"store\.partial .*process {os.getpid()} "),
    ):
        prepare(_source(corpus), BYTES, preparation.output_dir)
    process = _command(corpus, "--share=1/1")
    finish(process)
    store = finish_store(preparation)
    assert store.num_documents == 30 * NUM_PARTS


def test_a_share_that_begins_while_the_last_one_ends_finds_the_store(corpus, whole):
    preparation = _plan(corpus)
    begin_store(preparation, BYTES)
    thread = threading.Thread(target=prepare_share, args=(preparation, BYTES, (0, 1)))
    with directory_lock(preparation.folder, setting="output_dir"):
        thread.start()
        time.sleep(0.3)
        os.rename(corpus.parent / "whole", preparation.output_dir)
    thread.join()
    assert _contents(finish_store(preparation)) == whole


SLURM = {f"SLURM_ARRAY_TASK_{k}": v for k, v in {"MIN": "3", "COUNT": "4"}.items()}


@pytest.mark.parametrize(
    ("text", "environ", "share"),
    [
        ("1/8", {}, (0, 8)),
        ("8/8", {"SLURM_ARRAY_TASK_ID": "1"}, (7, 8)),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "3"}, (0, 4)),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "6"}, (3, 4)),
        ("auto/5", {"JOB_COMPLETION_INDEX": "0"}, (0, 5)),
        ("auto/5", {"JOB_COMPLETION_INDEX": "4"}, (4, 5)),
    ],
)
def test_a_share_is_read_from_the_flag_or_the_scheduler(text, environ, share):
    assert read_share(text, environ) == share


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("0/8", {}),
        ("9/8", {}),
        ("8", {}),
        ("-1/8", {}),
        ("auto", {}),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}),
        ("auto/4", {"JOB_COMPLETION_INDEX": "4"}),
        ("auto", SLURM | {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2"}),
    ],
)
def test_a_share_that_is_none_is_refused(text, environ):
    with pytest.raises(UserError, match=f"--share={text}:"):
        read_share(text, environ)
