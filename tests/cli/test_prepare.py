"""`moelib prepare`: a corpus becomes a token store; broken corpora are reported."""

import subprocess
import sys

import pytest

from moelib.cli import prepare
from moelib.core.command_line import describe_flags, parse_flags
from moelib.core.errors import UserError
from moelib.data import corpus_tokenizer, tokenizer
from moelib.data.token_store import TokenStore


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
        (["--source", "x", "--output", "y"], "either --tokenizer or --train_bpe"),
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
    for items in ("train", "=1", "train=0.5,train=0.5"):
        wrong = items.split(",")[-1]
        with pytest.raises(UserError, match=f"--splits {wrong}: expected name=fraction"):
            prepare.read_splits(items)


def run_prepare(**values):
    """Runs the command with these flags in this process."""
    args = ["--num_processes=1", *(f"--{name}={value}" for name, value in values.items())]
    prepare.run(*parse_flags(prepare.Flags, args))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "document number {i}"}}\n' for i in range(200)))
    return path


def test_tokenizer_of_another_size_is_not_taken_for_the_one_asked_for(corpus, tmp_path):
    path = tmp_path / "store"
    run_prepare(source=corpus, output=path, train_bpe=300)
    run_prepare(source=corpus, output=path, train_bpe=300)
    message = r"store\.tokenizer\.json.*300 tokens.*--train_bpe.*280"
    with pytest.raises(UserError, match=message):
        run_prepare(source=corpus, output=path, train_bpe=280)


def test_splits_are_checked_before_a_tokenizer_is_trained(corpus, tmp_path):
    with pytest.raises(UserError, match=r"splits=\{'train': 0.5\}"):
        run_prepare(source=corpus, output=tmp_path / "a", train_bpe=300, splits="train=0.5")
    with pytest.raises(UserError, match=r"--splits.*name=fraction"):
        run_prepare(source=corpus, output=tmp_path / "a", train_bpe=300, splits="validation")
    assert not (tmp_path / "a.tokenizer.json").exists()


def test_tokenizer_learns_from_the_training_split_alone(corpus, tmp_path, monkeypatch):
    learnt = []
    train_bpe = tokenizer.train_bpe
    monkeypatch.setattr(
        corpus_tokenizer,
        "train_bpe",
        lambda texts, *args: train_bpe(learnt.extend(texts) or learnt, *args),
    )
    run_prepare(
        source=corpus, output=tmp_path / "store", train_bpe=300, splits="validation=0.3,train=0.7"
    )
    store = TokenStore.default_config().set(path=str(tmp_path / "store"), split="train")
    assert learnt == list(store.instantiate().texts())


def test_end_of_text_of_a_tokenizer_can_be_named(corpus, tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizer.train_bpe(["some text"], 258, str(file))
    file.write_text(file.read_text().replace(tokenizer.END_OF_TEXT, "<end>"))
    with pytest.raises(UserError, match=r"eos_token \(--eos_token\)"):
        run_prepare(source=corpus, output=tmp_path / "a", tokenizer=file)
    run_prepare(source=corpus, output=tmp_path / "a", tokenizer=file, eos_token="<end>")
    store = TokenStore.default_config().set(path=str(tmp_path / "a")).instantiate()
    assert store.meta.eos_token == "<end>"
    with pytest.raises(UserError, match="--eos_token"):
        run_prepare(source=corpus, output=tmp_path / "b", tokenizer="bytes", eos_token="<end>")


def test_help_names_a_data_sets_split_as_it_is_read():
    (info,) = (info for info in describe_flags(prepare.Flags) if info.name == "source")
    assert "tfds:NAME[@SPLIT]" in info.help
    source = prepare.source_for(prepare.Flags(), "tfds:c4/en@validation")
    assert (source.name, source.split) == ("c4/en", "validation")


def test_a_damaged_store_is_found_by_verify(corpus, tmp_path, capsys):
    store = tmp_path / "store"
    prepare.run(prepare.Flags(source=str(corpus), output=str(store), tokenizer="bytes"), [])
    verify, _ = parse_flags(prepare.Flags, ["--verify", f"--output={store}"])
    prepare.run(verify, [])
    assert f"{store}: " in capsys.readouterr().err.splitlines()[-1]
    (store / "tokens-00000.bin").write_bytes(b"\1" * (store / "tokens-00000.bin").stat().st_size)
    with pytest.raises(UserError, match=rf"{store} is damaged: .*tokens-00000\.bin"):
        prepare.run(verify, [])
    with pytest.raises(UserError, match="--output"):
        prepare.run(prepare.Flags(verify=True), [])
