"""`moelib chat`: a conversation with a model on the terminal.

    moelib chat --trainer_dir=RUN
    moelib chat --hf_dir=MODEL --system='Answer in one sentence.'

Lines that begin with a slash are commands: /again answers anew, /clear begins anew, /save FILE
writes the messages, /quit ends. Ctrl-C ends an answer; the message is then as if unsent.
"""

import dataclasses
import io
import sys
from collections.abc import Sequence
from typing import Any

from moelib.cli.generate import ModelFlags, SamplingFlags
from moelib.core.errors import UserError
from moelib.runtime.command_line import flag, no_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFlags(ModelFlags):
    """Flags that select a model and its format of conversations."""

    chat_template: str | None = flag(
        None, "Chat template: a file of Jinja, chatml, llama3 or plain; by default the model's."
    )

    def chat_format(self, model: Any, *, is_required: bool) -> Any:
        """Returns the `ChatFormat` of a loaded model, or None. Raises UserError."""
        from moelib.data.tokens.chat.template import find_template
        from moelib.inference.conversation import ChatFormat

        template = find_template(self.folder, self.chat_template, model.tokenizer)
        if template is None and is_required:
            raise UserError(
                f"{self.folder} has no chat template; set --chat_template to chatml, llama3, plain "
                "or a file of Jinja."
            )
        return None if template is None else ChatFormat(template, model.tokenizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ChatFlags, SamplingFlags):
    """Flags of the command."""

    system: str | None = flag(None, "First message, of the system.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Reads messages from the terminal, or lines of standard input, and answers them."""
    no_arguments(arguments, Flags)
    model = flags.load()
    chat = flags.chat_format(model, is_required=True)
    from moelib.inference.conversation import Conversation

    settings = {f.name: getattr(flags, f.name) for f in dataclasses.fields(SamplingFlags)}
    talk = Conversation(model, chat, system=flags.system, **settings)
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # A message that is no UTF-8 is refused.
    if is_terminal:
        import readline  # noqa: F401  # Editing and history of lines.

        print("/again answers anew, /clear begins anew, /save FILE, /quit.")
    while (line := _read("> " if is_terminal else "")) is not None:
        if line.strip():
            try:
                if _do(talk, line):
                    return
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
            except OSError as error:  # Such as that of a folder that is missing.
                if isinstance(error, BrokenPipeError):
                    raise
                text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                print(f"error: {text}", file=sys.stderr)
            except KeyboardInterrupt:
                print()


def _read(prompt: str) -> str | None:
    """Returns the next line; None at the end, or if it is interrupted."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None


def _do(talk: Any, line: str) -> bool:
    """Carries out a command or answers a message. Returns whether the conversation ends."""
    command, _, argument = line.strip().partition(" ")
    match command:
        case "/quit" if not argument:
            return True
        case "/clear" if not argument:
            talk.clear()
        case "/save" if not argument:
            raise UserError("/save needs a file: write /save FILE.")
        case "/save":
            talk.save(argument.strip())
            print(f"{argument.strip()}: {len(talk.messages)} messages.")
        case "/again" if not argument:
            _show(talk.again)
        case _ if command.startswith("/"):
            raise UserError(f"{line.strip()!r:.40}: write /again, /clear, /save FILE or /quit.")
        case _:
            _show(lambda on_text: talk.say(line, on_text))
    return False


def _show(answer: Any) -> None:
    def on_text(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    answer(on_text)
    print()
