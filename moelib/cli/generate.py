"""`moelib generate`: continues prompts with a model of a run, or of Hugging Face.

    moelib generate --trainer_dir RUN --prompt 'def main('
    moelib generate --hf_dir MODEL --prompt 'def main('
    moelib generate --trainer_dir RUN --input prompts.jsonl --output texts.jsonl

A line of the input is a JSON object with a text "prompt". The same line of the output has its other
fields too, and "text" and "tokens", what follows the prompt.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from moelib.core import config_parse
from moelib.core.errors import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run.")
    flags.DEFINE_string("hf_dir", None, "Folder of a Hugging Face model, in its place.")
    what = "Of the parameters of --hf_dir; what its config.json says if unset."
    flags.DEFINE_enum("dtype", None, DTYPES, what)
    flags.DEFINE_string("mesh", None, "Devices by axis: fsdp=4,expert=2; one device if unset.")
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


DTYPES = ("float32", "bfloat16", "float16")
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
    """A model with its parameters and tokenizer.

    Attributes:
        model: A CausalLM.
        params: Its parameters.
        tokenizer: A `moelib.data.tokenizer.Tokenizer`.
        stop_ids: Tokens that end a text beside the tokenizer's own.
        max_length: The most tokens of prompt and text that the model was made for; None if not
            known.
        seq_len: Tokens of a row of its training; None if not known.
    """

    model: Any
    params: Any
    tokenizer: Any
    stop_ids: tuple[int, ...] = ()
    max_length: int | None = None
    seq_len: int | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of prompts."""
        return self.tokenizer.encode_prompts(texts)


def run(args: Sequence[str]) -> None:
    """Prints the prompt and what follows it, or writes what follows the prompts of a file.

    Raises:
        UsageError: If flags are missing or out of range, the folder is not that of a run, or a line
            of the input is no prompt.
    """
    _check_flags(args)
    settings = {name: FLAGS[name].value for name in _SETTINGS}
    import jax

    try:
        requests = read_requests(FLAGS.input, FLAGS.output) if FLAGS.input else []
        mesh = mesh_of(FLAGS.mesh) if FLAGS.mesh else None
        loaded = _load(mesh)
        if settings["max_length"] is None:
            settings["max_length"] = loaded.max_length
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            if FLAGS.input:
                files = FLAGS.input, FLAGS.output
                continue_file(loaded, requests, *files, FLAGS.batch_size, FLAGS.stop, **settings)
            else:
                stream_text(loaded, FLAGS.prompt, stop=FLAGS.stop, **settings)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _check_flags(args: Sequence[str]) -> None:
    if args:
        raise UsageError(f"{args[0]!r} is no flag; quote the prompt: --prompt 'def f('.")
    if bool(FLAGS.trainer_dir) == bool(FLAGS.hf_dir):
        raise UsageError("--trainer_dir or --hf_dir must be set; see `moelib generate --help`.")
    for flag, needs in (("dtype", "hf_dir"), ("step", "trainer_dir")):
        if FLAGS[flag].value is not None and not FLAGS[needs].value:
            raise UsageError(f"--{flag} goes with --{needs}; leave it out.")
    if bool(FLAGS.prompt) == bool(FLAGS.input):
        raise UsageError("--prompt or --input must be set, to a text or to a file of prompts.")
    if bool(FLAGS.input) != bool(FLAGS.output):
        raise UsageError("--input and --output must be set together.")
    if "" in FLAGS.stop:
        raise UsageError("--stop is empty; set it to a text of one character or more.")


def _load(mesh: Any | None) -> LoadedModel:
    if FLAGS.hf_dir:
        return load_hugging_face(FLAGS.hf_dir, dtype=FLAGS.dtype, mesh=mesh)
    return load_for_inference(FLAGS.trainer_dir, step=FLAGS.step, mesh=mesh)


