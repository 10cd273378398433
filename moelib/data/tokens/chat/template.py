"""Chat templates: Jinja that makes a text of messages, rendered in a process with limits.

A template comes with a model, maybe from a stranger. It can neither import nor call what Jinja's
sandbox forbids, and a process of its own limits its time and its memory.
"""

import datetime
import importlib.resources
import json
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.errors import UserError
from moelib.data.tokens.chat import renderer
from moelib.data.tokens.tokenizer import CHAT_TEMPLATE_FILE, SETTINGS_FILE, Tokenizer
from moelib.runtime import storage
from moelib.runtime.storage import read_json

logger = logging.getLogger(__name__)

BUILT_IN = "chatml", "llama3", "plain"  # Templates that moelib has.

_SECONDS = 5.0  # Processor time of the texts of a conversation.
_MEGABYTES = 512  # Memory of the process.
_MAX_CHARACTERS = 1 << 20  # Of a template.

Message = Mapping[str, Any]


class TemplateError(UserError):
    """A template that is wrong, or refuses messages."""


class Rendered(NamedTuple):
    """A text, with the spans [begin, end) that the template marks as an assistant's."""

    text: str
    spans: Sequence[tuple[int, int]]


class ChatTemplate:
    """A template, with the tokens that it may write; safe to use from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        today: datetime.date | None = None,
        name: str = "the chat template",
    ) -> None:
        """Starts the process that renders.

        Args:
            source: The template, in Jinja.
            bos_token: BOS token of the tokenizer; empty for none.
            eos_token: End-of-text token of the tokenizer.
            today: Day that `strftime_now` shows; None for the present one.
            name: Name in messages.

        Raises:
            TemplateError: If it is no template.
        """
        if len(source) > _MAX_CHARACTERS:
            raise TemplateError(f"{name} has {len(source)} characters, above {_MAX_CHARACTERS}.")
        self.source, self.name = source, name
        self.tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # Whether the template itself says what an assistant writes.
        self.marks_answers = bool(re.search(r"\{%-?\s*generation\b", source))
        self._request = {
            "source": source,
            "variables": self.tokens,
            "today": (today or datetime.datetime.now()).isoformat(),
            "seconds": _SECONDS,
            "megabytes": _MEGABYTES,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._marks = self._ask(None)["marks"]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Returns the text of messages.

        Args:
            messages: Messages, with `role` and `content`.
            add_generation_prompt: Whether the text ends where an assistant begins.
            tools: Descriptions of tools, in JSON's types; None for none.

        Raises:
            TemplateError: If the template refuses the messages, or takes too long or too much
                memory.
        """
        return self.render_all([(messages, add_generation_prompt)], tools=tools)[0]

    def render_all(
        self,
        prefixes: Sequence[tuple[Sequence[Message], bool]],
        *,
        tools: Sequence[Any] | None = None,
    ) -> list[str]:
        """Returns the texts of several lists of messages, each with or without generation prompt.

        Raises TemplateError as `render` does.
        """
        return self._ask([[self._variables(*each, tools), False] for each in prefixes])["texts"]

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> Rendered:
        """Returns the text of messages, with the spans of `{% generation %}`.

        Raises TemplateError as `render` does.
        """
        (text,) = self._ask([[self._variables(messages, False, tools), True]])["texts"]
        pieces = re.split("(" + "|".join(map(re.escape, self._marks)) + ")", text)
        plain, spans, begin = "", [], 0
        for piece in pieces:
            if piece == self._marks[0]:
                begin = len(plain)
            elif piece == self._marks[1]:
                spans.append((begin, len(plain)))
            else:
                plain += piece
        return Rendered(plain, spans)

    @staticmethod
    def _variables(
        messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None
    ) -> dict[str, Any]:
        variables = {"messages": messages, "tools": tools, "documents": None}
        return variables | {"add_generation_prompt": add_generation_prompt}

    def _ask(self, jobs: Any) -> dict[str, Any]:
        """Returns the answer of the process, which is started if there is none."""
        with self._lock:
            line = ""
            for request in [*([] if self._process else [self._request]), *([jobs] if jobs else [])]:
                if self._process is None:
                    self._start()
                assert self._process is not None
                line = self._exchange(self._process, json.dumps(request))
                if not line:
                    self._process = None
                    raise TemplateError(
                        f"{self.name} took more than {_SECONDS:g} s or {_MEGABYTES} MB"
                    )
        answer = json.loads(line)
        if "reason" in answer:
            cure = "" if jobs else "; correct it, or set another chat_template (--chat_template)."
            raise TemplateError(f"{self.name}: {answer['reason'].rstrip('.')}{cure}")
        return answer

    def _start(self) -> None:
        command = [sys.executable, "-P", renderer.__file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, encoding="utf-8", **pipes)
        weakref.finalize(self, _end, self._process)

    @staticmethod
    def _exchange(process: "subprocess.Popen[str]", line: str) -> str:
        """Returns the answer to a line; an empty text if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except OSError:
            return ""
        return process.stdout.readline()


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def find_template(
    folder: str | None, choice: str | None, tokenizer: Tokenizer, **options: Any
) -> ChatTemplate | None:
    """Returns a template; None if the folder has none and none is chosen.

    Args:
        folder: Folder of a model, a run, a tokenizer or a token store; None for none.
        choice: One of `BUILT_IN`, or a file; None for the template of the folder.
        tokenizer: The tokenizer, whose BOS and end of text the template writes.
        **options: Further arguments of `ChatTemplate`.

    Raises:
        UserError: If a file cannot be read, or is no template of a question and its answer.
    """
    settings = {}
    if folder is not None and storage.exists(path := os.path.join(folder, SETTINGS_FILE)):
        settings = read_json(path)
    if (found := _source(folder, choice, settings)) is None:
        return None
    name, source = found
    options |= {"bos_token": tokenizer.template_bos or "", "eos_token": tokenizer.eos_token}
    template = ChatTemplate(source, name=name, **options)
    cure = "correct it, or set another chat_template (--chat_template)."
    try:
        written = _example(template).lower()
    except TemplateError as error:
        raise UserError(f"A question and its answer fail in {error}; {cure}") from error
    if lost := [role for role, text in _EXAMPLE.items() if text not in written]:
        raise UserError(f"{name} does not write the content of {lost}; {cure}")
    return template


_EXAMPLE = {"user": "q-8f3aq", "assistant": "a-8f3aq"}  # Contents that no template has.


def _example(template: ChatTemplate) -> str:
    """Returns the text of a question and its answer, after one of the system if it must be."""
    messages = [{"role": role, "content": text} for role, text in _EXAMPLE.items()]
    try:
        return template.render(messages, add_generation_prompt=False)
    except TemplateError as error:
        try:
            system = {"role": "system", "content": "s"}
            return template.render([system, *messages], add_generation_prompt=False)
        except TemplateError:
            raise error from None


def end_of_answer(template: ChatTemplate) -> str:
    """Returns the text that a template writes after an assistant's message.

    Space around other characters is no part of it.
    """
    text = _example(template)
    after = text[text.lower().rindex(_EXAMPLE["assistant"]) + len(_EXAMPLE["assistant"]) :]
    return after.strip() or after


def warn_of_long_end(template: ChatTemplate, tokenizer: Tokenizer, consequence: str = "") -> None:
    """Warns if the end of an answer is several tokens, which a model must learn one by one."""
    end = end_of_answer(template)
    if (num := len(tokenizer.encode_rendered(end)) if end else 0) > 1:
        logger.warning(
            "The chat template ends an answer with %r, which is %d tokens of the tokenizer; make "
            "it a special token, or set another chat_template (--chat_template).%s",
            *(end, num, consequence),
        )


def _source(
    folder: str | None, choice: str | None, settings: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns name and text of a template."""
    if choice in BUILT_IN:
        file = (
            importlib.resources.files("moelib.data.tokens.chat") / "templates" / f"{choice}.jinja"
        )
        return f"chat_template={choice}", file.read_text("utf-8")
    path = choice
    if (
        path is None
        and folder is not None
        and storage.exists(os.path.join(folder, CHAT_TEMPLATE_FILE))
    ):
        path = os.path.join(folder, CHAT_TEMPLATE_FILE)
    if path is not None:
        try:
            with storage.open_to_read(path, encoding="utf-8") as file:
                return path, file.read()
        except (OSError, ValueError) as error:
            raise UserError(
                f"chat_template={path!r} cannot be read ({error}); set it to a file of Jinja, or "
                f"to one of {', '.join(BUILT_IN)}."
            ) from None
    found = settings.get("chat_template")
    if isinstance(found, list):  # Of several, by name.
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    where = os.path.join(folder or "", SETTINGS_FILE)
    return (f"chat_template of {where}", found) if isinstance(found, str) else None
