"""The tokenizer and the other files of a model in the run that starts from it."""

import json
import shutil
import types

import pytest

from moelib.core.errors import UserError
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.data.tokens.tokenizer import END_OF_TEXT, ByteTokenizer, train_bpe
from moelib.huggingface.pretrained import FILES
from moelib.runs.loading import load_model
from moelib.runs.model_files import save_tokenizer
from moelib.train import checkpoint_routing, convert
from moelib.train.evaler import SpmdEvaler
from moelib.train.init_from import InitFrom
from tests import tiny
from tests.train import small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published model, `hub`, and stores of its tokenizer and of another one."""
    folder = tmp_path_factory.mktemp("files")
    (hub := folder / "hub").mkdir()
    small_run.make_hub(hub)
    settings = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "padding_side": "left"}
    (hub / "tokenizer_config.json").write_text(json.dumps(settings))
    (hub / "chat_template.jinja").write_text("{{ messages }}")
    (hub / "special_tokens_map.json").write_text("{}")
    generation = {"eos_token_id": [256, 7], "temperature": 0.6}
    (hub / "generation_config.json").write_text(json.dumps(generation))
    published = json.loads((hub / "config.json").read_text())
    published |= {"bos_token_id": 256, "pad_token_id": 9}
    (hub / "config.json").write_text(json.dumps(published))
    (hub / "SHA256SUMS").unlink()
    small_run.make_store(folder / "store")
    other = train_bpe(["entirely different words"], 280, str(folder / "other.json"))
    tokenizers = {"other": other, "bytes": ByteTokenizer.default_config().instantiate()}
    for name, tokenizer in tokenizers.items():
        source = InMemorySource.default_config().set(texts=small_run.TEXTS * 9).instantiate()
        prepare(source, tokenizer, str(folder / name))
    convert.from_hugging_face(str(hub), str(folder / "converted"))
    return folder


def trainer_config(folder, to, way, store="store"):
    source = TokenStore.default_config().set(path=str(folder / store))
    cfg = small_run.trainer_config(to, source)
    cfg.model = tiny.dense_model(288, num_layers=2, dim=8)
    if way:
        cfg.init_from = InitFrom.default_config().set(run=str(folder / way))
    return cfg


WAYS = ["hub", "converted"]


@pytest.mark.parametrize("way", WAYS)
def test_files_of_a_published_model_travel_to_the_export_of_a_run(folder, tmp_path, way):
    trainer_config(folder, tmp_path / "run", way).instantiate(parent=None).run()
    assert load_model(str(tmp_path / "run")).stop_ids == (7, 256)
    convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"))
    for name in FILES[1:]:
        assert (tmp_path / "back" / name).read_text() == (folder / "hub" / name).read_text()
    settings = [
        json.loads((f / "config.json").read_text()) for f in (folder / "hub", tmp_path / "back")
    ]
    assert settings[1] | {"dtype": "bfloat16"} == settings[0]


def test_an_export_also_stops_at_the_end_of_text_of_the_data(folder, tmp_path, caplog):
    cfg = trainer_config(folder, tmp_path / "run", "hub")
    shutil.copytree(folder / "hub", tmp_path / "base")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = tmp_path / "base" / name
        path.write_text(path.read_text().replace("256", "5").replace(END_OF_TEXT, "%"))
    cfg.init_from.run = str(tmp_path / "base")
    cfg.instantiate(parent=None).run()
    convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"))
    found = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert sorted(found["eos_token_id"]) == [5, 7, 37, 256]  # 37: "%".
    assert "eos_token '%' has id 37, but eos_token_id is [5, 7]" in caplog.text


def test_the_tokens_of_the_template_of_the_data_travel_with_it(folder, tmp_path):
    for name in ("run", "store"):
        shutil.copytree(folder / ("hub" if name == "run" else "store"), tmp_path / name)
    (tmp_path / "store/chat_template.jinja").write_text("{{ eos_token }}")
    path = tmp_path / "run/tokenizer_config.json"
    before = json.loads(path.read_text()) | {"eos_token": "%"}
    path.write_text(json.dumps(before))
    cfg = types.SimpleNamespace(
        input=trainer_config(tmp_path, "", None).input,
        dir=str(tmp_path / "run"),
        model=types.SimpleNamespace(vocab_size=288),
    )
    assert save_tokenizer(cfg)
    assert json.loads(path.read_text()) == before | {"eos_token": "<end>"}


@pytest.mark.parametrize("way", [*WAYS, "evaler"])
def test_data_of_another_tokenizer_are_refused(folder, tmp_path, way):
    cfg = trainer_config(folder, tmp_path / "run", way if way in WAYS else None, "other")
    if way == "evaler":
        evaler = SpmdEvaler.default_config().set(input=cfg.input.clone(max_batches=1))
        evaler.input.source.path = str(folder / "store")
        cfg.evalers = {"val": evaler}
    name = {"evaler": r"evalers\.val\.input", "converted": "converted"}.get(way, "hub")
    with pytest.raises(UserError, match=f"{name} have different tokenizers.*tokenizer"):
        cfg.instantiate(parent=None).run()


def test_data_of_another_tokenizer_are_accepted(folder, tmp_path):
    cfg = trainer_config(folder, tmp_path, "hub", "bytes")
    cfg.set(accept_changes=["tokenizer"]).instantiate(parent=None).run()
    assert not (tmp_path / "chat_template.jinja").exists()
    saved, used = (f / "tokenizer.json" for f in (tmp_path, folder / "bytes"))
    assert saved.read_text() == used.read_text()


def test_a_routing_log_of_data_of_another_tokenizer_is_refused(folder, tmp_path):
    cfg = trainer_config(folder, tmp_path, None, "other")
    evaler = SpmdEvaler.default_config().set(input=cfg.input.clone(max_batches=1))
    for name in FILES[1:3]:
        shutil.copy(folder / "store" / name, tmp_path)
    loaded = types.SimpleNamespace(config=cfg.set(evalers={"val": evaler}))
    with pytest.raises(UserError, match="different tokenizers"):
        checkpoint_routing._writer_for(loaded, str(tmp_path), "val", 1)
