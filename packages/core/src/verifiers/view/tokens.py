"""Decode single tokens, to colour a completion by log-probability; saved rollouts contain only token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.errors import ConfigError

_MAX_TOKENS_OF_CHARACTER = 4


def pieces_of(name: str) -> Callable[[Sequence[int]], list[str]]:
    """A function from token ids to the text of each. ``name``: a tokenizer's folder or name; "bytes" decodes bytes.

    Reads only local files. Raises: ``ConfigError`` when the tokenizer is not found.
    """
    tokenizer: Any
    if name == "bytes":
        from verifiers.testing import ByteTokenizer

        tokenizer = ByteTokenizer()
    else:
        tokenizer = _load(name)

    def pieces(ids: Sequence[int]) -> list[str]:
        return _whole_characters(tokenizer, ids)

    return pieces


def _whole_characters(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; the last of several tokens that form one character gets the character."""
    texts: list[str] = []
    first = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[first:end]))
        if "\ufffd" in text and end - first < _MAX_TOKENS_OF_CHARACTER and end < len(ids):
            texts.append("")
        else:
            texts.append(text)
            first = end
    return texts


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("--tokenizer needs transformers: pip install transformers") from error
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {name}: no such tokenizer on this machine ({error})") from error
