import importlib.util
import pathlib
import subprocess
import sys

import pytest

from moelib.data.json_lines import JsonLines
from moelib.data.source import BadRecordError, InMemorySource
from moelib.data.tfds_builder import build_text_corpus
from moelib.data.tfds_source import TFDSSource

# TFDS and Beam use deprecated functions of theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [f"Dokument {i} für Leser" for i in range(50)]


def _source() -> InMemorySource:
    return (
        InMemorySource.default_config().set(texts=[*TEXTS, ""], documents_per_part=7).instantiate()
    )


def test_a_corpus_is_written_and_read_without_tensorflow(tmp_path: pathlib.Path):
    program = f"""
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *args: (
    None if name.startswith("tensorflow.") or name == "tensorflow" else find_spec(name, *args)
)  # As if TensorFlow were not installed.
from moelib.data.source import InMemorySource
from moelib.data.tfds_builder import build_text_corpus
from moelib.data.tfds_source import TFDSSource

texts = {TEXTS!r}
cfg = InMemorySource.default_config().set(texts=[*texts, ""], documents_per_part=7)
source = cfg.instantiate()
folder = build_text_corpus(source, "mine", {str(tmp_path)!r}, num_shards=3)
read = TFDSSource.default_config().set(name=folder).instantiate()
assert sorted(read.documents()) == sorted(texts)
assert not {{"tensorflow", "jax"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    folder = tmp_path / "text_corpus" / "mine" / "1.0.0"
    assert len(list(folder.glob("*.array_record-*"))) == 3
    # By name too, and a second time it is found.
    by_name = TFDSSource.default_config().set(name="text_corpus/mine", data_dir=str(tmp_path))
    assert sorted(by_name.instantiate().documents()) == sorted(TEXTS)
    assert build_text_corpus(_source(), "mine", str(tmp_path)) == str(folder)


def test_a_corpus_of_another_source_is_not_taken_for_this_ones(tmp_path: pathlib.Path):
    folder = build_text_corpus(_source(), "mine", str(tmp_path))
    assert build_text_corpus(_source(), "mine", str(tmp_path)) == folder
    other = InMemorySource.default_config().set(texts=TEXTS[1:]).instantiate()
    with pytest.raises(FileExistsError, match=r"1\.0\.0.*'mine'"):
        build_text_corpus(other, "mine", str(tmp_path))
    read = TFDSSource.default_config().set(name=build_text_corpus(other, "other", str(tmp_path)))
    assert sorted(read.instantiate().documents()) == sorted(TEXTS[1:])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None, reason="apache_beam is not installed"
)
def test_beam_writes_the_same_documents(tmp_path: pathlib.Path):
    folder = build_text_corpus(
        _source(), "beam", str(tmp_path), num_shards=2, beam_runner="DirectRunner"
    )
    assert len(list(pathlib.Path(folder).glob("*.array_record-*"))) == 2
    read = TFDSSource.default_config().set(name=folder).instantiate()
    assert sorted(read.documents()) == sorted(TEXTS)


def test_a_broken_record_and_a_missing_package_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    source = JsonLines.default_config().set(paths=[str(tmp_path)]).instantiate()
    with pytest.raises(BadRecordError, match=r"a\.jsonl:2:.*JSON"):
        build_text_corpus(source, "broken", str(tmp_path))
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(ModuleNotFoundError, match=r"'moelib\[beam\]'"):
        build_text_corpus(_source(), "x", str(tmp_path), beam_runner="DirectRunner")
