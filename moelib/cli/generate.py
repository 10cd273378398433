"""`moelib generate`: continues prompts with a trained model.

    moelib generate --trainer_dir=RUN --prompt='def main('
    moelib generate --hf_dir=MODEL --prompt='def main('
    moelib generate --trainer_dir=RUN --input=prompts.jsonl --output=texts.jsonl

Each line of the input is a JSON object with a text "prompt". The output has the same lines, with
the generated "text" and its "tokens" added.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from moelib.core.errors import UsageError
from moelib.core.progress import Progress

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of the command; see `define_flags`."""

    trainer_dir: str | None
    hf_dir: str | None
    step: int | None
    dtype: str | None
    mesh: str | None
    module_dir: str | None
    prompt: str | None
    input: str | None
    output: str | None
    batch_size: int
    stop: Sequence[str]
    sampling: dict[str, Any]  # Fields of moelib.inference.generate.Settings.


def define_model_flags() -> None:
    """Defines the flags that select a model and its devices."""
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run.")
    flags.DEFINE_string("hf_dir", None, "Folder of a Hugging Face model, instead of a run.")
    flags.DEFINE_enum(
        "dtype", None, DTYPES, "Dtype of the parameters; by default that of training."
    )
    flags.DEFINE_string("mesh", None, "Mesh, such as fsdp=4,expert=2; by default one device.")
    flags.DEFINE_string(
        "module_dir", None, "Folder of the modules of own layers, if they were moved."
    )


def define_flags() -> None:
    """Defines the flags of the command."""
    define_model_flags()
    flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the newest.")
    flags.DEFINE_string("prompt", None, "Text to continue on the terminal.")
    flags.DEFINE_string("input", None, "File of JSON lines with a prompt each.")
    flags.DEFINE_string("output", None, "File for the texts of --input.")
    flags.DEFINE_integer("batch_size", 16, "Number of texts of --input generated together.")
    flags.DEFINE_multi_string("stop", [], "String that ends a text; may be repeated.")
    flags.DEFINE_integer("max_new_tokens", 200, "Maximum number of generated tokens.")
    flags.DEFINE_integer("max_length", None, "Maximum number of tokens with the prompt.")
    flags.DEFINE_float("temperature", 0.8, "Divisor of the logits; 0: the most likely token.")
    flags.DEFINE_integer("top_k", None, "Number of most likely tokens to draw from.")
    flags.DEFINE_float("top_p", 0.95, "Probability mass of the most likely tokens to draw from.")
    flags.DEFINE_float("min_p", 0.0, "Minimum probability relative to the most likely token.")
    flags.DEFINE_float("repetition_penalty", 1.0, "Penalty on tokens that occurred; 1: none.")
    flags.DEFINE_integer("seed", 0, "Seed of the draws.")


_SAMPLING = (
    "max_new_tokens",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
)


def run(args: Sequence[str]) -> None:
    """Continues the prompt on the terminal, or the prompts of a file.

    Raises:
        UserError: If flags are missing or invalid, or a line of the input is not a prompt.
    """
    if args:
        raise UsageError(f"unknown argument {args[0]!r}; quote the prompt: --prompt 'def f('.")
    values = flags.FLAGS.flag_values_dict()
    names = [field.name for field in dataclasses.fields(Options)]
    values["sampling"] = {name: values[name] for name in _SAMPLING}
    options = Options(**{name: values[name] for name in names})
    _check(options)
    requests = read_requests(options.input, options.output) if options.input else []
    from moelib.train.loading import load_model

    model = load_model(
        options.trainer_dir or options.hf_dir or "",
        step=options.step,
        dtype=options.dtype,
        mesh=options.mesh,
        module_dir=options.module_dir,
    )
    if options.prompt:
        stream_text(model, options.prompt, options.stop, **options.sampling)
    else:
        _continue_file(model, requests, options)


def _check(options: Options) -> None:
    if bool(options.trainer_dir) == bool(options.hf_dir):
        raise UsageError("set --trainer_dir or --hf_dir; see `moelib generate --help`.")
    if options.step is not None and options.hf_dir:
        raise UsageError(f"--step {options.step} requires --trainer_dir; unset it.")
    if bool(options.prompt) == bool(options.input):
        raise UsageError("set --prompt or --input, to a text or to a file of prompts.")
    if bool(options.input) != bool(options.output):
        raise UsageError("--input and --output require each other; set both.")


def stream_text(model: Any, prompt: str, stop: Sequence[str] = (), **sampling: Any) -> None:
    """Prints a prompt and the text that follows it, as soon as it is certain.

    Args:
        model: A `moelib.train.loading.LoadedModel`.
        prompt: The text to continue.
        stop: Strings that end the text.
        **sampling: Fields of `moelib.inference.generate.Settings`.
    """
    from moelib.inference.generate import generate

    def show(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    texts = generate(model, [prompt], stop=stop, on_text=show, **sampling)
    sys.stdout.write(prompt)
    next(texts)
    print()


# -- Files ---------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A line of the input: its number from 1, its length in bytes, and its fields."""

    number: int
    num_bytes: int
    record: dict[str, Any]


def read_requests(path: str, output: str | None) -> list[Request]:
    """Returns the lines of a file of prompts, without blank ones.

    Raises:
        UsageError: If a line is not a JSON object with a prompt, or has a field of the output; if
            there are no lines; or if the output exists.
    """
    if output is not None and os.path.exists(output):
        raise UsageError(f"--output {output} exists; remove it, or set another file.")
    requests = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    record = _read_record(line, f"{path}:{number}")
                    requests.append(Request(number, len(line), record))
    except OSError as error:
        raise UsageError(f"--input {path} cannot be read: {error.strerror}.") from error
    if not requests:
        raise UsageError(f"--input {path} has no lines.")
    return requests


def _read_record(line: bytes, location: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{location} is not JSON ({error}); fix or remove the line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UsageError(f'{location} is not a JSON object with a text "prompt".')
    for name in ("text", "tokens"):
        if name in record:
            raise UsageError(f"{location} has the field {name!r} of the output; rename it.")
    return record


def _continue_file(model: Any, requests: Sequence[Request], options: Options) -> None:
    """Writes a line per prompt, as batches are done."""
    from moelib.inference.generate import PromptError, generate

    assert options.output is not None
    try:
        texts = generate(
            model,
            [request.record["prompt"] for request in requests],
            stop=options.stop,
            batch_size=options.batch_size,
            **options.sampling,
        )
    except PromptError as error:
        number = requests[error.index].number
        raise UsageError(f"{options.input}:{number}: {error.reason}") from error
    num_tokens = 0
    num_bytes = sum(request.num_bytes for request in requests)
    progress = Progress("generate", num_bytes, unit="B", seconds_between_lines=10.0)
    with open(options.output, "x", encoding="utf-8") as file, progress:
        for request, completion in zip(requests, texts, strict=True):
            record = request.record | completion._asdict()
            print(json.dumps(record, ensure_ascii=False), file=file, flush=True)
            num_tokens += len(completion.tokens)
            progress.advance(request.num_bytes)
    print(f"{options.output}: {len(requests)} texts, {num_tokens} tokens.")
