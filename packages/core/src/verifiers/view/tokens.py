"""Decode single tokens, to colour a completion by log-probability; saved rollouts contain only
token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.data.token_texts import TokenTexts
from verifiers.errors import ConfigError


def pieces_of(name: str) -> Callable[[Sequence[int]], list[str]]:
    """A function from token ids to the text of each. ``name``: a tokenizer's folder or name;
    "bytes" decodes bytes.

    Reads only local files. Raises: ``ConfigError`` when the tokenizer is not found.
    """
    if name == "bytes":
        from verifiers.testing import ByteTokenizer

        return TokenTexts(ByteTokenizer())
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("--tokenizer needs transformers: pip install transformers") from error
    load: Any = AutoTokenizer.from_pretrained
    try:
        return TokenTexts(load(name, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError) as error:
        reason = f"no such tokenizer on this machine ({error})"
        raise ConfigError(f"--tokenizer {name}: {reason}") from error
