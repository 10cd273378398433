"""`moelib inspect`: shows what a model computes for a text, as a page of HTML.

    moelib inspect --trainer_dir=RUN --text='Once upon a time' --output=trace.html

Tokens are coloured by their loss or by their expert in a layer. For a chosen token the page shows
the predictions after each layer (logit lens), the length of the residual stream, and the experts.
"""

import dataclasses
import os
from collections.abc import Sequence

from moelib.cli.generate import ModelFlags
from moelib.core.errors import UsageError
from moelib.runtime.command_line import flag, no_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags):
    """Flags of the command."""

    text: str | None = flag(None, "Text of two tokens or more.")
    text_file: str | None = flag(None, "File with the text, instead of --text.")
    layers: str = flag(".*", "Regular expression of the paths of layers to show.")
    output: str = flag("trace.html", "File of the page.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Writes the page."""
    no_arguments(arguments, Flags)
    if bool(flags.text) == bool(flags.text_file):
        raise UsageError(f"set {'only one of ' if flags.text else ''}--text or --text_file.")
    text = flags.text or _read(flags.text_file or "")
    if os.path.exists(flags.output):
        raise UsageError(f"--output {flags.output} exists; remove it, or set another file.")
    if not os.path.isdir(folder := os.path.dirname(flags.output) or "."):
        raise UsageError(f"--output {flags.output}: there is no folder {folder}; make it.")
    model = flags.load()
    from moelib.inference.trace import trace
    from moelib.inference.trace_page import trace_page
    from moelib.layers.tracing import EXPERT_IDS, EXPERT_WEIGHTS, HIDDEN, ROUTER_PROBS

    names = HIDDEN, ROUTER_PROBS, EXPERT_IDS, EXPERT_WEIGHTS
    found = trace(model, text, layers=flags.layers, names=names)
    title = os.path.basename(os.path.abspath(flags.folder))
    step = "" if model.step is None else f", step {model.step:,}"
    with open(flags.output, "x", encoding="utf-8") as file:
        file.write(trace_page(found, model.tokenizer, title=title + step))
    loss = found.losses.mean()
    print(f"{flags.output}: {len(found.tokens)} tokens, mean loss {loss:.4f} nats.")
    if model.max_length is not None and len(found.tokens) > model.max_length:
        print(
            f"The model was trained on up to {model.max_length} tokens: the rest may mean nothing."
        )


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise UsageError(f"--text_file {path} cannot be read: {error}.") from error
