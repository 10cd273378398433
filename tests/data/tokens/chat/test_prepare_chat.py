"""Stores of conversations: batches have the labels of the examples, whatever the packing."""

import collections
import csv
import json
import os
import shutil

import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from moelib.cli import main as cli
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import DocumentBoundary, LongDocuments, Packing
from moelib.data.sources.source import BadRecordError, InMemorySource
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.tokens.chat.labels import ChatEncoder, ChatOptions, chat_options
from moelib.data.tokens.chat.template import ChatTemplate, find_template
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.layers.transformer import LoopStack
from tests import tiny
from tests.data.tokens.chat.templates import TEMPLATES
from tests.inference.models import decoder, layer, with_parameters
from tests.oracles import chat_labels

DAY = {"bos_token": "", "eos_token": "<|endoftext|>", "today": "2026-01-01"}
OPTIONS = ChatOptions(chat_labels.TEMPLATE, **DAY)
TOKENIZER = ByteTokenizer.default_config().instantiate()
CHAT = {"chat": OPTIONS, "append_eos": False}


def record(number):
    """Returns a conversation with one to three answers."""
    messages = []
    for i in range(number % 3 + 1):
        messages.append({"role": "user", "content": f"question {number}.{i}"})
        messages.append({"role": "assistant", "content": f"{number}" * (i + 1)})
    return json.dumps({"messages": messages})


RECORDS = [record(i) for i in range(150)]


def write_jsonl(path, records):
    path.write_text("\n".join(records) + "\n")


