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


def test_pieces_together_are_the_text_whatever_the_bytes():
    draw = random.Random(0)
    for _ in range(200):
        tokens = draw.choices(b"ab\xc3\xa4\xe2\x82\xac\xff", k=draw.randrange(12))
        stops = ["".join(draw.choices("abä€", k=2)) for _ in range(2)]
        assert "".join(pieces(tokens, stops)) == text_of(tokens, b"Es war ", decode, stops)


def test_half_a_character_at_the_end_is_shown_as_such():
    assert pieces("a€".encode()[:-1]) == ["a", "\ufffd"]