def mesh_of(text: str) -> Any:
    """Returns a mesh of all devices from "fsdp=4,expert=2".

    Raises:
        UserError: If the text is not a mesh of all devices.
    """
    import jax

    from moelib.parallel.mesh import create_device_mesh, parse_mesh

    return create_device_mesh(parse_mesh(text, num_devices=jax.device_count(), field="--mesh"))


def load_hugging_face(
    folder: str, *, dtype: str | None = None, mesh: Any | None = None
) -> LoadedModel:
    """Returns the model in a folder of Hugging Face, with the tokenizer that is there.

    Args:
        folder: With config.json, safetensors, tokenizer.json and tokenizer_config.json.
        dtype: Of the parameters; what config.json says, or else float32, if None.
        mesh: Where they go; the first device if None.

    Raises:
        UsageError: If the tokenizer does not say its end of text, or does not fit the model.
        Exception: As `load_pretrained`.
    """
    from moelib.train.pretrained import load_pretrained, read_config

    cfg, settings = read_config(folder)
    tokenizer = converted_tokenizer(folder, cfg.vocab_size)
    dtype = dtype or settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UsageError(
            f"{folder}/config.json: dtype is {dtype!r}; set --dtype to one of {known}."
        )
    loaded = load_pretrained(folder, dtype=dtype, mesh=mesh)
    model = loaded.cfg.instantiate(parent=None)
    return LoadedModel(model, loaded.params, tokenizer)._replace(**_published(folder))


def _published(folder: str) -> dict[str, Any]:
    """Returns the fields of a LoadedModel that a folder of Hugging Face says."""
    settings, generation = (
        read_json(folder, f"{name}.json") for name in ("config", "generation_config")
    )
    ends = [settings.get("eos_token_id"), generation.get("eos_token_id")]
    stop_ids = {end for each in ends for end in (each if isinstance(each, list) else [each])}
    return {
        "stop_ids": tuple(sorted(stop_ids - {None})),
        "max_length": settings.get("max_position_embeddings"),
    }


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Returns what a JSON file holds; nothing if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is no JSON object: {error}; mend or remove it.") from error


def load_for_inference(
    trainer_dir: str, *, step: int | None = None, mesh: Any | None = None
) -> LoadedModel:
    """Returns the model of a run at a checkpoint, the newest by default.

    Args:
        trainer_dir: Folder of the run.
        step: The checkpoint; None for the newest.
        mesh: Where the parameters go; the first device if None.

    Raises:
        FileNotFoundError: If its token store is gone, or has no tokenizer.
        UsageError: If the folder holds no run.
        NoTokenizerError: If neither the folder nor the run's input has a tokenizer.
        ValueError: If the tokenizer in the store is no longer the one that made it.
    """
    import jax

    from moelib.checkpoint.restore import restore_params_only
    from moelib.core.param import is_spec
    from moelib.data.input import load_tokenizer
    from moelib.data.tokenizer import FILE_NAME
    from moelib.parallel.sharding import named_shardings

    path = os.path.join(trainer_dir, "config.txt")
    if not os.path.exists(path):
        raise UsageError(f"--trainer_dir {trainer_dir} holds no run: there is no {path}.")
    with open(path, encoding="utf-8") as file:
        cfg = config_parse.parse(file.read())
    if os.path.exists(os.path.join(trainer_dir, FILE_NAME)):
        tokenizer = converted_tokenizer(trainer_dir, cfg.model.vocab_size)
    else:  # A run of a version that did not copy the tokenizer.
        tokenizer = load_tokenizer(cfg.input)
    model = cfg.model.instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    target = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_spec
    )
    if mesh is not None:
        target = jax.tree.map(
            lambda x, sharding: x.update(sharding=sharding), target, named_shardings(specs, mesh)
        )
    restored = restore_params_only(os.path.join(trainer_dir, "checkpoints"), target, step=step)
    loaded = LoadedModel(model, restored.state, tokenizer)
    if os.path.exists(os.path.join(trainer_dir, "config.json")):  # A model of Hugging Face.
        return loaded._replace(**_published(trainer_dir))
    return loaded._replace(seq_len=cfg.input.seq_len)


