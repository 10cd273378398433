"""`moelib prepare`: a corpus to a token store, and what it says of broken ones."""

import subprocess
import sys

import pytest

from moelib.cli import prepare
from moelib.data.token_store import TokenStore
from moelib.launch import UsageError


def moelib(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "moelib.cli.main", *map(str, args)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def test_corpus_becomes_a_store_with_splits_and_a_tokenizer_of_its_own(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "document number {i}"}}\n' for i in range(200)))
    done = moelib(
        *("prepare", "--source", corpus, "--output", tmp_path / "store", "--train_bpe", 300),
        *("--splits", "train=0.9,validation=0.1", "--num_processes", 1),
    )
    assert done.returncode == 0, done.stderr
    assert "200 documents" in done.stdout + done.stderr
    stores = [
        TokenStore.default_config().set(path=str(tmp_path / "store"), split=split).instantiate()
        for split in ("train", "validation")
    ]
    assert sum(store.num_documents for store in stores) == 200
    assert stores[0].vocab_size == 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "x"], "--output must be set"),
        (["--source", "x", "--output", "y"], "one of --tokenizer and --train_bpe"),
        (["--output", "y", "--tokenizer", "bytes"], "--source must be set"),
    ],
)
def test_missing_flags_are_named(flags, message):
    done = moelib("prepare", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_line_is_named_and_can_be_skipped(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "good"}\nnot json\n{"text": "good too"}\n')
    args = ["prepare", "--source", corpus, "--tokenizer", "bytes", "--num_processes", 1]
    done = moelib(*args, "--output", tmp_path / "a")
    assert done.returncode == 2
    assert "corpus.jsonl:2: not JSON" in done.stderr
    done = moelib(*args, "--output", tmp_path / "b", "--skip_bad_lines")
    assert done.returncode == 0, done.stderr
    store = TokenStore.default_config().set(path=str(tmp_path / "b"), split=None).instantiate()
    assert store.num_documents == 2


def test_split_that_is_no_fraction_is_named():
    with pytest.raises(UsageError, match="--splits train: expected name=fraction"):
        prepare.read_splits(["train"])
