"""A standard pretraining job, for models whose data and recipe are not public."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from moelib.core.config import config_for_function
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.tokens.token_store import TokenStore
from moelib.learner import schedules, transforms
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train.evaler import SpmdEvaler
from moelib.train.trainer import SpmdTrainer

# Pattern of `--mesh_selector` for the accelerators that the meshes of this folder suit.
CHIPS = r"(tpu-(v5p|v6e|7x)|gpu-(h100|h200|b200))-\d+"


class Job(NamedTuple):
    """AdamW with a cosine schedule, on the token store `{data_dir}/text`.

    Attributes:
        seq_len: Tokens per sequence.
        batch_size: Sequences per step, over all devices.
        meshes: Sizes of mesh axes by pattern of `--mesh_selector`; the first is the default.
        max_step: Number of steps.
        peak_lr: Learning rate after the warmup.
        end_lr: Learning rate at the end.
        warmup_steps: Length of the warmup; None for a hundredth of the steps.
        weight_decay: Weight decay of matrices.
    """

    seq_len: int
    batch_size: int
    meshes: Mapping[str, Mapping[str, int]]
    max_step: int = 10_000
    peak_lr: float = 3e-4
    end_lr: float = 3e-5
    warmup_steps: int | None = None
    weight_decay: float = 0.1


def trainer(model: CausalLM.Config, job: Job) -> SpmdTrainer.Config:
    """Returns the job of a model, with bfloat16 compute and float32 parameters."""
    shapes = {pattern: mesh_shape_from_axes(**axes) for pattern, axes in job.meshes.items()}
    warmup = 0.01 * job.max_step if job.warmup_steps is None else job.warmup_steps
    schedule = config_for_function(schedules.cosine).set(
        peak_lr=job.peak_lr, end_lr=job.end_lr, warmup_steps=warmup
    )
    optimizer = clipped_adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=job.weight_decay)
    data = functools.partial(
        text_input,
        "{data_dir}/text",
        seq_len=job.seq_len,
        global_batch_size=job.batch_size,
        vocab_size=model.vocab_size,
    )
    cfg = SpmdTrainer.default_config().set(
        model=model,
        learner=Learner.default_config().set(optimizer=optimizer),
        input=data(split="train"),
        max_step=job.max_step,
        train_dtype="bfloat16",
        mesh_shape=next(iter(shapes.values())),
        mesh_rules=list(shapes.items()),
    )
    cfg.evalers["validation"] = SpmdEvaler.default_config().set(
        input=data(split="validation").set(max_batches=25)
    )
    return cfg


def clipped_adamw(learning_rate: Any, **settings: float) -> Any:
    """Returns the config of AdamW on gradients that are clipped to a global norm of 1."""
    adamw = config_for_function(adamw_optimizer).set(learning_rate=learning_rate, **settings)
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    return config_for_function(transforms.chain).set(args=[clip, adamw])


def text_input(path: str, *, split: str, **settings: Any) -> LMInput.Config:
    """Returns sequences of a split of a token store: endless from train, one epoch from others."""
    mode = InputMode.TRAIN if split == "train" else InputMode.EVALUATE
    source = TokenStore.default_config().set(path=path, split=split)
    return LMInput.default_config().set(source=source, mode=mode, seed=1234, **settings)