def converted_tokenizer(folder: str, vocab_size: int) -> Any:
    """Returns the tokenizer of a folder that has a tokenizer.json and says its end of text.

    Args:
        folder: The folder.
        vocab_size: Of the model.

    Raises:
        UsageError: If tokenizer_config.json names no end of text, or the tokenizer has more tokens
            than the model.
    """
    from moelib.data.tokenizer import PublishedTokenizer

    path = os.path.join(folder, "tokenizer_config.json")
    settings = read_json(folder, "tokenizer_config.json")
    tokens = (settings.get(name) for name in ("eos_token", "bos_token"))
    eos, bos = (x.get("content") if isinstance(x, dict) else x for x in tokens)
    if eos is None:
        raise UsageError(f"{path} names no eos_token; add one, so that texts have an end.")
    cfg = PublishedTokenizer.default_config().set(path=folder, eos_token=eos, bos_token=bos)
    tokenizer: Any = cfg.set(add_bos_token=settings.get("add_bos_token")).instantiate()
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, and its model "
            f"{vocab_size}; they do not belong together."
        )
    return tokenizer


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

    ids = loaded.encode([prompt])[0]
    _check_length(ids, settings.get("max_length"), loaded.seq_len, "--prompt")
    tokens = generate(loaded.model, loaded.params, ids, **settings, **_of_tokenizer(loaded))
    sys.stdout.write(prompt)
    for piece in pieces_of_text(tokens, ids, loaded.tokenizer.decode, stop):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


def _of_tokenizer(loaded: LoadedModel) -> dict[str, Any]:
    tokenizer = loaded.tokenizer
    stop_ids = {tokenizer.eos_id, *loaded.stop_ids}
    return {"stop_ids": tuple(sorted(stop_ids)), "vocab_size": tokenizer.vocab_size}


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
    from moelib.core.progress import Progress
    from moelib.inference.generate import generate_many
    from moelib.inference.text import text_of

    tokenizer = loaded.tokenizer
    prompts = loaded.encode([request.record["prompt"] for request in requests])
    for request, ids in zip(requests, prompts, strict=True):
        place = f"{path}:{request.number}"
        _check_length(ids, settings.get("max_length"), loaded.seq_len, place)

    def ends(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens)
        return any(end in text for end in stop)

    texts = generate_many(
        loaded.model,
        loaded.params,
        prompts,
        batch_size=batch_size,
        ends=ends if stop else None,
        **settings,
        **_of_tokenizer(loaded),
    )
    num_tokens = 0
    total = sum(request.num_bytes for request in requests)
    show = Progress("generate", total, unit="B", seconds_between_lines=10.0)
    with open(output, "x", encoding="utf-8") as file, show as progress:
        for request, ids, tokens in zip(requests, prompts, texts, strict=True):
            text = text_of(tokens, ids, tokenizer.decode, stop)
            record = {**request.record, "text": text, "tokens": tokens}
            print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
            num_tokens += len(tokens)
            progress.advance(request.num_bytes)
    print(f"{output}: {len(requests)} texts, {num_tokens} tokens.")


def _check_length(
    ids: Sequence[int], max_length: int | None, seq_len: int | None, place: str
) -> None:
    if not ids:
        raise UsageError(f"{place}: the prompt is empty; give it at least one character.")
    if max_length is not None and len(ids) >= max_length:
        raise UsageError(
            f"{place}: the prompt has {len(ids)} tokens, and --max_length is {max_length}, the "
            "prompt included (unset, it is what the model was made for); raise it, or cut the "
            "prompt."
        )
    if max_length is None and seq_len is not None and len(ids) > seq_len:
        raise UsageError(
            f"{place}: the prompt has {len(ids)} tokens, and the model was trained on rows of "
            f"{seq_len}; cut the prompt, or set --max_length if it can read more."
        )
