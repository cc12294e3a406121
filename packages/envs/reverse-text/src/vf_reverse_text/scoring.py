"""Similarity of a parsed answer and the reversed text: ``difflib``'s sequence ratio, with bounded
cost.

Pure functions of two strings; the parser extracts the answer from a completion.
"""

from __future__ import annotations

try:  # equal results about ten times as fast; the extra "speed"
    from cydifflib import SequenceMatcher
except ImportError:
    from difflib import SequenceMatcher

MAX_LENGTH_FACTOR = 4
"""Of an answer longer than this multiple of the target only the beginning is matched; its full
length still counts."""


def sequence_ratio(answer: str, target: str, autojunk: bool = False) -> float:
    """``2 * M / (len(answer) + len(target))``, M the characters in matching blocks: 1.0 equal, 0.0
    nothing in common.

    ``autojunk=True`` is ``difflib``'s own default, which ignores frequent characters once the
    target has 200: then one wrong character can cost almost the whole ratio. Source: Ratcliff and
    Metzener, Pattern Matching: The Gestalt Approach, as implemented by
    ``difflib.SequenceMatcher.ratio``.

    >>> sequence_ratio("olleh", "olleh"), sequence_ratio("oleh", "olleh"), sequence_ratio("", "olleh")
    (1.0, 0.8888888888888888, 0.0)
    """
    if answer == target:
        return 1.0
    compared = answer[: MAX_LENGTH_FACTOR * len(target)]
    matched = sum(
        block.size
        for block in SequenceMatcher(None, compared, target, autojunk).get_matching_blocks()
    )
    return 2.0 * matched / (len(answer) + len(target))
