"""A run of three phases: pretraining, a longer context, and annealing on a better mixture.

    moelib train --module=experiments.long_run --config=three-phases-tiny --trainer_dir=runs/long

The texts are made up, so that it needs no data. Killed at any step, the same command resumes it.
"""

from collections.abc import Callable, Mapping

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.core.config import config_for_function
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.synthetic import SyntheticInput, SyntheticTokens
from moelib.data.tokens.token_source import TokenSource
from moelib.layers.rope import YarnRotaryEmbedding
from moelib.learner import schedules
from moelib.runs.phases import Phase
from moelib.train.trainer import SpmdTrainer

from .flame_moe import tiny

VOCAB_SIZE, CONTEXT, LONGER = 512, 64, 4  # Words; tokens of a sequence, then four times as many.


def mixture(**weights: float) -> Mixture.Config:
    """Returns a mixture of made-up texts, by the share of each."""
    texts = SyntheticTokens.default_config().set(vocab_size=VOCAB_SIZE, num_documents=2000)
    sources: dict[str, TokenSource.Config] = {
        "web": texts.clone(max_document_tokens=60, seed=1),
        "books": texts.clone(max_document_tokens=1000, seed=2),
    }
    return Mixture.default_config().set(sources=sources, weights=weights)


def three_phases() -> SpmdTrainer.Config:
    """Returns 30 steps of short sequences, 10 of long ones with YaRN, and 10 of better data."""
    cfg = tiny()
    cfg.model.set(vocab_size=VOCAB_SIZE)
    cfg.model.decoder.set(num_layers=2)
    cfg.input = SyntheticInput.default_config().set(
        source=mixture(web=0.9, books=0.1), seq_len=CONTEXT, global_batch_size=16
    )
    # The rate is constant up to the last ten steps.
    cfg.learner.optimizer.args[1].learning_rate = config_for_function(schedules.wsd).set(
        peak_lr=3e-3, warmup_steps=10, decay_steps=10
    )
    cfg.set(max_step=50, evalers={}, log_every_n_steps=5)
    save = config_for_function(every_n_steps_and_last_policy).set(n=10)
    cfg.checkpointer = Checkpointer.default_config().set(save_policy=save)
    yarn = YarnRotaryEmbedding.default_config().set(factor=LONGER, original_context=CONTEXT)
    layers = "first_layers", "block"
    cfg.phases = {
        "long": Phase.default_config().set(
            after_step=30,
            changes={
                "input.seq_len": LONGER * CONTEXT,
                "input.global_batch_size": 16 // LONGER,
                **{f"model.decoder.{x}[0].self_attention.rope": yarn for x in layers},
            },
        ),
        "anneal": Phase.default_config().set(
            after_step=40, changes={"input.source": mixture(web=0.3, books=0.7)}
        ),
    }
    return cfg


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the config by name."""
    return {"three-phases-tiny": three_phases}
