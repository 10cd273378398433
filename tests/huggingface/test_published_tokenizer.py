import json

import pytest

from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from moelib.huggingface.published_tokenizer import PublishedTokenizer, read_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe(["Grüße, a text"], 260, str(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("template", "add_bos_token", "has_bos"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_prompts_of_a_published_model_begin_with_bos(
    trained, tmp_path, template, add_bos_token, has_bos
):
    content = json.loads(trained.to_json())
    bos = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"id": END_OF_TEXT, "ids": [trained.eos_id], "tokens": [END_OF_TEXT]}
    if template:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {END_OF_TEXT: special},
        }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    cfg = PublishedTokenizer.default_config().set(path=str(tmp_path), bos_token=END_OF_TEXT)
    tokenizer = cfg.set(add_bos_token=add_bos_token).instantiate()
    assert tokenizer.prefix_id == tokenizer.bos_id == trained.eos_id
    begin = [trained.eos_id] if has_bos else []
    ids = [*begin, *trained.encode("a"), trained.eos_id]
    texts, documents = ["", f"a{END_OF_TEXT}"], []
    during = (documents.append(tokenizer.encode(x)) or x for x in texts)  # As in another thread.
    assert tokenizer.encode_prompts(during) == [begin, ids]
    assert documents == [trained.encode(x) for x in texts]


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True},
        {"add_bos_token": True, "bos_token": "<s>"},
        {"add_bos_token": "false", "bos_token": END_OF_TEXT},
        {"bos_token": 5},
        {"eos_token": "\ud800"},
    ],
)
def test_settings_that_do_not_fit_the_tokenizer_are_refused(trained, tmp_path, settings):
    trained.save(str(tmp_path))
    content = json.dumps({"eos_token": END_OF_TEXT} | settings)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match="|".join((*settings, str(tmp_path)))):
        read_tokenizer(str(tmp_path), published=True)


def test_code_of_a_published_tokenizer_is_not_run(trained, tmp_path, monkeypatch):
    trained.save(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("hostile", "tokenization_hostile"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    settings = {
        "eos_token": END_OF_TEXT,
        "auto_map": {"AutoTokenizer": ["hostile.Tokenizer", None]},
        "tokenizer_class": "HostileTokenizer",
        "trust_remote_code": True,
        "chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    read = read_tokenizer(str(tmp_path), published=True)
    assert read.encode("a") == trained.encode("a")
    assert not (tmp_path / "ran").exists()
