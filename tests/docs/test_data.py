"""The examples of docs/data.md."""

import gzip
import json
import os
import pathlib
import subprocess
import sysconfig

import numpy as np
import pytest

from moelib.cli.prepare import read_share
from moelib.core.errors import ExistingFileError, UserError
from moelib.data.batches.describe import describe_batch
from moelib.data.batches.input import load_tokenizer
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import DocumentBoundary, Packing
from moelib.data.batches.streaming import StreamingInput
from moelib.data.sources.files import TextFiles
from moelib.data.sources.json_lines import JsonLines
from moelib.data.tokens.corpus_tokenizer import corpus_tokenizer
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer
from moelib.train.evaler import SpmdEvaler
from tests.docs import blocks

kubernetes_validate = pytest.importorskip("kubernetes_validate")  # Of the extra dev.
yaml = pytest.importorskip("yaml")


def _prepare() -> TokenStore:
    # --8<-- [start:prepare]
    source = TextFiles.default_config().set(paths=["books"]).instantiate()
    splits = {"train": 0.8, "validation": 0.2}
    tokenizer = corpus_tokenizer(source, 512, "data/books.tokenizer.json", splits=splits)
    store = prepare(source, tokenizer, "data/books", splits=splits)
    # --8<-- [end:prepare]
    return store


@pytest.fixture
def store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> TokenStore:
    """A token store data/books in the current folder, from texts in books/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    for index, file in enumerate(sorted(library.glob("[a-d]*.py"))[:40]):
        text = file.read_text(encoding="utf-8", errors="replace")
        (tmp_path / "books" / f"{index:02d}.txt").write_text(text[:4000])
    return _prepare()


def test_a_store_is_reused_and_follows_its_corpus(store):
    assert _prepare().meta == store.meta
    for file in pathlib.Path("books").iterdir():
        file.touch()
    assert _prepare().meta == store.meta
    pathlib.Path("books/more.txt").write_text("Another document.")
    with pytest.raises(ExistingFileError, match="source"):
        _prepare()


def test_a_batch_is_a_function_of_seed_and_step(store):
    # --8<-- [start:input]
    cfg = LMInput.default_config().set(
        source=TokenStore.default_config().set(path="data/books", split="train"),
        seq_len=128,
        global_batch_size=4,
        packing=Packing.BEST_FIT,
        document_boundary=DocumentBoundary.RESET,
        seed=0,
    )
    # --8<-- [end:input]
    # --8<-- [start:look]
    lm_input = cfg.instantiate()
    batch = lm_input.batch(1000)  # The global batch of step 1000; nothing before it is read.
    print(describe_batch(batch, load_tokenizer(cfg), max_sequences=2))
    print(lm_input.sequences_per_epoch, lm_input.sources[0].num_tokens)
    # --8<-- [end:look]
    halves = [cfg.instantiate().batch(1000, rows) for rows in (range(2), range(2, 4))]
    for name in batch:
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), batch[name])


def test_a_mixture(store):
    # --8<-- [start:mixture]
    books = TokenStore.default_config().set(path="data/books")
    held_out = TokenStore.default_config().set(path="data/books", split="validation")
    mixture = Mixture.default_config().set(
        sources={"books": books, "more": held_out}, weights={"books": 0.75, "more": 0.25}
    )
    cfg = LMInput.default_config().set(source=mixture, seq_len=128, global_batch_size=4)
    # --8<-- [end:mixture]
    # --8<-- [start:locate]
    opened = mixture.instantiate()
    source, number = opened.locate(np.arange(8))  # Of the first 8 sequences of the run.
    names = [opened.names[index] for index in source]
    # --8<-- [end:locate]
    # --8<-- [start:evaler]
    evaler = SpmdEvaler.default_config().set(input=cfg.clone(max_batches=20, seed=1))
    # --8<-- [end:evaler]
    assert evaler.input.instantiate().source_names == ["books", "more"]
    assert names.count("books") == 6
    assert cfg.instantiate().batch(0)["input_ids"].shape == (4, 128)
    assert len(number) == 8
    with pytest.raises(UserError, match="weights"):
        mixture.clone(weights={"books": 1.0}).instantiate()


def test_a_stream(store):
    # --8<-- [start:streaming]
    cfg = StreamingInput.default_config().set(
        source=JsonLines.default_config().set(paths=["web/*.jsonl.gz"]),
        tokenizer=Tokenizer.default_config().set(path="data/books"),
        seq_len=128,
        global_batch_size=4,
        shuffle_buffer=1024,
    )
    # --8<-- [end:streaming]
    assert cfg.tokenizer.instantiate().vocab_size == store.vocab_size


@pytest.mark.slow
def test_datasets_filters_what_is_prepared(tmp_path, monkeypatch):
    """Needs MOELIB_DATA_PYTHON, a Python that has `datasets`."""
    if not (python := os.environ.get("MOELIB_DATA_PYTHON")):
        pytest.skip("set MOELIB_DATA_PYTHON to a Python with datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    texts = [f"text {i % 15} " * (20 + i % 15) for i in range(40)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    pathlib.Path("web/a.jsonl").write_text("".join(lines[:25]))
    pathlib.Path("web/b.jsonl.gz").write_bytes(gzip.compress("".join(lines[25:]).encode()))
    script = pathlib.Path(__file__).with_name("filter_with_datasets.py")
    subprocess.run([python, script], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    clean = JsonLines.default_config().set(paths=["clean"]).instantiate()
    tokenizer = ByteTokenizer.default_config().instantiate()
    found = list(prepare(clean, tokenizer, "data/clean").texts())
    assert found == texts[5:15]  # Those of 50 words or more, once.


def test_an_indexed_job_of_kubernetes_is_one_of_its_schema():
    (text,) = [x.text for x in blocks.blocks("docs/data.md") if x.title == "prepare.yaml"]
    job = yaml.safe_load(text)
    kubernetes_validate.validate(job, "1.31", strict=True)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    completions = job["spec"]["completions"]
    (share,) = [x.partition("=")[2] for x in container["command"] if "--share" in x]
    indices = map(str, range(completions))
    shares = {read_share(share, {"JOB_COMPLETION_INDEX": index}) for index in indices}
    assert shares == {(index, completions) for index in range(completions)}
