"""Text while it comes: whole characters, nothing of a stop string, and nothing is lost."""

import random

import pytest

from moelib.inference.text import pieces_of_text, text_of

TEXT = "ein Käse für 3 €, 𝄞 und\n\nEnde\n\nund mehr"


def decode(tokens):
    """Returns the text of tokens that are bytes."""
    return bytes(tokens).decode(errors="replace")


def pieces(tokens, stops=(), prompt=b"Es war "):
    return list(pieces_of_text(iter(tokens), list(prompt), decode, stops))


def test_characters_are_shown_whole_and_each_as_soon_as_it_is():
    shown = pieces(TEXT.encode())
    assert [piece for piece in shown if piece] == list(TEXT)
    assert text_of(TEXT.encode(), b"Es war ", decode) == TEXT


@pytest.mark.parametrize(
    ("stops", "want"),
    [
        (["\n\n"], "ein Käse für 3 €, 𝄞 und"),
        (["mehr", "Ende"], "ein Käse für 3 €, 𝄞 und\n\n"),
        (["€, 𝄞 o"], TEXT),
        (["e"], ""),
    ],
)
def test_nothing_from_a_stop_string_on_is_ever_shown(stops, want):
    taken = []

    def tokens():
        for token in TEXT.encode():
            taken.append(token)
            yield token

    shown = ""
    for piece in pieces_of_text(tokens(), b"e e", decode, stops):
        shown += piece
        assert want.startswith(shown)
    assert shown == want == text_of(list(TEXT.encode()), b"e e", decode, stops)
    if want != TEXT:
        assert decode(taken).endswith(tuple(stops))  # No token is taken after it.


@pytest.mark.parametrize("longest", [12, 400])
def test_pieces_together_are_the_text_whatever_the_bytes(longest):
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
        shown = "".join(pieces_of_text(tokens, prompt, decode))
        assert shown == text_of(tokens, prompt, decode)


def test_a_token_takes_no_longer_after_a_long_text():
    sizes = []

    def decode_and_count(tokens):
        sizes.append(len(tokens))
        return decode(tokens)

    prompt, tokens = "für ".encode() * 500, "e für €".encode() * 100
    shown = list(pieces_of_text(tokens, prompt, decode_and_count, ["ende"]))
    assert "".join(shown) == "e für €" * 100
    assert sizes[0] == len(prompt)  # Once.
    assert max(sizes[1:]) <= 80


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(ValueError, match="--stop is empty; set it to a text"):
        pieces_of_text([1], [2], decode, stops)
    with pytest.raises(ValueError, match="--stop is empty"):
        text_of([1], [2], decode, stops)


def test_half_a_character_at_the_end_is_shown_as_such():
    assert pieces("a€".encode()[:-1]) == ["a", "\ufffd"]
