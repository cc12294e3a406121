"""Suggest the known name closest to a misspelled name, and check for unknown keywords.

Names are compared without case, and with ``-`` equal to ``_``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from verifiers.errors import ConfigError

ALMOST = 0.8
"""Similarity ratio (0 to 1) from which an unknown keyword counts as a misspelling and
is rejected."""
SIMILAR = 0.6
"""Similarity ratio (0 to 1) from which a known name is suggested."""
LISTED = 60
"""How many known names an error lists at most."""


def close_match(name: str, candidates: Iterable[str], ratio: float = ALMOST) -> str | None:
    """The candidate most similar to ``name``, or None when none reaches ``ratio`` (0 to 1; 1 =
    equal).

    >>> close_match("max_turn", ["max_turns", "rubric"]), close_match("difficulty", ["max_turns", "rubric"])
    ('max_turns', None)
    """
    matches = close_matches(name, candidates, 1, ratio)
    return matches[0] if matches else None


def close_matches(
    name: str, candidates: Iterable[str], count: int = 3, ratio: float = SIMILAR
) -> list[str]:
    """Up to ``count`` candidates that reach ``ratio``, the closest first."""
    spelled: dict[str, str] = {}
    for candidate in candidates:
        spelled.setdefault(_folded(candidate), candidate)
    return [
        spelled[match] for match in difflib.get_close_matches(_folded(name), spelled, count, ratio)
    ]


def closest(name: str, candidates: Iterable[str]) -> str:
    """Suffix of an error message: ``, did you mean "X"?``; empty when no name is similar.

    >>> print("no column 'answr'" + closest("answr", ["question", "answer"]))
    no column 'answr', did you mean "answer"?
    """
    match = close_match(name, candidates, SIMILAR)
    return f', did you mean "{match}"?' if match else ""


def check_keywords(names: Iterable[str], allowed: Collection[str], where: str) -> None:
    """Check keywords passed to ``where``. *Raises* one ConfigError naming all unknown keywords.

    >>> check_keywords(["max_turn"], ["max_turns", "rubric"], "MultiTurnEnv")
    Traceback (most recent call last):
        ...
    verifiers.errors.ConfigError: MultiTurnEnv does not know 'max_turn' (did you mean 'max_turns'?)
    """
    unknown = [name for name in names if name not in allowed]
    if not unknown:
        return
    suggestions = [close_match(name, allowed, SIMILAR) for name in unknown]
    listed = ", ".join(
        f"{name!r} (did you mean {match!r}?)" if match else repr(name)
        for name, match in zip(unknown, suggestions, strict=True)
    )
    if all(suggestions):
        allowed_names = ""
    elif len(allowed) > LISTED:
        allowed_names = f"; help({where}) lists the {len(allowed)} names that it knows"
    else:
        allowed_names = f"; it knows: {', '.join(sorted(allowed)) or 'no keywords'}"
    raise ConfigError(
        f"{where} does not know {listed}{allowed_names}",
        names=unknown,
        key=unknown[0],
        suggestions=[match for match in suggestions if match],
    )


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")