def source(folder, records=RECORDS):
    """Returns a source of three files."""
    folder.mkdir(exist_ok=True)
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", records[i * 50 : (i + 1) * 50 if i < 2 else None])
    return source_for_path(str(folder), text_field=None).instantiate()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The folder of a store of several parts."""
    folder = tmp_path_factory.mktemp("data") / "store"
    prepare(source(folder.parent / "in"), TOKENIZER, str(folder), **CHAT)
    return str(folder)


def lm_input(path, **fields):
    """Returns an input of one epoch."""
    settings = {"packing": Packing.BEST_FIT, "mode": InputMode.EVALUATE, "seq_len": 160}
    settings |= {"global_batch_size": 4, "long_documents": LongDocuments.ERROR, **fields}
    settings.setdefault("source", TokenStore.default_config().set(path=path))
    return LMInput.default_config().set(**settings).instantiate()


def test_the_example_of_the_page(tmp_path):
    path = str(tmp_path / "chat.jsonl")
    write_jsonl(tmp_path / "chat.jsonl", RECORDS)
    # --8<-- [start:python]
    tokenizer = ByteTokenizer.default_config().instantiate()
    template = find_template(None, "plain", tokenizer)
    records = source_for_path(path, text_field=None).instantiate()
    chat = chat_options(template, records, max_length=512)
    store = prepare(records, tokenizer, path + ".store", chat=chat, append_eos=False)
    # --8<-- [end:python]
    assert store.num_documents == len(RECORDS)


def examples():
    encoder = ChatEncoder(OPTIONS, TOKENIZER)
    return [each for text in RECORDS for each in encoder.examples(json.loads(text))]


def test_batches_have_the_labels_of_the_examples(store):
    found = []
    opened = lm_input(store)
    for step in range(opened.num_batches):
        batch = opened.batch(step)
        num_bytes = batch["target_num_bytes"]
        for row in range(4):
            labels = batch["target_labels"][row]
            segments = batch["segment_ids"][row]
            assert num_bytes[row] == np.sum(TOKENIZER.token_num_bytes()[labels[labels >= 0]])
            for segment in range(1, segments.max() + 1):
                mine = segments == segment
                found.append((tuple(batch["input_ids"][row][mine]), tuple(labels[mine])))
    expected = [
        (
            tuple(each.ids[:-1]),
            tuple(
                token if label else -1
                for token, label in zip(each.ids[1:], each.is_label[1:], strict=True)
            ),
        )
        for each in examples()
    ]
    assert sorted(found) == sorted(expected)


def test_the_loss_is_the_mean_over_labels(store):
    model, params = with_parameters(
        tiny.model_config(decoder(layer(), kind=LoopStack), vocab_size=257)
    )
    batch = lm_input(store).batch(0)

    @jax.jit
    def loss_and_logits(params, batch):
        (loss, _), _ = functional(model, None, params, (batch,), is_training=False)
        run = functional(model, None, params, (batch,), is_training=False, method="logits")
        return loss, run[0]

    loss, logits = loss_and_logits(params, batch)
    labels = batch["target_labels"]
    rows, columns = np.nonzero(labels >= 0)
    log_probs = np.asarray(jax.nn.log_softmax(logits))[rows, columns, labels[rows, columns]]
    assert float(loss.mean) == pytest.approx(-log_probs.mean(), rel=1e-5)
    assert float(loss.weight) == len(rows)


def test_a_mixture_of_text_and_conversations_has_labels_of_both(store, tmp_path):
    text = InMemorySource.default_config().set(texts=["plain text " * 9] * 40).instantiate()
    prepare(text, TOKENIZER, str(tmp_path / "text"))
    sources = {
        "chat": TokenStore.default_config().set(path=store),
        "text": TokenStore.default_config().set(path=str(tmp_path / "text")),
    }
    mixture = Mixture.default_config().set(sources=sources, weights={"chat": 1.0, "text": 1.0})
    opened = lm_input(store, source=mixture, mode=InputMode.TRAIN)
    batch = opened.batch(0)
    for row, number in enumerate(opened.source_ids(0)):
        used = batch["segment_ids"][row] > 0
        is_label = batch["target_labels"][row][used] >= 0
        assert is_label.all() == (opened.source_names[number] == "text")


def test_parts_and_processes_make_equal_stores(store, tmp_path):
    again = prepare(
        source(tmp_path / "in"), TOKENIZER, str(tmp_path / "again"), num_processes=2, **CHAT
    )
    first = TokenStore.default_config().set(path=store, split=None).instantiate()
    assert again.meta == first.meta
    np.testing.assert_array_equal(again.label_bounds, first.label_bounds)
    assert len(again.meta.file_tokens) == 3


def test_the_examples_of_a_conversation_are_in_one_split(tmp_path):
    dropped = ChatOptions(TEMPLATES["reasoning of earlier turns is dropped"], **DAY)
    records = []
    for i in range(120):
        contents = [f"record {i}.", "<think>\nhm\n</think>\n\n1"] * (i % 3 + 1)
        roles = ["user", "assistant"] * (i % 3 + 1)
        messages = [{"role": r, "content": x} for r, x in zip(roles, contents, strict=True)]
        records.append(json.dumps({"messages": messages}))
    splits = {"train": 0.5, "validation": 0.5}
    settings = {"chat": dropped, "append_eos": False, "splits": splits}
    path = str(tmp_path / "store")
    prepare(source(tmp_path / "in", records), TOKENIZER, path, **settings)
    found = {}
    for name in splits:
        texts = TokenStore.default_config().set(path=path, split=name).instantiate().texts()
        found[name] = collections.Counter(text.split("record ")[1].split(".")[0] for text in texts)
    assert not found["train"].keys() & found["validation"].keys()
    whole = found["train"] + found["validation"]
    assert whole == {str(i): i % 3 + 1 for i in range(120)}


def test_the_template_travels_with_the_store(store, tmp_path):
    tokenizer = TokenStore.load_tokenizer(TokenStore.default_config().set(path=store))
    assert tokenizer.chat_template == chat_labels.TEMPLATE
    tokenizer.save(str(tmp_path))
    assert (tmp_path / "chat_template.jinja").read_text() == chat_labels.TEMPLATE


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "llama3",
            (
                "<s><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>"
            ),
        ),
        ("plain", "User:\nq\n\nAssistant:\na<|end|>\n\n"),
    ],
)
def test_a_run_renders_the_text_of_its_store(tmp_path, template, text):
    content = json.loads(TOKENIZER.to_json())
    first = content["added_tokens"][0]
    for i, token in enumerate(("<s>", "<|end|>"), 257):
        content["added_tokens"].append(first | {"id": i, "content": token})
    for name in ("tokenizer", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write_jsonl(tmp_path / "a.jsonl", [json.dumps({"messages": messages})])
    flags = [f"--source={tmp_path / 'a.jsonl'}", f"--output={tmp_path / 'store'}"]
    flags += [f"--tokenizer={tmp_path / 'tokenizer'}", "--eos_token=<|end|>", "--num_processes=1"]
    assert cli.run(["prepare", *flags, "--format=chat", f"--chat_template={template}"]) == 0
    cfg = TokenStore.default_config().set(path=str(tmp_path / "store"))
    assert [*cfg.instantiate().texts()] == [text]
    TokenStore.load_tokenizer(cfg).save(str(tmp_path / "run"))
    tokenizer = read_tokenizer(str(tmp_path / "run"))
    assert find_template(str(tmp_path / "run"), None, tokenizer).render(messages) == text
    assert tokenizer.bos_id is None  # A prompt that is no conversation.


def test_another_template_makes_another_store(store, tmp_path):
    other = ChatOptions("x" + OPTIONS.template, **DAY)
    with pytest.raises(UserError, match="different chat"):
        prepare(source(tmp_path), TOKENIZER, store, chat=other, append_eos=False)
    with pytest.raises(UserError, match=r"different .*chat"):
        prepare(source(tmp_path), TOKENIZER, store)
    with pytest.raises(UserError, match="append_eos"):
        prepare(source(tmp_path), TOKENIZER, store, chat=other)


def test_damaged_labels_are_found(store, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    bounds = np.load(copy / "label_bounds.npy")
    bounds[0] += 1
    np.save(copy / "label_bounds.npy", bounds)
    with pytest.raises(UserError, match=r"damaged.*label_bounds"):
        lm_input(str(copy))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": Packing.CONCAT_AND_SPLIT}, "packing=CONCAT_AND_SPLIT.*BEST_FIT"),
        (
            {
                "packing": Packing.CONCAT_AND_SPLIT,
                "document_boundary": DocumentBoundary.CONTINUE,
            },
            "document_boundary=CONTINUE",
        ),
        ({"seq_len": 24}, "seq_len=24"),
    ],
)
def test_settings_that_divide_conversations_are_refused(store, fields, message):
    with pytest.raises(UserError, match=message):
        lm_input(store, **fields)


BAD = [
    json.dumps({"messages": [{"role": "user", "content": "u"}]}),
    json.dumps({"messages": [{"role": "boss", "content": "u"}]}),
    json.dumps({"messages": [{"role": "user", "content": "u"}]}),
]


def test_bad_records_are_errors_or_counted_by_reason(tmp_path, capfd):
    with pytest.raises(BadRecordError, match=r"2.jsonl:51: no message of an assistant.*skip_bad"):
        prepare(source(tmp_path / "in", RECORDS + BAD), TOKENIZER, str(tmp_path / "a"), **CHAT)
    long = ChatOptions(**{**vars(OPTIONS), "max_length": 40})
    settings = CHAT | {"chat": long, "skip_bad_records": True}
    made = prepare(
        source(tmp_path / "in", RECORDS + BAD), TOKENIZER, str(tmp_path / "b"), **settings
    )
    report = capfd.readouterr().err
    assert "no message of an assistant: 2, unknown role: 1" in report
    num_long = sum(len(each.ids) > 40 for each in examples())
    assert f"{num_long} conversations cut" in report
    assert made.meta.num_bad_records == 3
    assert made.lengths.max() <= 40


def write_parquet(path, records):
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(x) for x in records]), path)


def write_csv(path, records):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        for each in records:
            messages = json.loads(each)["messages"]
            writer.writerow([message["content"] for message in messages[:2]])


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.parquet", write_parquet), ("a.csv", write_csv)],
)
def test_the_command_reads_files_of_records(tmp_path, name, write, capfd):
    write(tmp_path / name, RECORDS[::3])
    flags = [f"--source={tmp_path / name}", f"--output={tmp_path / 'out'}", "--tokenizer=bytes"]
    flags += ["--format=chat", "--chat_template=plain", "--num_processes=1"]
    assert cli.run(["prepare", *flags]) == 0
    assert "are labels" in capfd.readouterr().err
    made = TokenStore.default_config().set(path=str(tmp_path / "out")).instantiate()
    texts = [f"User:\nquestion {i}.0\n\nAssistant:\n{i}<|endoftext|>\n\n" for i in range(0, 150, 3)]
    assert [*made.texts()] == texts


def test_the_day_of_the_template_is_that_of_the_data(tmp_path):
    records = source(tmp_path / "in")
    os.utime(tmp_path / "in" / "1.jsonl", (2e9, 2e9))
    records = source_for_path(str(tmp_path / "in"), text_field=None).instantiate()
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert chat_options(template, records).today == "2033-05-18"
    assert chat_options(ChatTemplate("no day"), records).today == "1970-01-01"


def test_a_store_of_touched_files_is_found_with_its_day(tmp_path):
    template = ChatTemplate("{{ strftime_now('%Y') }}" + chat_labels.TEMPLATE)
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    for seconds in (1e9, 2e9):
        os.utime(tmp_path / "a.jsonl", (seconds, seconds))
        records = source_for_path(str(tmp_path / "a.jsonl"), text_field=None).instantiate()
        settings = CHAT | {"chat": chat_options(template, records)}
        made = prepare(records, TOKENIZER, str(tmp_path / "store"), **settings)
        assert next(made.texts()).startswith("2001")
    write_jsonl(tmp_path / "a.jsonl", RECORDS[1:])
    records = source_for_path(str(tmp_path / "a.jsonl"), text_field=None).instantiate()
    with pytest.raises(UserError, match="different source and chat"):
        prepare(records, TOKENIZER, str(tmp_path / "store"), **settings)


def test_no_tokenizer_is_trained_on_records_of_conversations(tmp_path, capfd):
    flags = [f"--source={tmp_path}", f"--output={tmp_path / 'out'}", "--format=chat"]
    assert cli.run(["prepare", *flags, "--train_bpe=300"]) == 2
    assert "--train_bpe is of --format text" in capfd.readouterr().err


def test_the_command_requires_a_template(tmp_path, capfd):
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    flags = [f"--source={tmp_path / 'a.jsonl'}", f"--output={tmp_path / 'out'}"]
    assert cli.run(["prepare", *flags, "--tokenizer=bytes", "--format=chat"]) == 2
    assert "--chat_template" in capfd.readouterr().err


def test_documents_in_memory_are_no_records(tmp_path):
    texts = InMemorySource.default_config().set(texts=RECORDS).instantiate()
    with pytest.raises(UserError, match="no records; use JSON lines"):
        prepare(texts, TOKENIZER, str(tmp_path / "a"), **CHAT)
