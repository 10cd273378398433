"""BOS before each document of a store, and before the prompts of the runs that it trains."""

import itertools
import json
import pathlib

import pytest

from moelib.cli.main import run
from moelib.core.errors import UserError
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import DocumentBoundary
from moelib.data.batches.streaming import StreamingInput
from moelib.data.sources.source import InMemorySource
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.tokens.chat.labels import chat_options
from moelib.data.tokens.chat.template import find_template
from moelib.data.tokens.preparation import begin_store, plan_store
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import END_OF_TEXT, FILE_NAME, SETTINGS_FILE, Tokenizer, train_bpe
from moelib.huggingface.published_tokenizer import read_tokenizer

TEXTS = ["one", "Grüße <s>", "a third text"]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    """Returns a tokenizer.json with <s>."""
    trained = json.loads(train_bpe(TEXTS, 260, str(tmp_path)).to_json())
    added = {**trained["added_tokens"][0], "id": 260, "content": "<s>"}
    trained["added_tokens"].append(added)
    (tmp_path / FILE_NAME).write_text(json.dumps(trained))
    return str(tmp_path / FILE_NAME)


def _tokenizer(path: str, bos_token: str | None = "<s>") -> Tokenizer:
    return Tokenizer.default_config().set(path=path, bos_token=bos_token).instantiate()


SOURCE = InMemorySource.default_config().set(texts=TEXTS).instantiate()


def test_each_document_begins_with_bos(tmp_path, path):
    tokenizer = _tokenizer(path)
    store = prepare(SOURCE, tokenizer, str(tmp_path / "store"), prepend_bos=True)
    bos, end = tokenizer.bos_id, tokenizer.eos_id
    assert store.meta.bos_token == "<s>"
    for index, text in enumerate(TEXTS):
        assert store.document(index).tolist() == [bos, *tokenizer.encode(text), end]
    assert bos not in tokenizer.encode("Grüße <s>")  # As plain text.
    assert list(store.texts()) == TEXTS
    plain = prepare(SOURCE, tokenizer, str(tmp_path / "plain"), append_eos=False)
    assert [plain.document(i).tolist() for i in range(3)] == tokenizer.encode_batch(TEXTS)
    assert (plain.meta.bos_token, plain.tokenizer().bos_id) == ("", None)


def test_the_documents_of_a_stream_begin_with_bos(path):
    tokenizer = _tokenizer(path)
    cfg = StreamingInput.default_config().set(
        source=InMemorySource.default_config().set(texts=TEXTS),
        tokenizer=tokenizer.config,
        document_boundary=DocumentBoundary.CONTINUE,
        seq_len=12,
        global_batch_size=1,
        shuffle_buffer=1,
        prepend_bos=True,
    )
    iterator = cfg.instantiate().iterator()
    found = [next(iterator)["input_ids"][0].tolist() for _ in range(4)]
    whole = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    flat = lambda lists: [*itertools.chain.from_iterable(lists)]
    assert flat(found) == flat(whole * 4)[:48]
    with pytest.raises(UserError, match="prepend_bos=True: the tokenizer has no BOS"):
        cfg.clone(tokenizer=cfg.tokenizer.clone(bos_token=None)).instantiate()
    with pytest.raises(ValueError, match="prepend_bos"):
        cfg.clone(prepend_bos=False).instantiate().iterator().restore(iterator.state())


def test_prompts_and_contexts_begin_as_documents_do(tmp_path, path):
    prepare(SOURCE, _tokenizer(path), str(tmp_path / "store"), prepend_bos=True)
    of_store = TokenStore.load_tokenizer(TokenStore.default_config().set(path=f"{tmp_path}/store"))
    (tmp_path / "run").mkdir()
    of_store.save(str(tmp_path / "run"))
    for each in (of_store, read_tokenizer(f"{tmp_path}/run"), read_tokenizer(f"{tmp_path}/store")):
        assert each.prefix_id == each.bos_id == 260
        assert each.encode_prompts(TEXTS) == [[260, *each.encode(text)] for text in TEXTS]


def test_a_store_is_that_of_its_bos(tmp_path, path):
    tokenizer, output = _tokenizer(path), str(tmp_path / "store")
    begin_store(plan_store(SOURCE, tokenizer, output, prepend_bos=True), tokenizer)
    with pytest.raises(FileExistsError, match="bos_token=<s>, and this process has bos_token=;"):
        begin_store(plan_store(SOURCE, tokenizer, output), tokenizer)
    prepare(SOURCE, tokenizer, output, prepend_bos=True)
    with pytest.raises(FileExistsError, match="different bos_token"):
        prepare(SOURCE, tokenizer, output)


def test_a_mixture_of_stores_with_and_without_is_refused(tmp_path, path):
    for name in ("with", "without"):
        prepare(SOURCE, _tokenizer(path), str(tmp_path / name), prepend_bos=name == "with")
    stores = {
        n: TokenStore.default_config().set(path=f"{tmp_path}/{n}") for n in ("with", "without")
    }
    cfg = Mixture.default_config().set(sources=stores, weights=dict.fromkeys(stores, 1.0))
    with pytest.raises(UserError, match=r"bos_token='(<s>)?', and .*prepend_bos"):
        cfg.instantiate()


@pytest.mark.parametrize("names", [("text", "chat"), ("chat", "text")])
def test_a_mixture_with_conversations_has_bos_of_text_and_the_template(tmp_path, path, names):
    prepare(SOURCE, _tokenizer(path), str(tmp_path / "text"), prepend_bos=True)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    records = source_for_path(str(tmp_path / "a.jsonl"), text_field=None).instantiate()
    tokenizer = _tokenizer(path)
    chat = chat_options(find_template(None, "llama3", tokenizer), records)
    prepare(records, tokenizer, str(tmp_path / "chat"), chat=chat, append_eos=False)
    stores = {n: TokenStore.default_config().set(path=f"{tmp_path}/{n}") for n in names}
    cfg = Mixture.default_config().set(sources=stores, weights=dict.fromkeys(stores, 1.0))
    assert [source.document(0)[0] for source in cfg.instantiate().sources] == [260, 260]
    found = Mixture.load_tokenizer(cfg)
    assert found.encode_prompts(["a"]) == [[260, *tokenizer.encode("a")]]
    assert found.chat_template == chat.template


def test_a_tokenizer_without_bos_is_refused(tmp_path, path):
    with pytest.raises(UserError, match=r"prepend_bos=True: .*bos_token"):
        prepare(SOURCE, _tokenizer(path, None), str(tmp_path / "store"), prepend_bos=True)
    with pytest.raises(UserError, match="bos_token='<bos>'"):
        _tokenizer(path, "<bos>")


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "special": True}])
def test_the_command_takes_the_name_from_the_settings(tmp_path, path, bos, capsys):
    (tmp_path / "web.txt").write_text("text")
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({"eos_token": END_OF_TEXT}))
    flags = ["prepare", f"--source={tmp_path}/web.txt", f"--output={tmp_path}/a", "--prepend_bos"]
    for tokenizer, message in ((path, f"{SETTINGS_FILE} names no BOS"), ("bytes", "--prepend_bos")):
        assert run([*flags, f"--tokenizer={tokenizer}"])
        assert message in capsys.readouterr().err
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({"bos_token": bos}))
    assert not run([*flags, f"--tokenizer={path}", "--num_processes=1"])
    store = TokenStore.default_config().set(path=f"{tmp_path}/a").instantiate()
    assert store.document(0)[0] == 260
