"""Labels of conversations: those of an oracle that works by character, and known faults."""

import json
import string

import numpy as np
import pytest
import tokenizers

from moelib.data.tokens.chat.conversation import Conversation, RecordError
from moelib.data.tokens.chat.labels import ChatEncoder, ChatOptions, bounds_of
from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from tests.data.tokens.chat.templates import TEMPLATES
from tests.oracles import chat_labels

TODAY = {"today": "2026-01-01", "bos_token": "", "eos_token": "<|endoftext|>"}
WORDS = [
    "yes",
    "no",
    " maybe",
    "\n",
    "  ",
    "42",
    "é",
    "😀😀",
    "x = y;",
    "<a>",
    "naïve\n\n",
    "<u",
    "\n",
]


def options(template=chat_labels.TEMPLATE, **fields):
    return ChatOptions(template, **TODAY | fields)


def with_end(path, content):
    """Returns the tokenizer of a tokenizer.json, with the special token that ends a message."""
    content.setdefault("added_tokens", [])
    for token in ("<|endoftext|>", chat_labels.END):
        if token not in [each["content"] for each in content["added_tokens"]]:
            number = len(content["model"]["vocab"]) + 5 + len(content["added_tokens"])
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added = {"id": number, "content": token, "special": True, **plain}
            content["added_tokens"].append(added)
    path.write_text(json.dumps(content))
    return Tokenizer.default_config().set(path=str(path)).instantiate()


