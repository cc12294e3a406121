"""The text of each single token, for showing tokens in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_KNOWN = 1_000_000
"""Texts that are kept for the next call; more than any vocabulary has."""
_UNFINISHED = "\ufffd"
_MAX_TOKENS_OF_CHARACTER = 4


class Decoder(Protocol):
    """A tokenizer, of which only this is used."""

    def decode(self, token_ids: list[int], /) -> str: ...


class TokenTexts:
    """The text of each token; joined they are the text of all. Decodes each id of the vocabulary
    once.

    >>> from verifiers.testing import ByteTokenizer
    >>> TokenTexts(ByteTokenizer())(list("né".encode()))
    ['n', '', 'é']
    """

    def __init__(self, tokenizer: Decoder):
        self._tokenizer = tokenizer
        self._text_of: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """A text per token; the last of several tokens that form one character gets it."""
        texts = [self._text(token) for token in ids]
        first = 0
        while first < len(texts):
            if _UNFINISHED not in texts[first]:
                first += 1
                continue
            end = first + 1
            while (text := self._tokenizer.decode(list(ids[first:end]))).endswith(_UNFINISHED) and (
                end < len(ids) and end - first < _MAX_TOKENS_OF_CHARACTER
            ):
                end += 1
            texts[first:end] = [*[""] * (end - first - 1), text]
            first = end
        return texts

    def _text(self, token: int) -> str:
        """The token's text within a text: some tokenizers leave out the space before the first word
        of a text."""
        if (text := self._text_of.get(token)) is None:
            alone = self._tokenizer.decode([token])
            text = self._tokenizer.decode([token, token])[len(alone) :]
            if len(self._text_of) < MAX_KNOWN:
                self._text_of[token] = text
        return text
