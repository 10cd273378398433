"""Conversations as tokens, of which those that a model is to generate are labels.

Labels are found in the text, not in the tokens: the messages of an assistant, each up to the end of
its end-of-turn token, without the header that the generation prompt supplies. A token is a label if
any of its characters is.

Letters: S tokens.
"""

import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moelib.data.sources.files import files_of
from moelib.data.sources.source import Source
from moelib.data.tokens.chat.conversation import Conversation, RecordError, read_conversation
from moelib.data.tokens.chat.template import ChatTemplate, Rendered, TemplateError
from moelib.data.tokens.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Settings that decide the tokens of conversations."""

    template: str  # The template, in Jinja.
    bos_token: str  # As the template sees it.
    eos_token: str
    # Day that the template may show, as 2026-11-28. A store that is there keeps its day.
    today: str
    # Maximum number of tokens; None for no limit.
    max_length: int | None = None
    # Treatment of a longer conversation: cut after the last whole answer that fits, or left out.
    long: Literal["cut", "leave_out"] = "cut"

    def chat_template(self) -> ChatTemplate:
        """Returns the template, whose process is started."""
        return ChatTemplate(
            self.template,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            today=datetime.date.fromisoformat(self.today),
        )


def chat_options(template: ChatTemplate, source: Source, **fields: Any) -> ChatOptions:
    """Returns the settings of a source's conversations.

    The day that the template may show is that of the newest file of the source, so that the same
    files make the same store on any day.

    Args:
        template: The template.
        source: The conversations.
        **fields: Further fields of `ChatOptions`.
    """
    stamps: list[int] = []
    if "strftime_now" in template.source:
        stamps = [file.modified_ns for part in source.parts() for file in files_of(part)]
    day = datetime.datetime.fromtimestamp(max(stamps, default=0) / 1e9, datetime.UTC).date()
    fields = {"today": day.isoformat(), **fields}
    return ChatOptions(template.source, **template.tokens, **fields)


class Example(NamedTuple):
    """A conversation as tokens."""

    text: str
    ids: list[int]
    is_label: npt.NDArray[np.bool_]  # [S].
    was_cut: bool = False  # Whether later answers are left out.


class ChatEncoder:
    """Makes tokens of records."""

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._template = options.chat_template()

    def examples(self, record: Mapping[str, Any]) -> list[Example]:
        """Returns the examples of a record: one, or one for each answer.

        A template that drops parts of earlier answers, such as their reasoning, makes an example
        of each answer, with those before it as the template shows them. Those that are too long
        are left out, which cuts the conversation.

        Raises:
            RecordError: If it is no conversation to learn from, or no example is left.
        """
        examples, left_out = [], []
        for rendered in self._rendered(read_conversation(record)):
            try:
                examples.append(self._example(rendered, self._options.max_length))
            except RecordError as error:
                left_out.append(error)
        if left_out and (not examples or self._options.long == "leave_out"):
            raise left_out[0]
        if left_out:
            examples[-1] = examples[-1]._replace(was_cut=True)
        return examples

    def last_answer(self, conversation: Conversation) -> Example:
        """Returns a whole conversation of which the last message alone is labels.

        Raises:
            RecordError: If the template refuses it.
        """
        rendered, num_before = self._rendered(conversation)[-1], -1
        if self._template.marks_answers:  # Maybe the content and the calls of one alone.
            earlier = conversation._replace(messages=conversation.messages[:-1])
            num_before = len(self._rendered(earlier)[0].spans)
        return self._example(rendered._replace(spans=rendered.spans[num_before:]), None)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Returns the ids of a conversation up to where the model continues.

        Raises:
            RecordError: If the template refuses it.
        """
        self._check_texts(conversation)
        messages, tools = conversation
        try:
            text = self._template.render(messages, add_generation_prompt=True, tools=tools)
        except TemplateError as error:
            raise RecordError("refused by the template", str(error)) from None
        return self._tokenizer.encode_rendered(text)

    def _rendered(self, conversation: Conversation) -> list[Rendered]:
        self._check_texts(conversation)
        try:
            return render(self._template, conversation)
        except TemplateError as error:
            raise RecordError("refused by the template", str(error)) from None

    def _check_texts(self, conversation: Conversation) -> None:
        """Refuses half surrogates, and special tokens, which would end or begin a message."""
        parts = {f"messages[{i}]": message for i, message in enumerate(conversation.messages)}
        for name, part in (parts | {"tools": conversation.tools}).items():
            texts = list(_texts(part))
            try:
                "\n".join(texts).encode()
            except UnicodeEncodeError:
                text = f"{name} has half a surrogate pair"
                raise RecordError("no text of Unicode", text) from None
            for token in self._tokenizer.special_tokens:
                if any(token in text for text in texts):
                    raise RecordError("a special token in a message", f"{name} contains {token!r}")

    def _example(self, rendered: Rendered, limit: int | None) -> Example:
        ids, offsets = self._tokenizer.encode_rendered_with_offsets(rendered.text)
        begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
        is_label = np.zeros(len(ids), bool)
        ends = []
        for first, last in rendered.spans:
            inside = (begin < last) & (end > first)
            is_label |= inside
            ends += np.flatnonzero(inside)[-1:].tolist()
        if not is_label.any():
            raise RecordError("no label", is_fault=False)
        example = Example(rendered.text, ids, is_label)
        if limit is None or len(ids) <= limit:
            return example
        fitting = [each + 1 for each in ends if each < limit]
        if self._options.long == "leave_out" or not fitting:
            raise RecordError(f"longer than {limit} tokens", is_fault=False)
        size = fitting[-1]
        text = rendered.text[: int(end[size - 1])]
        return Example(text, ids[:size], is_label[:size], was_cut=True)


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts inside a value of JSON, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            yield from (name, *_texts(inside))
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _texts(inside)


