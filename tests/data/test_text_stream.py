"""Streams without TensorFlow; tests/data/test_streaming.py reads their records."""

import pytest

from moelib.data.source import BadRecordError
from moelib.data.text_stream import JsonLinesStream, TFDSStream
from tests.data.tfds_corpus import write_corpus


def test_lines_become_documents_and_blank_ones_are_empty():
    cfg = JsonLinesStream.default_config().set(paths=["unread"], text_field="body")
    stream = cfg.instantiate()
    assert [stream.text(line) for line in (b'{"body": "x"}', b" ")] == ["x", ""]
    with pytest.raises(BadRecordError, match="'body'"):
        stream.text(b"{}")


def test_archives_that_tf_data_cannot_read_are_refused_and_not_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    stream = JsonLinesStream.default_config().set(paths=[str(tmp_path)]).instantiate()
    stream.fingerprint()
    for name in ("b.jsonl.zst", "c.json.zstd"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"b\.jsonl\.zst.*1.*tf\.data.*\.zst"):
        stream.fingerprint()
    (tmp_path / "a.jsonl").unlink()
    cfg = JsonLinesStream.default_config().set(paths=[str(tmp_path / "b*")])
    with pytest.raises(ValueError, match=r"b\.jsonl\.zst: tf\.data"):
        cfg.instantiate().fingerprint()


@pytest.mark.filterwarnings("ignore")  # TFDS uses deprecated functions.
def test_a_data_set_stored_for_random_access_is_refused(tmp_path):
    folder = write_corpus(["x"], str(tmp_path))
    stream = TFDSStream.default_config().set(name=folder).instantiate()
    with pytest.raises(ValueError, match=r"array_record.*tf.data"):
        stream.fingerprint()
    with pytest.raises(BadRecordError, match="not UTF-8"):
        stream.text(b"\xff")
