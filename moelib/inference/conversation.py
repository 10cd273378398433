"""Conversations with a model: messages become a prompt by the model's chat template."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moelib.core.errors import ExistingFileError, UserError, refuse_single_strings
from moelib.data.tokens.chat.template import ChatTemplate, end_of_answer
from moelib.inference.generate import generate
from moelib.runtime import storage

ROLES = "system", "user", "assistant"


class MessageError(UserError):
    """Messages that a model cannot answer."""


class ChatFormat:
    """The chat template of a model, and what ends its messages."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        """Finds out how the template ends an assistant's message."""
        self._template, self._tokenizer = template, tokenizer
        # A message ends with one token, or with text in several.
        ids = tokenizer.encode_rendered(end) if (end := end_of_answer(template)) else []
        self.stop_ids: list[int] = ids if len(ids) == 1 else []
        self.stop: list[str] = [end] if len(ids) > 1 else []

    def prompt(self, messages: Any) -> list[int]:
        """Returns the token ids of a conversation, up to where the model continues.

        Args:
            messages: Dictionaries with a `role` and its `content`, a text or parts of text.

        Raises:
            MessageError: If they are no such messages, or the template refuses them.
        """
        checked = [_checked(i, message) for i, message in enumerate(_list_of(messages))]
        for index, message in enumerate(checked):
            for token in self._tokenizer.special_tokens:
                if token in message["content"]:
                    raise MessageError(
                        f"messages[{index}].content contains the special token {token!r}, which "
                        "would end or begin a message; remove it."
                    )
        try:
            text = self._template.render(checked, add_generation_prompt=True)
        except UserError as error:
            raise MessageError(str(error)) from error
        return self._tokenizer.encode_rendered(text)


def _list_of(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list) or not messages:
        raise MessageError(
            f"messages is {messages!r:.80}; set it to a list of one message or more."
        )
    return messages


def _checked(index: int, message: Any) -> dict[str, str]:
    """Returns a message whose content is a text. Raises MessageError."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise MessageError(f"{name} is {message!r:.80}; set it to an object with role and content.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise MessageError(f"{name}.role is {role!r:.80}; set it to one of {', '.join(ROLES)}.")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [x.get("text") for x in parts if isinstance(x, Mapping)]
    texts = [x for x in texts if isinstance(x, str)]
    if len(texts) < len(parts):
        raise MessageError(
            f"{name}.content is {content!r:.80}; set it to a text, or to parts of text."
        )
    return {"role": role, "content": checked_text("".join(texts), f"{name}.content")}


def checked_text(text: str, name: str) -> str:
    """Returns a text that UTF-8 can encode. Raises MessageError, which names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        part = text[max(0, error.start - 20) : error.end]
        raise MessageError(f"{name} is no text of Unicode near {part!a}; correct it.") from None
    return text


class Conversation:
    """A conversation in progress.

        talk = Conversation(model, ChatFormat(template, model.tokenizer), system="Be brief.")
        print(talk.say("What is a router?"))

    Attributes:
        messages: All messages, with `role` and `content`; may be changed between calls.
    """

    def __init__(
        self, model: Any, chat: ChatFormat, *, system: str | None = None, **settings: Any
    ) -> None:
        """Begins a conversation.

        Args:
            model: A `moelib.runs.loading.LoadedModel`.
            chat: The model's format of conversations.
            system: First message, of the role "system"; None for none.
            **settings: Settings of generation, as in `moelib.inference.generate.generate`.
        """
        refuse_single_strings(stop=settings.get("stop", ()))
        self._model, self._chat, self._system, self._settings = model, chat, system, settings
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Drops all messages but that of the system."""
        system = self._system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """Returns the model's answer to a message; the messages contain both.

        Args:
            text: The message.
            on_text: Function called with each piece of the answer, as soon as it is certain.

        Raises:
            UserError: If the conversation is too long, or the template refuses it.
        """
        return self._answer([*self.messages, {"role": "user", "content": text}], on_text)

    def again(self, on_text: Callable[[str], None] | None = None) -> str:
        """Returns another answer to the last message, in the place of the last answer."""
        kept = [*self.messages]
        while kept and kept[-1]["role"] == "assistant":
            kept.pop()
        if not kept or kept[-1]["role"] != "user":
            raise MessageError("There is no message to answer; write one first.")
        self._settings["seed"] = self._settings.get("seed", 0) + 1
        return self._answer(kept, on_text)

    def _answer(self, messages: list[dict[str, str]], on_text: Callable[[str], None] | None) -> str:
        show = None if on_text is None else lambda _, piece: on_text(piece)
        stop_ids = [*self._model.stop_ids, *self._chat.stop_ids]
        settings: dict[str, Any] = {"stop_ids": stop_ids, **self._settings}
        prompt = self._chat.prompt(messages)
        stop = [*self._chat.stop, *settings.pop("stop", ())]
        (answer,) = generate(self._model, [prompt], stop=stop, on_text=show, **settings)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer.text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the messages to a new .json file, which `moelib prepare --format=chat` reads.

        Raises:
            ExistingFileError: If there is such a file.
            MessageError: If there is no message.
        """
        if not self.messages:
            raise MessageError("There is no message to save; write one first.")
        if storage.exists(path):
            raise ExistingFileError(f"{os.fspath(path)!r} exists; choose another name.")
        storage.write_json(path, {"messages": self.messages}, indent=None)
