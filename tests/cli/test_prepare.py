"""`moelib prepare`: a corpus becomes a token store; broken corpora are reported."""

import pytest

from moelib.cli import prepare
from moelib.core.errors import UserError
from moelib.data.tokens import corpus_tokenizer, tokenizer
from moelib.data.tokens.token_store import TokenStore
from moelib.runtime.command_line import describe_flags, parse_flags


def run_prepare(**values):
    """Runs the command with these flags in this process."""
    args = ["--num_processes=1", *(f"--{name}={value}" for name, value in values.items())]
    prepare.run(*parse_flags(prepare.Flags, args))


def opened(path, split=None):
    return TokenStore.default_config().set(path=str(path), split=split).instantiate()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "document number {i}"}}\n' for i in range(200)))
    return path


def test_corpus_becomes_a_store_with_splits_and_a_tokenizer_of_its_own(corpus, tmp_path, capsys):
    store = tmp_path / "store"
    run_prepare(source=corpus, output=store, train_bpe=300, splits="train=0.9,validation=0.1")
    assert "200 documents" in "".join(capsys.readouterr())
    stores = [opened(store, split) for split in ("train", "validation")]
    assert sum(store.num_documents for store in stores) == 200
    assert stores[0].vocab_size == 300


def test_broken_line_is_named_and_can_be_skipped(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "good"}\nnot json\n{"text": "good too"}\n')
    flags = {"source": corpus, "tokenizer": "bytes", "output": tmp_path / "store"}
    with pytest.raises(UserError, match=r"corpus\.jsonl:2: not JSON"):
        run_prepare(**flags)
    run_prepare(**flags, skip_bad_lines=True)
    assert opened(tmp_path / "store").num_documents == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"output": ""}, "--output must be set"),
        ({"tokenizer": ""}, "either --tokenizer or --train_bpe"),
        ({"source": ""}, "--source must be set"),
        ({"splits": "train"}, "--splits train: expected name=fraction"),
        ({"splits": "=1"}, "--splits =1: expected name=fraction"),
        ({"splits": "train=0.5,train=0.5"}, "--splits train=0.5: expected name=fraction"),
    ],
)
def test_wrong_flags_are_named(flags, message):
    given = {"source": "x", "output": "y", "tokenizer": "bytes"} | flags
    with pytest.raises(UserError, match=message):
        run_prepare(**{name: value for name, value in given.items() if value})


def test_tokenizer_of_another_size_is_not_taken_for_the_one_asked_for(corpus, tmp_path):
    path = tmp_path / "store"
    run_prepare(source=corpus, output=path, train_bpe=300)
    run_prepare(source=corpus, output=path, train_bpe=300)
    with pytest.raises(UserError, match=r"store\.tokenizer\.json.*300 .*--train_bpe.*280"):
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
    train = lambda texts, *args: train_bpe(learnt.extend(texts) or learnt, *args)
    monkeypatch.setattr(corpus_tokenizer, "train_bpe", train)
    splits = "validation=0.3,train=0.7"
    run_prepare(source=corpus, output=tmp_path / "store", train_bpe=300, splits=splits)
    assert learnt == list(opened(tmp_path / "store", "train").texts())


def test_end_of_text_of_a_tokenizer_can_be_named(corpus, tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizer.train_bpe(["some text"], 258, str(file))
    file.write_text(file.read_text().replace(tokenizer.END_OF_TEXT, "<end>"))
    with pytest.raises(UserError, match=r"eos_token \(--eos_token\)"):
        run_prepare(source=corpus, output=tmp_path / "a", tokenizer=file)
    run_prepare(source=corpus, output=tmp_path / "a", tokenizer=file, eos_token="<end>")
    assert opened(tmp_path / "a").meta.eos_token == "<end>"
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
