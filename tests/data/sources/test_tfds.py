import json
import os
import shutil

import pytest

from moelib.cli import main
from moelib.core.errors import UserError
from moelib.data.sources import tfds as tfds_source
from moelib.data.sources.tfds import TFDSSource, import_tensorflow, import_tfds
from tests.data.sources.tfds_corpus import write_corpus

pytestmark = pytest.mark.filterwarnings("ignore")  # TFDS uses deprecated functions.

TEXTS = [f"Text {i} ü" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(TEXTS, str(tmp_path_factory.mktemp("tfds")))


def _source(name: str, **fields: str) -> TFDSSource:
    return TFDSSource.default_config().set(name=name, **fields).instantiate()


def test_parts_are_ranges_with_the_documents_of_the_whole(folder, monkeypatch):
    monkeypatch.setattr(tfds_source, "_PART_BYTES", 60)
    parts = _source(folder).parts()
    assert len(parts) > 3
    texts = [text for part in parts for text in part.documents()]
    assert sorted(texts) == sorted(TEXTS)
    assert texts == list(_source(folder).documents())
    assert parts[1].name == f"{folder} train[{parts[0].end}:{parts[1].end}]"


def test_unknown_names_are_reported(folder, tmp_path):
    with pytest.raises(ValueError, match=r"TFDS.*'nonesuch'") as raised:
        _source("nonesuch", data_dir=str(tmp_path)).parts()
    assert len(str(raised.value)) < 400  # TFDS lists all it has.
    with pytest.raises(ValueError, match=r"mine/1.0.0.*'trian'.*'train'"):
        _source(folder, split="trian").parts()
    with pytest.raises(ValueError, match=r"'txt'.*text_field:.*'text'"):
        _source(folder, text_field="txt").parts()


@pytest.mark.parametrize("key", ["pythonClassName", "type"])
def test_code_that_a_data_set_names_is_refused_and_not_run(
    folder, tmp_path, monkeypatch, capsys, key
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    shutil.copytree(folder, tmp_path / "copy")
    text: object = {key: "hostile.Text", "content": "{}"} if key == "type" else None
    features = json.loads((tmp_path / "copy/features.json").read_text())
    features["featuresDict"]["features"]["text"]["pythonClassName"] = "hostile.Text"
    (tmp_path / "copy/features.json").write_text(json.dumps(text or features))
    flags = [f"--source=tfds:{tmp_path / 'copy'}", "--output=out", "--tokenizer=bytes"]
    assert main.run(["prepare", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "copy") in line
    assert "'hostile.Text'" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow  # Imports TensorFlow: 7 s of an idle processor, up to 50 of a busy one.
def test_data_sets_in_tfrecord_are_read(tmp_path):
    name = write_corpus(TEXTS, str(tmp_path), "tfrecord")
    assert sorted(_source(name).documents()) == sorted(TEXTS)


@pytest.mark.slow
def test_a_data_set_that_tfds_stores_itself_is_read(tmp_path):
    tfds, tf = import_tfds(), import_tensorflow()
    tfds.dataset_builders.store_as_tfds_dataset(
        name="stored",
        version="1.0.0",
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        split_datasets={"train": tf.data.Dataset.from_tensor_slices({"text": TEXTS})},
        data_dir=str(tmp_path),
    )
    found = _source(str(tmp_path / "stored" / "1.0.0")).documents()
    assert sorted(found) == sorted(TEXTS)


@pytest.mark.parametrize("damage", ["features", "info", "truncated", "missing", "folder"])
def test_a_damaged_data_set_is_named(folder, tmp_path, damage):
    shutil.copytree(folder, copy := tmp_path / "copy")
    (records,) = copy.glob("*.array_record*")
    if damage == "features":
        (copy / "features.json").write_text("{")
    elif damage == "info":
        (copy / "dataset_info.json").write_text('{"name": []}')
    elif damage == "truncated":
        os.truncate(records, 70_000)
    else:
        records.unlink()
        if damage == "folder":
            records.mkdir()
    with pytest.raises(UserError, match=f"{copy}.*copy or build it again"):
        list(_source(str(copy)).documents())
