"""`moelib generate`: continues prompts with a trained model.

    moelib generate --trainer_dir RUN --prompt 'def main('
    moelib generate --trainer_dir RUN --input prompts.jsonl --output texts.jsonl

A line of the input is a JSON object with a text "prompt". The same line of the output has its other
fields too, and "text" and "tokens", what follows the prompt.
"""

import json
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
    flags.DEFINE_string("prompt", None, "Text to continue on the terminal.")
    flags.DEFINE_string("input", None, "JSON lines with a prompt each, in the place of --prompt.")
    flags.DEFINE_string("output", None, "Where the texts of --input go.")
    flags.DEFINE_integer("batch_size", 16, "How many texts of --input are written side by side.")
    flags.DEFINE_integer("step", None, "Checkpoint to take; the newest if unset.")
    flags.DEFINE_integer("max_new_tokens", 200, "How many tokens to generate at most.")
    flags.DEFINE_integer("max_length", None, "The most tokens of prompt and text together.")
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.")
    flags.DEFINE_integer("top_k", None, "Draws among as many of the likeliest tokens.")
    flags.DEFINE_float("top_p", 0.95, "Draws among the likeliest tokens that reach this sum.")
    flags.DEFINE_float("min_p", 0.0, "Draws among tokens so many times as likely as the likeliest.")
    flags.DEFINE_float("repetition_penalty", 1.0, "Above 1: makes tokens that were there unlikely.")
    flags.DEFINE_integer("seed", 0, "Decides what is drawn.")
    flags.DEFINE_multi_string("stop", [], "Text that ends a text and is no part of it.")


_SETTINGS = (
    "max_new_tokens",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
)


class LoadedModel(NamedTuple):
    """A model of a run, with its parameters and the tokenizer of its data."""

    model: Any
    params: Any
    tokenizer: Any


