"""`moelib generate`: continues a prompt with a trained model."""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from moelib.core import config_text
from moelib.launch import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run.")
    flags.DEFINE_string("prompt", None, "Text to continue.")
    flags.DEFINE_integer("step", None, "Checkpoint to take; the newest if unset.")
    flags.DEFINE_integer("max_new_tokens", 200, "How many tokens to generate at most.")
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
    flags.DEFINE_float("top_p", 0.95, "Draws among the likeliest tokens that reach this sum.")
    flags.DEFINE_integer("seed", 0, "Decides what is drawn.")


class LoadedModel(NamedTuple):
    """A model of a run, with its parameters and the tokenizer of its data."""

    model: Any
    params: Any
    tokenizer: Any


def run(args: Sequence[str]) -> None:
    """Prints the prompt and what follows it.

    Raises:
        UsageError: If a flag is missing, or the folder is not that of a run.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; quote the prompt: --prompt 'def f('.")
    for name in ("trainer_dir", "prompt"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} must be set; `moelib generate --help` says to what.")
    try:
        stream_text(
            load_for_inference(FLAGS.trainer_dir, step=FLAGS.step),
            FLAGS.prompt,
            max_new_tokens=FLAGS.max_new_tokens,
            temperature=FLAGS.temperature,
            top_p=FLAGS.top_p,
            seed=FLAGS.seed,
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def load_for_inference(trainer_dir: str, *, step: int | None = None) -> LoadedModel:
    """Returns the model of a run at a checkpoint, the newest by default.

    Raises:
        FileNotFoundError: If its token store is gone, or has no tokenizer.
        UsageError: If the folder holds no run, or its data is no token store.
        ValueError: If the tokenizer in the store is no longer the one that made it.
    """
    import jax

    from moelib.checkpoint.restore import restore_params_only
    from moelib.core.param import is_spec
    from moelib.data.token_store import TokenStore

    path = os.path.join(trainer_dir, "config.txt")
    if not os.path.exists(path):
        raise UsageError(f"--trainer_dir {trainer_dir} holds no run: there is no {path}.")
    with open(path, encoding="utf-8") as file:
        cfg = config_text.parse(file.read())
    store = getattr(cfg.input, "source", None)
    if not isinstance(store, TokenStore.Config):
        raise UsageError(f"{path}: input.source names no token store, so there is no tokenizer.")
    tokenizer = store.clone(split=None).instantiate().tokenizer()
    model = cfg.model.instantiate(parent=None)
    target = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        model.create_parameter_specs_recursively(),
        is_leaf=is_spec,
    )
    restored = restore_params_only(os.path.join(trainer_dir, "checkpoints"), target, step=step)
    return LoadedModel(model, restored.state, tokenizer)


def stream_text(
    loaded: LoadedModel,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> None:
    """Prints the prompt and then each token as soon as it is known."""
    from moelib.inference.generate import generate

    ids = loaded.tokenizer.encode(prompt)
    shown = loaded.tokenizer.decode(ids)
    sys.stdout.write(shown)
    tokens = generate(
        loaded.model,
        loaded.params,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=(loaded.tokenizer.eos_id,),
        vocab_size=loaded.tokenizer.vocab_size,
    )
    for token in tokens:
        ids.append(token)
        text = loaded.tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # Half a character waits for its other half.
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    print()
