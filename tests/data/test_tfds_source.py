import pathlib

import pytest

from moelib.data import tfds_source
from moelib.data.source import InMemorySource
from moelib.data.tfds_builder import build_text_corpus
from moelib.data.tfds_source import TFDSSource

pytestmark = pytest.mark.filterwarnings("ignore")  # TFDS uses deprecated functions.

TEXTS = [f"Text {i} ü" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = InMemorySource.default_config().set(texts=TEXTS).instantiate()
    return build_text_corpus(source, "mine", str(tmp_path_factory.mktemp("tfds")))


def _source(name: str, **fields: str) -> TFDSSource:
    return TFDSSource.default_config().set(name=name, **fields).instantiate()


def test_parts_are_ranges_with_the_documents_of_the_whole(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tfds_source, "_PART_BYTES", 60)
    parts = _source(folder).parts()
    assert len(parts) > 3
    texts = [text for part in parts for text in part.documents()]
    assert sorted(texts) == sorted(TEXTS)
    assert texts == list(_source(folder).documents())
    assert parts[1].name == f"{folder} train[{parts[0].end}:{parts[1].end}]"


def test_unknown_names_are_reported(folder: str, tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match=r"TFDS.*'nonesuch'") as raised:
        _source("nonesuch", data_dir=str(tmp_path)).parts()
    assert len(str(raised.value)) < 400  # TFDS lists all it has.
    with pytest.raises(ValueError, match=r"mine/1.0.0.*'trian'.*'train'"):
        _source(folder, split="trian").parts()
    with pytest.raises(ValueError, match=r"'txt'.*text_field:.*'text'"):
        _source(folder, text_field="txt").parts()