@pytest.fixture(scope="module", params=["bytes", "byte-level BPE", "metaspace"])
def tokenizer(request, tmp_path_factory):
    """Returns tokenizers of three kinds."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return with_end(
            folder / "tokenizer.json",
            json.loads(ByteTokenizer.default_config().instantiate().to_json()),
        )
    texts = [" ".join(WORDS), "yes no maybe 42 x = y", *WORDS] * 20
    if request.param == "byte-level BPE":
        trained = train_bpe(texts, 300, str(folder / "bpe.json"))
        return with_end(folder / "tokenizer.json", json.loads(trained.to_json()))
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=False))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    model.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=list(string.printable)
    )
    model.train_from_iterator([*texts, *chat_labels.HEADERS.values()], trainer)
    return with_end(folder / "tokenizer.json", json.loads(model.to_str()))


def conversation(rng):
    """Returns random messages, with an answer."""
    roles = ["user", "assistant"] * int(rng.integers(1, 4))
    roles = ["system"] * int(rng.integers(2)) + roles + ["user"] * int(rng.integers(2))
    content = lambda: "".join(rng.choice(WORDS, rng.integers(1, 9))) + "."
    return [{"role": role, "content": content()} for role in roles]


def test_labels_of_random_conversations_are_those_of_an_oracle(tokenizer):
    encoder, rng = ChatEncoder(options(), tokenizer), np.random.default_rng(0)
    for _ in range(200):
        messages = conversation(rng)
        text, is_label = chat_labels.written(messages)
        (example,) = encoder.examples({"messages": messages})
        assert example.text == text
        ids, offsets = tokenizer.encode_rendered_with_offsets(text)
        assert example.ids == ids
        expected = chat_labels.tokens_with_labels(offsets, is_label)
        assert example.is_label.tolist() == expected


def test_each_answer_begins_after_the_generation_prompt_and_ends_with_its_end_token(tokenizer):
    messages = [
        {"role": "user", "content": "42"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "no\n"},
    ]
    (example,) = ChatEncoder(options(), tokenizer).examples({"messages": messages})
    runs = np.split(np.arange(len(example.ids)), [*bounds_of([example], 0)])[1::2]
    texts = [tokenizer.decode([example.ids[i] for i in run]) for run in runs]
    assert [text.strip(" ") for text in texts] == ["yes<|end|>", "no\n<|end|>"]


def test_a_template_that_drops_reasoning_makes_an_example_of_each_answer(tokenizer):
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"},
    ]
    template = TEMPLATES["reasoning of earlier turns is dropped"]
    encoder = ChatEncoder(options(template), tokenizer)
    first, second = encoder.examples({"messages": messages})
    for example, answer in ((first, messages[1]), (second, messages[3])):
        span = [i for i, label in enumerate(example.is_label) if label]
        assert span == [*range(span[0], span[-1] + 1)]
        text = tokenizer.decode([example.ids[i] for i in span])
        assert text.strip() == answer["content"] + "<|im_end|>"
    assert "hm" not in second.text


def test_of_examples_of_answers_those_that_fit_are_kept(bytes_with_end):
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>hm</think>2"},
        {"role": "user", "content": "2+2?" * 25},
        {"role": "assistant", "content": "<think>easy</think>4"},
    ]
    template = TEMPLATES["reasoning of earlier turns is dropped"]
    encoder = ChatEncoder(options(template, max_length=100), bytes_with_end)
    (example,) = encoder.examples({"messages": messages})
    answer = "<|im_start|>assistant\n<think>hm</think>2<|im_end|>"
    assert example.text.rstrip() == "<|im_start|>user\n1+1?<|im_end|>\n" + answer
    assert example.was_cut
    encoder = ChatEncoder(options(template, max_length=100, long="leave_out"), bytes_with_end)
    with pytest.raises(RecordError, match="longer than 100 tokens"):
        encoder.examples({"messages": messages})


def test_the_line_end_after_calls_is_no_label(bytes_with_end):
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<call>' + call.name }}{% endfor %}"
        "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    record = {"messages": [{"role": "user", "content": "a"}, answer]}
    (example,) = ChatEncoder(options(template), bytes_with_end).examples(record)
    labels = [i for i, x in zip(example.ids, example.is_label, strict=True) if x]
    assert bytes_with_end.decode(labels) == "<call>f<|end|>"


def test_marked_answers_are_the_labels(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<a>no</a>"}]
    encoder = ChatEncoder(options(TEMPLATES["answers that are marked"]), tokenizer)
    (example,) = encoder.examples({"messages": messages})
    text = tokenizer.decode([i for i, x in zip(example.ids, example.is_label, strict=True) if x])
    assert text.strip(" ") == "<a>no</a></a>"


def test_the_last_answer_is_all_that_the_template_marks_in_it(bytes_with_end):
    mark = "{% generation %}{{ X }}{% endgeneration %}"
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
        + mark.replace("X", "m.content")
        + "-"
        + mark.replace("X", "m.tool_calls[0].name + '<|end|>'")
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    answers = [
        {"role": "assistant", "content": f"a{i}", "tool_calls": [{"name": f"f{i}"}]}
        for i in range(2)
    ]
    user = {"role": "user", "content": "q"}
    encoder = ChatEncoder(options(template), bytes_with_end)
    example = encoder.last_answer(Conversation([user, answers[0], user, answers[1]]))
    labels = [i for i, x in zip(example.ids, example.is_label, strict=True) if x]
    assert bytes_with_end.decode(labels) == "a1f1<|end|>"


@pytest.fixture(scope="module")
def bytes_with_end(tmp_path_factory):
    """Returns a tokenizer of bytes."""
    content = json.loads(ByteTokenizer.default_config().instantiate().to_json())
    return with_end(tmp_path_factory.mktemp("bytes") / "tokenizer.json", content)


LONG = {"messages": [{"role": r, "content": "abc"} for r in ("user", "assistant") * 3]}


@pytest.mark.parametrize(("length", "num_answers"), [(21, 1), (24, 1), (46, 2), (66, 3)])
def test_a_long_conversation_is_cut_after_an_answer(bytes_with_end, length, num_answers):
    encoder = ChatEncoder(options(max_length=length), bytes_with_end)
    (example,) = encoder.examples(LONG)
    assert len(example.ids) <= length
    assert example.was_cut == (num_answers < 3)
    assert example.is_label.sum() == 4 * num_answers  # Three bytes, and the end.
    if example.was_cut:
        assert example.text.endswith("abc<|end|>")
        assert bytes_with_end.encode_rendered(example.text) == example.ids


@pytest.mark.parametrize("fields", [{"max_length": 15}, {"max_length": 30, "long": "leave_out"}])
def test_a_conversation_without_a_whole_answer_that_fits_is_left_out(bytes_with_end, fields):
    with pytest.raises(RecordError, match=r"longer than \d+ tokens") as caught:
        ChatEncoder(options(**fields), bytes_with_end).examples(LONG)
    assert not caught.value.is_fault


def test_a_special_token_in_a_call_or_a_tool_is_refused(bytes_with_end):
    call = {"function": {"name": "f", "arguments": {"x": ["a<|end|>"]}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    encoder = ChatEncoder(options(), bytes_with_end)
    with pytest.raises(RecordError, match=r"messages\[1\] contains '<\|end\|>'"):
        encoder.examples({"messages": messages})
    record = {"messages": [messages[0], {"role": "assistant", "content": "b"}]}
    with pytest.raises(RecordError, match="tools contains"):
        encoder.examples(record | {"tools": [{"name": "<|end|>"}]})


@pytest.mark.parametrize(
    ("content", "template", "reason"),
    [
        ("a<|end|>b", chat_labels.TEMPLATE, "a special token in a message"),
        ("a", "{{ raise_exception('never') }}", "refused by the template"),
        ("a", "{{ messages | length }}", "refused by the template"),
    ],
)
def test_messages_that_make_no_example_are_refused(bytes_with_end, content, template, reason):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RecordError) as caught:
        ChatEncoder(options(template), bytes_with_end).examples({"messages": messages})
    assert caught.value.reason == reason
    assert caught.value.is_fault
