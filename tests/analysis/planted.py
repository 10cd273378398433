"""Routing logs with known contents."""

import numpy as np

from moelib.layers.moe.recording import expert_id_dtype
from moelib.runs.routing_file import (
    LayerSizes,
    RoutingHeader,
    clear_log,
    log_folder,
    write_header,
    write_part,
)

LAYER = "decoder/layer0/feed_forward"


def plant(run, step, ids, tokens, *, mask=None, num_experts=4, processes=1, **fields):
    """Writes the log of one batch, ids [B, S, K] and tokens [B, S], and returns its folder."""
    folder = log_folder(str(run), "val", step)
    clear_log(folder)
    ids, tokens = np.asarray(ids), np.asarray(tokens)
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask)
    batch, files = {"files": {}}, {}
    batch = {
        "sequence": np.arange(len(tokens)),
        "input_ids": tokens.astype(np.uint8),
        "mask": mask,
        f"{LAYER}/expert_ids": ids.astype(expert_id_dtype(num_experts)),
        f"{LAYER}/weights": np.full(ids.shape, 0.5, np.float16),
        f"{LAYER}/entropy": np.full(tokens.shape, 0.25, np.float16),
    }
    for process in range(processes):
        rows = slice(process, None, processes)  # Interleaved, so that readers must sort.
        part = {name: array[rows] for name, array in batch.items()}
        files |= write_part(folder, 0, process, part)
    header = RoutingHeader(
        step=step,
        data="val",
        layers={LAYER: LayerSizes(num_experts, ids.shape[-1], 8)},
        seq_len=tokens.shape[1],
        batch_size=len(tokens),
        num_batches=1,
        itemsize=2,
        input={"seed": 0},
        files=files,
        **{"vocab_size": 10, "config_hash": "abc", "mesh": {}} | fields,
    )
    write_header(folder, header)
    return folder
