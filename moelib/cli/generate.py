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
from typing import Any, Literal

from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags, import_module
from moelib.runtime.command_line import flag
from moelib.runtime.progress import Progress
from moelib.runtime.storage import parse_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(DeviceFlags):
    """Flags that select a trained model and its devices."""

    trainer_dir: str | None = flag(None, "Folder of a training run.")
    hf_dir: str | None = flag(None, "Folder of a Hugging Face model, instead of a run.")
    step: int | None = flag(None, "Step of the run's checkpoint; by default the newest.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "Dtype to compute in; by default that of training."
    )
    mesh: str | None = flag(None, "Mesh, such as fsdp=4,expert=2; by default one device.")
    module: str | None = flag(None, "Module of the run's own layers, which its config may name.")
    module_dir: str | None = flag(None, "Folder of the modules of the run's own layers.")
    skip_checksums: bool = flag(False, "Whether to read a run without comparing checksums.")

    @property
    def folder(self) -> str:
        """The folder of the model."""
        if bool(self.trainer_dir) == bool(self.hf_dir):
            only = "only one of " if self.trainer_dir else ""
            raise UsageError(f"set {only}--trainer_dir or --hf_dir to the folder of a model.")
        return self.trainer_dir or self.hf_dir or ""

    def load(self) -> Any:
        """Returns the model. Raises UserError."""
        folder = self.folder
        self.set_up()
        from moelib.runs.loading import load_model

        if self.module:
            import_module(self.module)
        names = ("step", "dtype", "mesh", "module_dir", "skip_checksums")
        return load_model(folder, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags that are settings of generation."""

    max_new_tokens: int = flag(200, "Maximum number of generated tokens.")
    max_length: int | None = flag(None, "Maximum number of tokens of prompt and text.")
    temperature: float = flag(0.8, "Divisor of the logits; 0 selects the most likely token.")
    top_k: int | None = flag(None, "Number of most likely tokens to draw from.")
    top_p: float = flag(0.95, "Probability mass of the most likely tokens to draw from.")
    min_p: float = flag(0.0, "Minimum probability, relative to the most likely token.")
    repetition_penalty: float = flag(1.0, "Penalty on tokens that have occurred; 1 for none.")
    seed: int = flag(0, "Seed of the draws.")
    stop: tuple[str, ...] = flag((), "String that ends a text and is not part of it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags, SamplingFlags):
    """Flags of the command."""

    prompt: str | None = flag(None, "Text to continue on the terminal.")
    input: str | None = flag(None, "File of JSON lines with a prompt each.")
    output: str | None = flag(None, "File for the texts of --input.")
    batch_size: int = flag(16, "Number of texts of --input generated together.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Continues the prompt on the terminal, or the prompts of a file."""
    if arguments:
        raise UsageError(f"unexpected argument {arguments[0]!r}; quote the prompt: --prompt 'a b'.")
    if bool(flags.prompt) == bool(flags.input):
        raise UsageError("set --prompt or --input, to a text or to a file of prompts.")
    if bool(flags.input) != bool(flags.output):
        raise UsageError("--input and --output require each other; set both.")
    requests = read_requests(flags.input, flags.output) if flags.input and flags.output else {}
    model = flags.load()
    settings = {f.name: getattr(flags, f.name) for f in dataclasses.fields(SamplingFlags)}
    if flags.prompt:
        stream_text(model, flags.prompt, **settings)
    else:
        _continue_file(model, requests, flags, settings)


def stream_text(model: Any, prompt: str, **settings: Any) -> None:
    """Prints a prompt and the text that follows it, as soon as it is certain.

    The model is a `LoadedModel`; the settings are those of `inference.generate.generate`.
    """
    from moelib.inference.generate import generate

    def show(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    texts = generate(model, [prompt], on_text=show, **settings)
    sys.stdout.write(prompt)
    next(texts)
    print()


# -- Files ---------------------------------------------------------------------------------------


def read_requests(path: str, output: str) -> dict[int, dict[str, Any]]:
    """Returns the fields of each line of a file of prompts by its number; blank lines are skipped.

    Raises UsageError if a line is not a JSON object with a prompt, or has a field of the output; if
    there are no lines; or if the output exists.
    """
    if os.path.exists(output):
        raise UsageError(f"--output {output} exists; remove it, or set another file.")
    try:
        with open(path, "rb") as file:
            lines = {number: line for number, line in enumerate(file, 1) if line.strip()}
    except OSError as error:
        raise UsageError(f"--input {path} cannot be read: {error.strerror}.") from error
    if not lines:
        raise UsageError(f"--input {path} has no lines.")
    return {number: _read_record(line, f"{path}:{number}") for number, line in lines.items()}


def _read_record(line: bytes, location: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{location} is not JSON ({error}); fix or remove the line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UsageError(f'{location} is not a JSON object with a text "prompt".')
    for name in ("text", "tokens"):
        if name in record:
            raise UsageError(f"{location} has the field {name!r} of the output; rename it.")
    return record


def _continue_file(
    model: Any, requests: dict[int, dict[str, Any]], flags: Flags, settings: dict[str, Any]
) -> None:
    """Writes a line per prompt, as batches are done."""
    from moelib.inference.generate import PromptError, generate

    prompts = [record["prompt"] for record in requests.values()]
    try:
        texts = generate(model, prompts, batch_size=flags.batch_size, **settings)
    except PromptError as error:
        number = list(requests)[error.index]
        raise UsageError(f"{flags.input}:{number}: {error.reason}") from error
    num_tokens = 0
    progress = Progress("generate", len(requests), seconds_between_lines=10.0)
    with open(flags.output or "", "x", encoding="utf-8") as file, progress:
        for record, completion in zip(requests.values(), texts, strict=True):
            text = json.dumps(record | completion._asdict(), ensure_ascii=False)
            print(text, file=file, flush=True)
            num_tokens += len(completion.tokens)
            progress.advance(1)
    print(f"{flags.output}: {len(requests)} texts, {num_tokens} tokens.")
