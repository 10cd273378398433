"""Records of conversations: the forms in use, and what is refused."""

import json

import pytest

from moelib.data.tokens.chat.conversation import RecordError, read_conversation

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER], "id": 5}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"messages": [USER | {"name": None}, ANSWER]}, [USER, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
            [USER, ANSWER],
        ),
        ({"prompt": "u", "completion": "a"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        # TRL's implicit prompt.
        ({"prompt": "u", "completion": [USER | {"name": None}, ANSWER]}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {"prompt": [USER, ANSWER], "completion": [USER | {"content": "v"}, ANSWER]},
            [USER, ANSWER, USER | {"content": "v"}, ANSWER],
        ),
        ({"instruction": "u", "input": "", "output": "a"}, [USER, ANSWER]),
        (
            {"instruction": "u", "input": "v", "output": "a"},
            [{"role": "user", "content": "u\n\nv"}, ANSWER],
        ),
    ],
)
def test_forms(record, messages):
    assert read_conversation(record).messages == messages


def test_tools_and_their_calls_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    record = {"messages": [USER, call, {"role": "tool", "content": "5"}], "tools": [{"name": "f"}]}
    found = read_conversation(record)
    assert found.messages[1] == {**call, "content": ""}
    assert found.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"text": "a"}, "no conversation", "'text'"),
        ({"messages": []}, "no list of messages", "messages is []"),
        ({"messages": "hello"}, "no list of messages", "'hello'"),
        ({"prompt": "a", "completion": None}, "no conversation", "completion: null"),
        ({"prompt": float("nan"), "completion": "a"}, "no list of messages", "prompt is nan"),
        ({"prompt": "a", "completion": [USER, ANSWER]}, "two questions", "user follows the prompt"),
        ({"messages": ["a"]}, "a message that is no object", "messages[0] is 'a'"),
        ({"messages": [USER]}, "no message of an assistant", ""),
        (
            {"messages": [{"role": "boss", "content": "a"}]},
            "unknown role",
            "messages[0].role='boss'",
        ),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an empty message", "[1]"),
        ({"messages": [USER, {"role": "assistant"}]}, "content that is no text", "[1].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "content that is no text", "is [1]"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "no list of tools", "'f'"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "unknown role", "from='bot'"),
        (
            {"conversations": [{"value": "a"}]},
            "a message that lacks from or value",
            "conversations[0] is {",
        ),
        (
            {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]},
            "an answer with a weight",
            "messages[1].weight=0",
        ),
        ({"instruction": 5, "output": "a"}, "content that is no text", "instruction is 5"),
    ],
)
def test_other_records_are_refused(record, reason, detail):
    with pytest.raises(RecordError) as caught:
        read_conversation(record)
    assert caught.value.reason == reason
    assert detail in str(caught.value)
