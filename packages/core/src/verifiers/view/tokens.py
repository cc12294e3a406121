"""The text of single tokens, for colouring a completion by log-probability. Rows hold ids; a tokenizer names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.errors import ConfigError

_MAX_TOKENS_OF_CHARACTER = 4


def pieces_of(name: str) -> Callable[[Sequence[int]], list[str]]:
    """Token ids -> the text of each, by a tokenizer's folder or name; "bytes" is the scripted clients' own.

    Only files on this machine are read. Raises: ``ConfigError`` when there is no such tokenizer here.
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
    """The text of each token; of several that make one character, the last has it."""
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
