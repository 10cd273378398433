"""Fine-tuning: a language model of a Hugging Face folder, trained on code, learns English text.

python -m experiments.tasks.causal_lm --trainer_dir=runs/english --base=FOLDER

FOLDER has any model that moelib reads. If it does not exist, a small one is trained on the source
code of Python and written there. The English text is Python's reference manual. Afterwards,
`moelib generate --trainer_dir=runs/english/fine-tuned --prompt="The "` prints some.
"""

import argparse
import functools
import inspect
import math
import os
import tokenize
import typing

import numpy as np

import moelib
from moelib.core.config import config_for_function
from moelib.core.module import functional
from moelib.core.param import specs_by_path
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.huggingface.families import read_model
from moelib.huggingface.pretrained import save_pretrained
from moelib.learner.optimizers import adamw_optimizer
from moelib.learner.schedules import cosine
from moelib.runs.loading import load_model

from .command import run_as_command

LENGTH = 64  # Tokens per example.
SMALL = {
    "model_type": "llama",
    "vocab_size": 264,  # Of 257 bytes and an end, rounded up: "model=8" divides it.
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}


def pieces(texts):
    """Returns the examples of texts: pieces of LENGTH characters."""
    found = [text[i : i + LENGTH] for text in texts for i in range(0, len(text), LENGTH)]
    return [{"text": text} for text in found]


def manual():
    """Returns the examples of training and of the test: topics of the reference manual."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    return pieces(x for i, x in enumerate(texts) if i % 8), pieces(texts[::8])[:256]


def task_of(model, tokenizer):
    """Returns the task of a `CausalLM`: the cross-entropy over tokens, and the bits per token."""
    model = model.clone(name="model").instantiate(parent=None)
    specs = specs_by_path(model.create_parameter_specs_recursively())

    def init(key):
        return model.initialize_parameters_recursively(key)

    def collate(examples):
        ids = np.full((len(examples), LENGTH + 1), -1)  # -1: no label.
        texts = tokenizer.encode_batch([example["text"] for example in examples])
        for row, tokens in zip(ids, texts, strict=True):
            tokens = [tokenizer.prefix_id, *tokens][: LENGTH + 1]
            row[: len(tokens)] = tokens
        return {"input_ids": np.maximum(ids[:, :-1], 0), "target_labels": ids[:, 1:]}

    def loss(params, batch, key, is_training):
        (mean, _), found = functional(model, key, params, (batch,), is_training=is_training)
        bits = mean.mean / math.log(2)
        objective = mean.mean + found.total_aux_loss()
        return (objective * mean.weight, mean.weight), {"bits_per_token": bits}

    fixed = [path for path, spec in specs.items() if not spec.trainable]
    return moelib.Task.default_config().set(init=init, loss=loss, collate=collate, fixed=fixed)


def train(task, examples, trainer_dir, *, max_step, learning_rate, **settings):
    """Trains the task."""
    schedule = config_for_function(cosine).set(
        peak_lr=learning_rate, warmup_steps=max_step // 20, max_step=max_step
    )
    return moelib.fit(
        task,
        examples,
        trainer_dir=trainer_dir,
        optimizer=config_for_function(adamw_optimizer).set(learning_rate=schedule),
        batch_size=16,
        max_step=max_step,
        **settings,
    )


def small_model():
    """Returns the config and the tokenizer of a small model."""
    return read_model(SMALL, "SMALL")[1], ByteTokenizer.default_config().instantiate()


def make_base(folder, *, max_step, **settings):
    """Trains a small model on source code, and writes it for transformers."""
    model, tokenizer = small_model()
    task = task_of(model, tokenizer)
    texts = map(inspect.getsource, (argparse, functools, inspect, os, tokenize, typing))
    result = train(
        task, pieces(texts), folder + "-run", max_step=max_step, learning_rate=1e-2, **settings
    )
    export(folder, model, result.params, tokenizer)


def export(folder, model, params, tokenizer, base=None):
    """Writes a model for transformers, with the other files of the folder of its base."""
    save_pretrained(folder, model, params, tokenizer=tokenizer, files_of=base)


def run(trainer_dir, *, base=None, base_steps=400, max_step=200, mesh="data=-1"):
    """Returns the bits per token of held-out topics before and after."""
    base = base or os.path.join(trainer_dir, "base")
    if not os.path.exists(base):
        make_base(base, max_step=base_steps, mesh=mesh)
    loaded = load_model(base)
    cfg, tokenizer = loaded.model.config, loaded.tokenizer
    task = task_of(cfg, tokenizer)
    examples, test = manual()
    before = moelib.evaluate(task, test, params=loaded.parameters, mesh=mesh)
    result = train(
        task,
        examples,
        trainer_dir,
        max_step=max_step,
        learning_rate=5e-3,
        params=loaded.parameters,
        mesh=mesh,
    )
    after = moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)
    export(os.path.join(trainer_dir, "fine-tuned"), cfg, result.params, tokenizer, base)
    return {"before": before["bits_per_token"], "after": after["bits_per_token"]}


if __name__ == "__main__":
    run_as_command(run, __doc__)
