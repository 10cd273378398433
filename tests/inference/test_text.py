"""Text streams: whole characters, nothing of a stop string, and no text is lost."""

import random

import pytest

from moelib.inference.text import TextStream, text_of

TEXT = "ein Käse für 3 €, 𝄞 und\n\nEnde\n\nund mehr"


def decode(tokens):
    """Returns the text of tokens that are bytes."""
    return bytes(tokens).decode(errors="replace")


def pieces(tokens, stops=(), prompt=b"Es war ", decode=decode):
    """Returns the pieces up to the first stop string."""
    stream, shown = TextStream(prompt, decode, stops), []
    for token in tokens:
        shown.append(stream.add(token))
        if stream.ended:
            break
    return [*shown, stream.rest]


def test_characters_are_shown_whole_and_as_soon_as_they_are_complete():
    shown = pieces(TEXT.encode())
    assert [piece for piece in shown if piece] == list(TEXT)
    assert text_of(TEXT.encode(), b"Es war ", decode) == TEXT


def byte_fallback(tokens):
    """Returns the text of bytes as SentencePiece's byte fallback: U+FFFD for each invalid one."""
    text = bytes(tokens).decode(errors="surrogateescape")
    return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)


@pytest.mark.parametrize("decode", [decode, byte_fallback])
def test_a_character_that_a_prompt_begins_is_in_the_text(decode):
    prompt, tokens = "3 €".encode()[:-1], "€ und 4".encode()[-7:]
    assert "".join(pieces(tokens, (), prompt, decode)) == "€ und 4"
    assert text_of(tokens, prompt, decode) == "€ und 4"
    assert "".join(pieces(b"4", (), b"3 \xff", decode)) == "4"  # No part of a character.
    assert text_of(b"4", b"3 \xff", decode) == "4"


@pytest.mark.parametrize(
    ("stops", "want"),
    [
        (["\n\n"], "ein Käse für 3 €, 𝄞 und"),
        (["mehr", "Ende"], "ein Käse für 3 €, 𝄞 und\n\n"),
        (["€, 𝄞 o"], TEXT),
        (["e"], ""),
    ],
)
def test_no_text_from_a_stop_string_on_is_shown(stops, want):
    shown = ""
    tokens = iter(TEXT.encode())
    for piece in pieces(tokens, stops, b"e e"):
        shown += piece
        assert want.startswith(shown)
    assert shown == want == text_of(list(TEXT.encode()), b"e e", decode, stops)
    read = decode(TEXT.encode()[: len(TEXT.encode()) - len(list(tokens))])
    assert want == TEXT or read.endswith(tuple(stops))  # No token is read after the stop string.


@pytest.mark.parametrize("longest", [12, 400])
def test_pieces_of_any_bytes_together_are_the_text(longest):
    draw = random.Random(0)
    some = lambda: draw.choices(b"ab\xc3\xa4\xe2\x82\xac\xff", k=draw.randrange(longest))
    for _ in range(200):
        tokens, prompt = some(), some()
        num = 2 if longest < 100 else 4  # So that long texts do not end at once.
        stops = ["".join(draw.choices("abä€", k=num)) for _ in range(2)]
        shown = "".join(pieces(tokens, stops, prompt))
        assert shown == text_of(tokens, prompt, decode, stops)


def test_pieces_of_tokens_with_leading_spaces_are_the_text():
    def decode(tokens):
        return "".join(" " + "ab"[token] if token < 2 else "c" for token in tokens).lstrip(" ")

    draw = random.Random(1)
    for size in range(0, 300, 7):
        tokens, prompt = draw.choices(range(3), k=300), draw.choices(range(3), k=size)
        shown = "".join(pieces(tokens, (), prompt, decode))
        assert shown == text_of(tokens, prompt, decode)


def test_a_token_takes_no_longer_after_a_long_text():
    sizes = []

    def decode_and_count(tokens):
        sizes.append(len(tokens))
        return decode(tokens)

    prompt, tokens = "für ".encode() * 500, "e für €".encode() * 100
    shown = pieces(tokens, ["ende"], prompt, decode_and_count)
    assert "".join(shown) == "e für €" * 100
    assert sizes[0] == len(prompt)  # Once.
    assert max(sizes[1:]) <= 80


def test_an_incomplete_character_at_the_end_is_replaced():
    assert [piece for piece in pieces("a€".encode()[:-1]) if piece] == ["a", "\ufffd"]
