"""The record of a checkpoint."""

import json

import numpy as np
import pytest

from moelib.checkpoint import contents


def test_record_describes_arrays():
    assert contents.describe_arrays({"w": np.ones((2, 3), np.float32)}) == {
        "w": ["float32", [2, 3]]
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "6"),
        ("step", True),
        ("arrays", 3),
        ("arrays", {"x": ["float32"]}),
        ("arrays", {"x": ["float32", ["1"]]}),
        ("config", 5),
        ("files", []),
        ("files", {"a": 5}),
        ("files", {"../x": "0"}),
        ("files", {"/dev/zero": "0"}),
        ("metrics", {"x": "1"}),
        ("mesh", 5),
    ],
)
def test_a_wrong_value_in_a_record_is_named(key, value, tmp_path):
    path = str(tmp_path)
    values = {"step": 6, "arrays": {}, "checksums": {}, "versions": {}} | {key: value}
    contents.CheckpointRecord(**values).write(path)
    with pytest.raises(contents.DamagedCheckpointError, match=key):
        contents.CheckpointRecord.read(path)


def test_a_record_of_another_format_is_refused(tmp_path):
    contents.CheckpointRecord(6, arrays={}, checksums={}, versions={}).write(str(tmp_path))
    file = tmp_path / "record/metadata"
    values = json.loads(file.read_text()) | {"format": 99}
    del values["digest"]
    values["digest"] = contents._digest(values)
    file.write_text(json.dumps(values))
    with pytest.raises(contents.DamagedCheckpointError, match="format=99"):
        contents.CheckpointRecord.read(str(tmp_path))