def run(args: Sequence[str]) -> None:
    """Prints the prompt and what follows it, or writes what follows the prompts of a file.

    Raises:
        UsageError: If flags are missing or out of range, the folder is not that of a run, or a line
            of the input is no prompt.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; quote the prompt: --prompt 'def f('.")
    if not FLAGS.trainer_dir:
        raise UsageError("--trainer_dir must be set; `moelib generate --help` says to what.")
    if bool(FLAGS.prompt) == bool(FLAGS.input):
        raise UsageError("--prompt or --input must be set, to a text or to a file of prompts.")
    if bool(FLAGS.input) != bool(FLAGS.output):
        raise UsageError("--input and --output must be set together.")
    settings = {name: FLAGS[name].value for name in _SETTINGS}
    try:
        requests = read_requests(FLAGS.input, FLAGS.output) if FLAGS.input else []
        loaded = load_for_inference(FLAGS.trainer_dir, step=FLAGS.step)
        if FLAGS.input:
            files = FLAGS.input, FLAGS.output
            continue_file(loaded, requests, *files, FLAGS.batch_size, FLAGS.stop, **settings)
        else:
            stream_text(loaded, FLAGS.prompt, stop=FLAGS.stop, **settings)
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
    from moelib.data.tokenizer import FILE_NAME

    path = os.path.join(trainer_dir, "config.txt")
    if not os.path.exists(path):
        raise UsageError(f"--trainer_dir {trainer_dir} holds no run: there is no {path}.")
    with open(path, encoding="utf-8") as file:
        cfg = config_text.parse(file.read())
    store = getattr(cfg.input, "source", None)
    if os.path.exists(os.path.join(trainer_dir, FILE_NAME)):  # Of a model that was converted.
        tokenizer = converted_tokenizer(trainer_dir)
    elif isinstance(store, TokenStore.Config):
        tokenizer = store.clone(split=None).instantiate().tokenizer()
    else:
        raise UsageError(
            f"{path}: input.source names no token store, and {trainer_dir} has no {FILE_NAME}, so "
            "there is no tokenizer."
        )
    model = cfg.model.instantiate(parent=None)
    target = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        model.create_parameter_specs_recursively(),
        is_leaf=is_spec,
    )
    restored = restore_params_only(os.path.join(trainer_dir, "checkpoints"), target, step=step)
    return LoadedModel(model, restored.state, tokenizer)


def converted_tokenizer(folder: str) -> Any:
    """Returns the tokenizer of a folder that has a tokenizer.json and says its end of text.

    Raises:
        UsageError: If tokenizer_config.json names no end of text.
    """
    from moelib.data.tokenizer import Tokenizer

    path = os.path.join(folder, "tokenizer_config.json")
    about = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            about = json.load(file)
    eos = about.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is None:
        raise UsageError(f"{path} names no eos_token; add one, so that texts have an end.")
    return Tokenizer.default_config().set(path=folder, eos_token=eos).instantiate()


def stream_text(
    loaded: LoadedModel, prompt: str, *, stop: Sequence[str] = (), **settings: Any
) -> None:
    """Prints the prompt, and then what follows as soon as it is known.

    Args:
        loaded: What writes it.
        prompt: The text to continue.
        stop: Texts that end it.
        **settings: Of `moelib.inference.generate.Settings`.
    """
    from moelib.inference.generate import generate
    from moelib.inference.text import pieces_of_text

    model, params, tokenizer = loaded
    ids = tokenizer.encode(prompt)
    tokens = generate(model, params, ids, **settings, **_of_tokenizer(tokenizer))
    sys.stdout.write(tokenizer.decode(ids))
    for piece in pieces_of_text(tokens, ids, tokenizer.decode, stop):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def _of_tokenizer(tokenizer: Any) -> dict[str, Any]:
    return {"stop_ids": (tokenizer.eos_id,), "vocab_size": tokenizer.vocab_size}


class Request(NamedTuple):
    """A line of the input: its number from 1, its length in bytes, and its fields."""

    number: int
    num_bytes: int
    record: dict[str, Any]


def read_requests(path: str, output: str) -> list[Request]:
    """Returns the lines of a file of prompts; blank ones are none.

    Raises:
        UsageError: If a line is no JSON object, has no prompt, or a field of the output already; if
            there are no lines; or if the output exists.
    """
    if os.path.exists(output):
        raise UsageError(f"--output {output} exists; remove it, or choose another name.")
    requests = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                requests.append(Request(number, len(line), _record(line, f"{path}:{number}")))
    if not requests:
        raise UsageError(f"--input {path} has no lines.")
    return requests


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"{place} is no line of JSON: {error}; mend it or leave it out."
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UsageError(f'{place} is no JSON object with a text "prompt".')
    for name in ("text", "tokens"):
        if name in record:
            raise UsageError(f"{place} has a field {name!r}, which the output has; rename it.")
    return record


def continue_file(
    loaded: LoadedModel,
    requests: Sequence[Request],
    path: str,
    output: str,
    batch_size: int,
    stop: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Writes what follows each prompt of a file, a line each, as batches are done.

    Args:
        loaded: What writes it.
        requests: The lines of the file.
        path: The file, for errors.
        output: Where the lines go.
        batch_size: How many texts are written side by side.
        stop: Texts that end a text.
        **settings: Of `moelib.inference.generate.Settings`.

    Raises:
        UsageError: If a prompt has no tokens, or too many.
        ValueError: If a setting is out of range.
    """
    from moelib.data.progress import Progress
    from moelib.inference.generate import generate_many
    from moelib.inference.text import text_of

    model, params, tokenizer = loaded
    prompts = tokenizer.encode_batch([request.record["prompt"] for request in requests])
    for request, ids in zip(requests, prompts, strict=True):
        _check_length(ids, settings.get("max_length"), f"{path}:{request.number}")

    def ends(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens)
        return any(end in text for end in stop)

    texts = generate_many(
        model,
        params,
        prompts,
        batch_size=batch_size,
        ends=ends if stop else None,
        **settings,
        **_of_tokenizer(tokenizer),
    )
    num_tokens = 0
    progress = Progress("generate").of(sum(request.num_bytes for request in requests))
    with open(output, "x", encoding="utf-8") as file, progress as advance:
        for request, ids, tokens in zip(requests, prompts, texts, strict=True):
            text = text_of(tokens, ids, tokenizer.decode, stop)
            record = {**request.record, "text": text, "tokens": tokens}
            print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
            num_tokens += len(tokens)
            advance(request.num_bytes)
    print(f"{output}: {len(requests)} texts, {num_tokens} tokens.")


def _check_length(ids: Sequence[int], max_length: int | None, place: str) -> None:
    if not ids:
        raise UsageError(f"{place}: the prompt is empty; give it at least one character.")
    if max_length is not None and len(ids) >= max_length:
        raise UsageError(
            f"{place}: the prompt has {len(ids)} tokens, and --max_length is {max_length}, the "
            "prompt included; raise it, or cut the prompt."
        )
