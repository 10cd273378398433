"""Folders of finished runs with planted losses."""

import json

from experiments import flame_moe
from moelib.operations.dense_twin import dense_twin


def config(width=32, *, max_step=400):
    """Returns a FLAME-MoE of one MoE layer, with a vocabulary of 64."""
    cfg = flame_moe.tiny().set(max_step=max_step)
    cfg.model.set(dim=width, vocab_size=64)
    cfg.model.decoder.num_layers = 2
    return cfg


def write_run(folder, cfg, losses, *, step_seconds=0.5):
    """Writes the files of a run, whose losses are those after equally many steps."""
    folder.mkdir(parents=True)
    (folder / "config.txt").write_text(cfg.debug_string())
    every = cfg.max_step // len(losses)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for i, loss in enumerate(losses):
            line = {"step": every * (i + 1), "mean_loss": loss, "num_tokens": 1000.0}
            file.write(json.dumps({**line, "step_seconds": step_seconds}) + "\n")
    return str(folder)


def write_twins(folder, *, dense_seconds=0.25):
    """Writes an MoE run and its dense twin; the former has each loss after half of the FLOPs."""
    cfg = config()
    twin = dense_twin(cfg, multiple_of=1).config
    moe = write_run(folder / "moe", cfg, [4.0, 3.0, 2.5, 2.25])
    dense = write_run(folder / "dense", twin, [5.0, 4.0, 3.5, 3.0], step_seconds=dense_seconds)
    return moe, dense
