"""Labels of conversations, character by character.

The writer of a text notes for each character whether a model is to generate it, as it writes. No
text is searched.
"""

HEADERS = {"user": "<u>\n", "assistant": "<a>\n", "system": "<s>\n"}
END = "<|end|>"


def written(messages):
    """Returns the text of messages, and whether each character is one to generate."""
    text, is_label = "", []
    for message in messages:
        answer = message["role"] == "assistant"
        for piece, label in (
            (HEADERS[message["role"]], False),
            (message["content"] + END, answer),
            ("\n", False),
        ):
            text += piece
            is_label += [label] * len(piece)
    return text, is_label


TEMPLATE = (
    "{%- for m in messages %}"
    "{{- {'user': '<u>\n', 'assistant': '<a>\n', 'system': '<s>\n'}[m.role] }}"
    "{{- m.content + '<|end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<a>\n' }}{% endif %}"
)


def tokens_with_labels(offsets, is_label):
    """Returns which tokens have a character to generate."""
    return [any(is_label[begin:end]) for begin, end in offsets]
