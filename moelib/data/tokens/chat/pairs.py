"""Pairs of answers to a prompt, of which one is preferred, and prompts, as tokens."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from moelib.data.sources.source import BadRecords, Source, records_of
from moelib.data.tokens.chat.conversation import Conversation, RecordError, read_conversation
from moelib.data.tokens.chat.labels import ChatEncoder, ChatOptions, Example
from moelib.data.tokens.tokenizer import Tokenizer


class Pair(NamedTuple):
    """Two conversations that differ in their last message."""

    chosen: Example
    rejected: Example


class Prompt(NamedTuple):
    """A conversation up to where the model continues."""

    ids: list[int]
    messages: list[dict[str, Any]]
    columns: dict[str, Any]  # Further fields of the record, such as the right answer.


def read_pairs(
    source: Source,
    options: ChatOptions,
    tokenizer: Tokenizer,
    left_out: BadRecords,
    *,
    skip_bad_records: bool = False,
) -> Iterator[Pair]:
    """Yields the pairs of a source.

    A record is {"prompt", "chosen", "rejected"}, each a text or messages; or "chosen" and
    "rejected" are whole conversations that differ in their last message, without a prompt or with
    one that they begin with.

    Args:
        source: Records.
        options: Settings of conversations; a pair has both within `max_length` tokens.
        tokenizer: The tokenizer.
        left_out: Counter of records that are left out: those that are too long, or whose answers
            are equal.
        skip_bad_records: Whether wrong records are left out, too.

    Raises:
        BadRecordError: At a wrong record, unless it is left out.
    """
    encoder = ChatEncoder(options, tokenizer)

    def pair(record: Mapping[str, Any]) -> Pair:
        sides = [_conversation(record, name) for name in ("chosen", "rejected")]
        if sides[0].messages[:-1] != sides[1].messages[:-1]:
            raise RecordError(
                "two prompts", "chosen and rejected must differ in their last message alone"
            )
        if sides[0] == sides[1]:
            raise RecordError("equal answers", "chosen and rejected are the same", is_fault=False)
        found = Pair(*(encoder.last_answer(side) for side in sides))
        num_tokens = sum(len(side.ids) for side in found)
        if options.max_length is not None and num_tokens > options.max_length:
            raise RecordError(f"longer than {options.max_length} tokens", is_fault=False)
        return found

    return _read(source, pair, left_out, skip_bad_records)


def _read[T](
    source: Source, read: Callable[[Any], T], left_out: BadRecords, skip_bad_records: bool
) -> Iterator[T]:
    """Yields what `read` returns of the records of a source that are not left out."""

    def kept(record: Mapping[str, Any]) -> T | None:
        try:
            return read(record)
        except RecordError as error:
            if error.is_fault:
                raise
            left_out.add(error)
            return None

    for part in source.parts():
        found = records_of(part, kept, left_out if skip_bad_records else None)
        yield from (each for each in found if each is not None)


def _given(record: Mapping[str, Any]) -> str:
    """Returns the names of the fields that are not null."""
    return f"{sorted(name for name, value in record.items() if value is not None)!s:.120}"


def _conversation(record: Mapping[str, Any], side: str) -> Conversation:
    if record.get(side) is None:
        raise RecordError("no pair", f"it has {_given(record)}, but not {side}")
    if record.get("prompt") is not None:
        given = {"prompt": record["prompt"], "completion": record[side]}
    elif isinstance(record[side], str):
        raise RecordError("no prompt", f"{side} is a text; add a prompt")
    else:
        given = {"messages": record[side]}
    found = read_conversation(given | {"tools": record.get("tools")})
    if found.messages[-1]["role"] != "assistant":
        raise RecordError("no answer", f"the last message of {side} is not an assistant's")
    return found


def read_prompts(
    source: Source,
    options: ChatOptions,
    tokenizer: Tokenizer,
    left_out: BadRecords,
    *,
    skip_bad_records: bool = False,
) -> Iterator[Prompt]:
    """Yields the prompts of a source: records of {"prompt": text or messages, ...}.

    Arguments and errors are those of `read_pairs`; a prompt has at most `max_length` tokens.
    """
    encoder = ChatEncoder(options, tokenizer)

    def prompt(record: Mapping[str, Any]) -> Prompt:
        if (given := record.get("prompt")) is None:
            raise RecordError("no prompt", f"it has {_given(record)}, but not prompt")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        # An answer that is not used makes it a conversation, which is checked.
        checked = read_conversation(
            {"prompt": messages, "completion": "-", "tools": record.get("tools")}
        )
        checked = checked._replace(messages=checked.messages[:-1])
        if checked.messages[-1]["role"] == "assistant":
            raise RecordError("no question", "the last message of prompt is an assistant's")
        ids = encoder.prompt(checked)
        if options.max_length is not None and len(ids) > options.max_length:
            raise RecordError(f"longer than {options.max_length} tokens", is_fault=False)
        columns = {name: x for name, x in record.items() if name not in ("prompt", "tools")}
        return Prompt(ids, checked.messages, columns)

    return _read(source, prompt, left_out, skip_bad_records)
