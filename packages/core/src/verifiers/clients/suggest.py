"""The end of a sentence about an unknown name: what the caller may have meant. Formats text, decides nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(given: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for a near match, else the list of what exists.

    >>> suggestion("ulr", ["url", "model"])
    "; did you mean 'url'?"
    >>> suggestion("zzz", ["url", "model"])
    '; known: model, url'
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
