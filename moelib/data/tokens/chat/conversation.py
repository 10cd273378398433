"""Records of conversations, in the formats in use, as messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean
from moelib.data.sources.source import BadRecordError

ROLES = "system", "developer", "user", "assistant", "tool"
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class Conversation(NamedTuple):
    """Messages, with `role` and `content`, and maybe `tool_calls`, and the tools that they use."""

    messages: list[dict[str, Any]]
    tools: Sequence[Any] | None = None


class RecordError(BadRecordError):
    """A record that is no conversation to learn from.

    Attributes:
        is_fault: Whether the record is wrong, instead of only of no use.
    """

    def __init__(self, reason: str, detail: str = "", *, is_fault: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.is_fault = reason, is_fault


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Returns the conversation in a record of one of these forms.

        {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
        {"conversations": [{"from": "human", "value": "..."}, ...]}
        {"prompt": "..." or messages, "completion": "..." or messages}
        {"instruction": "...", "input": "...", "output": "..."}

    A completion that begins with the messages of the prompt is the whole conversation. Other keys
    are ignored.

    Raises:
        RecordError: If it has no such form, an unknown role, an empty message, no message of an
            assistant, or a completion that asks again.
    """
    given, num_asked = {name: value for name, value in record.items() if value is not None}, 0
    if "messages" in given:
        messages = _listed(given["messages"], "messages")
    elif "conversations" in given:
        listed = _listed(given["conversations"], "conversations")
        messages = [_of_sharegpt(x, f"conversations[{i}]") for i, x in enumerate(listed)]
    elif {"prompt", "completion"} <= given.keys():
        asked = _side(given["prompt"], "user", "prompt")
        messages = [*asked, *_side(given["completion"], "assistant", "completion")]
        num_asked = len(asked)
    elif {"instruction", "output"} <= given.keys():
        asked = [_text(given[x], x) for x in ("instruction", "input") if given.get(x)]
        asked = _side("\n\n".join(asked), "user", "instruction")
        messages = [*asked, *_side(given["output"], "assistant", "output")]
    else:
        raise RecordError(
            "no conversation",
            f"it has {sorted(given)!s:.120}, but neither messages, conversations, prompt and "
            "completion, nor instruction and output"
            + (f"; {', '.join(empty)}: null" if (empty := sorted(record.keys() - given)) else ""),
        )
    tools = given.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RecordError("no list of tools", f"tools is {tools!r:.80}")
    checked = [_checked(i, message) for i, message in enumerate(messages)]
    if num_asked:
        checked = _joined(checked[:num_asked], checked[num_asked:])
    if not any(message["role"] == "assistant" for message in checked):
        raise RecordError("no message of an assistant")
    return Conversation(checked, tools or None)


def _joined(prompt: list[dict[str, Any]], completion: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the conversation of a prompt and a completion, which may repeat the prompt."""
    if completion[: len(prompt)] == prompt:
        return completion
    asks = completion[0]["role"] in ("system", "developer", "user")
    if asks and prompt[-1]["role"] == "user":
        raise RecordError(
            "two questions",
            f"a message of the {completion[0]['role']} follows the prompt; remove prompt if the "
            "answer is a whole conversation",
        )
    return prompt + completion


def _listed(value: Any, name: str) -> list[Any]:
    """Returns a list, which tables may hold as text."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list) or not value:
        raise RecordError("no list of messages", f"{name} is {given!r:.80}")
    return value


def _of_sharegpt(message: Any, name: str) -> Any:
    if not isinstance(message, Mapping) or not {"from", "value"} <= message.keys():
        raise RecordError("a message that lacks from or value", f"{name} is {message!r:.80}")
    sender = message["from"]
    if sender not in _SHAREGPT:
        known = did_you_mean(str(sender), _SHAREGPT)
        raise RecordError("unknown role", f"{name}.from={sender!r:.40}; {known}")
    return {"role": _SHAREGPT[sender], "content": message["value"]}


def _side(value: Any, role: str, name: str) -> list[Any]:
    """Returns the messages of a prompt or a completion, the field `name`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RecordError("content that is no text", f"{name} is {value!r:.80}")
    return value


def _checked(index: int, message: Any) -> dict[str, Any]:
    """Returns a message without its keys that are None. Raises RecordError."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RecordError("a message that is no object", f"{name} is {message!r:.80}")
    if (role := message.get("role")) not in ROLES:
        raise RecordError("unknown role", f"{name}.role={role!r:.40}; use one of {ROLES}")
    calls = message.get("tool_calls")
    content = message.get("content")
    content = _text("" if calls and not content else content, f"{name}.content")
    if not content.strip() and not calls:
        raise RecordError("an empty message", f"{name}.content is {content!r:.40}")
    if role == "assistant" and message.get("weight") not in (None, 1):
        detail = f"{name}.weight={message['weight']!r:.40}; all answers are labels: remove it"
        raise RecordError("an answer with a weight", detail)
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"content": content}
