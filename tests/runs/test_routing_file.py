"""Routing logs: what is written is read, in the order of the data; what is damaged is named."""

import json
import os
import pathlib

import numpy as np
import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.layers.moe.recording import expert_id_dtype
from moelib.runs.routing_file import (
    DamagedLogError,
    RoutingLog,
    clear_log,
    list_data,
    list_logs,
    log_folder,
)
from tests.analysis.planted import LAYER, plant

IDS = np.arange(24).reshape(4, 3, 2) % 4
TOKENS = np.arange(12).reshape(4, 3) % 10


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_sequences_are_in_the_order_of_the_data(tmp_path, processes):
    log = RoutingLog(plant(tmp_path, 7, IDS, TOKENS, processes=processes))
    assert log.layers == [LAYER]
    assert log.sizes(LAYER) == (4, 2, 8)
    [(ids, weights, tokens)] = log.layer(LAYER, "expert_ids", "weights", "input_ids")
    np.testing.assert_array_equal(ids, IDS)
    np.testing.assert_array_equal(tokens, TOKENS)
    assert (ids.dtype, weights.dtype) == (np.uint8, np.float16)
    [(tokens, mask)] = log.tokens()
    np.testing.assert_array_equal(tokens, TOKENS)
    assert mask.all()
    with pytest.raises(UserError, match="layer1"):
        next(log.layer("decoder/layer1/feed_forward", "expert_ids"))


def test_ids_have_the_smallest_type_with_room_for_no_expert():
    assert [expert_id_dtype(n) for n in (4, 254, 255, 256)] == ["u1", "u1", "u2", "u2"]


def test_logs_of_a_run_are_listed(tmp_path):
    assert list_data(str(tmp_path)) == []
    assert list_logs(str(tmp_path), "val") == {}
    for step in (10, 9):
        plant(tmp_path, step, IDS, TOKENS)
    clear_log(log_folder(str(tmp_path), "val", 10))
    (tmp_path / "routing/notes.txt").write_text("mine")
    assert list_data(str(tmp_path)) == ["val"]
    assert list_logs(str(tmp_path), "val") == {9: True, 10: False}


def test_a_log_that_was_cut_short_is_named(tmp_path):
    folder = plant(tmp_path, 7, IDS, TOKENS, processes=2)
    with pytest.raises(MissingFileError, match="step_00000008"):
        RoutingLog(log_folder(str(tmp_path), "val", 8))
    part = os.path.join(folder, "batch_00000.process_0001.npz")
    size = os.path.getsize(part)
    os.truncate(part, size - 1)
    with pytest.raises(DamagedLogError, match=rf"process_0001\.npz has {size - 1} bytes .*{size}"):
        RoutingLog(folder)
    os.remove(part)
    with pytest.raises(DamagedLogError, match=r"process_0001\.npz has no bytes"):
        RoutingLog(folder)
    os.remove(os.path.join(folder, "header.json"))
    with pytest.raises(DamagedLogError, match=r"header\.json"):
        RoutingLog(folder)


def test_a_flipped_bit_is_found(tmp_path):
    folder = plant(tmp_path, 7, IDS, TOKENS)
    path = pathlib.Path(folder, "batch_00000.process_0000.npz")
    content = bytearray(path.read_bytes())
    content[content.index(IDS.astype(np.uint8).tobytes()) + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedLogError, match="process_0000"):
        list(RoutingLog(folder).layer(LAYER, "expert_ids"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_version": 99}, "format_version is 99"),
        ({"seq_len": 2}, r"\[4, 3, 2\] instead of \[4, 2, 2\] \(sequence, position, choice\)"),
        ({"layers": {LAYER: [4, 3, 8]}}, r"instead of \[4, 3, 3\] \(sequence, position, choice\)"),
        ({"batch_size": 5}, "batch 0 has 4 sequences"),
        ({"layers": 3}, "header.json"),
        ({"files": {"../../x.npz": 1}}, "header.json"),
        ({"surprise": 1}, "surprise"),
        (None, r"header\.json is not a JSON object.*; remove the"),
        ({"num_batches": 2}, r"num_batches=2, without a file of 1; remove the folder"),
        ({"step": 8}, r"step_00000007 holds the routing log of step=8; remove the folder"),
    ],
)
def test_a_header_that_does_not_fit_its_files_is_refused(tmp_path, values, message):
    folder = plant(tmp_path, 7, IDS, TOKENS)
    header = pathlib.Path(folder, "header.json")
    header.write_text(json.dumps(json.loads(header.read_text()) | values) if values else "\x00")
    with pytest.raises(UserError, match=message):
        list(RoutingLog(folder).layer(LAYER, "expert_ids", "input_ids"))
