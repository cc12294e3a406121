"""Print text of models, datasets and other programs on a terminal without giving them
the terminal."""

from __future__ import annotations

import re

# what can move the cursor, restyle the terminal, reorder or hide text: C0 but \n and \t, C1, bidi,
# tags, surrogates
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f\ud800-\udfff]"
)


def escape_control(text: str) -> str:
    """Escape the characters of ``text`` that could move, restyle, reorder or hide terminal output.

    Newlines and tabs stay. Lone surrogates, which cannot be printed, are escaped too.

    >>> escape_control("\\x1b[2Jok")
    '\\\\x1b[2Jok'
    """
    return text if text.isascii() and text.isprintable() else _CONTROL.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
