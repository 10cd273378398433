"""The examples of docs/checkpoints.md."""

from experiments import flame_moe
from moelib.checkpoint.policy import evenly_spaced_policy
from moelib.core.config import config_for_function


def test_what_is_saved_and_kept():
    cfg = flame_moe.tiny().set(dir="runs/a")
    # --8<-- [start:policy]
    cfg.checkpointer.save_policy = config_for_function(evenly_spaced_policy).set(num=20)
    cfg.checkpointer.set(
        keep_last_n=2,
        keep_every_n_steps=350,
        keep_best_n=1,
        best_metric="validation/bits_per_byte",
    )
    # --8<-- [end:policy]
    trainer = cfg.instantiate(parent=None)
    saved = [step for step in range(1, 701) if trainer.checkpointer.should_save(step=step)]
    assert saved == list(range(35, 701, 35))
