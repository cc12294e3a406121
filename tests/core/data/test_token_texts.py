"""The text of each token: joined it is the text of all."""

from __future__ import annotations

import pytest

from verifiers.data.token_texts import TokenTexts
from verifiers.testing import ByteTokenizer


class Words:
    """A tokenizer that, as SentencePiece does, writes no space before the first word."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids):
        self.decoded += 1
        return " ".join(f"w{token}" for token in ids)


@pytest.mark.parametrize("text", ["plain", "né", "日本", "😀 a", "", "\ufffd?"])
def test_joined_texts_are_the_text(text):
    ids = list(text.encode())
    texts = TokenTexts(ByteTokenizer())(ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids)


def test_half_a_character_is_shown_as_such():
    assert "".join(TokenTexts(ByteTokenizer())([97, 0xE6, 0x97])) == ByteTokenizer().decode(
        [97, 0xE6, 0x97]
    )


def test_spaces_between_words_are_kept_and_an_id_is_decoded_once():
    words = Words()
    texts = TokenTexts(words)
    assert "".join(texts([1, 2, 1])) == " w1 w2 w1"
    decoded = words.decoded
    assert texts([2, 1, 2, 1]) == [" w2", " w1", " w2", " w1"]
    assert words.decoded == decoded