def render(template: ChatTemplate, conversation: Conversation) -> list[Rendered]:
    """Returns the text of a conversation, with the spans of labels; several as in `examples`.

    Raises:
        TemplateError: If the template refuses the messages, or they do not begin its text as they
            begin alone.
    """
    messages, tools = conversation
    if template.marks_answers:
        return [template.render_marked(messages, tools=tools)]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prefixes = [(messages[:i], True) for i in answers]
    prefixes += [(messages[: i + 1], False) for i in answers]
    whole, *texts = template.render_all([(messages, False), *prefixes], tools=tools)
    turns = zip(answers, texts[: len(answers)], texts[len(answers) :], strict=True)
    alone = [_turn(template, messages[i], i, *both) for i, *both in turns]
    if all(whole.startswith(each.text[: each.spans[0][1]]) for each in alone):
        return [Rendered(whole, [each.spans[0] for each in alone])]
    return alone


def _turn(
    template: ChatTemplate, message: Any, index: int, before: str, with_turn: str
) -> Rendered:
    """Returns the text up to an answer, with its span."""
    if not with_turn.startswith(before):
        raise TemplateError(
            f"{template.name}: the text of messages[:{index}] with the generation prompt is not "
            f"the beginning of that of messages[:{index + 1}]; mark the answers in the template by "
            "{% generation %}."
        )
    turn, content = with_turn[len(before) :], message["content"].rstrip()
    trimmed = turn.rstrip()
    if content and trimmed.endswith(content):  # White space is all that ends the answer.
        trimmed = turn
    return Rendered(with_turn, [(len(before), len(before) + len(trimmed))])


def bounds_of(examples: Sequence[Example], first: int) -> Iterator[int]:
    """Yields begin and end, in turn, of each run of labels, as positions from `first` on."""
    for example in examples:
        edges = np.diff(example.is_label.astype(np.int8), prepend=0, append=0)
        yield from (np.flatnonzero(edges) + first).tolist()
        first += len(example.ids)
