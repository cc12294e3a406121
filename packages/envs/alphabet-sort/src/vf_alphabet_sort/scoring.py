"""Score of a conversation: per turn the ``difflib`` ratio of the reply's lines and the right lines.

Pure functions of texts. Cost is bounded: blocks are found in one pass, and of an answer far longer
than the right list only the beginning is matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vf_alphabet_sort.games import FIRST_TAG, LATER_TAG

try:  # equal results with autojunk, about ten times as fast; the extra "speed"
    from cydifflib import SequenceMatcher
except ImportError:
    from difflib import SequenceMatcher

JUNK_LENGTH = 200
"""Minimum length of a target for ``difflib``'s heuristic to take effect."""
MAX_LENGTH_FACTOR = 4
"""Of a block longer than this multiple of the right list only the beginning is matched; its full
length counts."""


def find_blocks(text: str, turn: int) -> Iterator[str]:
    """The contents of the turn's tag in ``text``, in order; an unclosed tag is ignored.

    >>> list(find_blocks("<alphabetical_sorted>A</alphabetical_sorted> and <alphabetical_sorted>B", turn=0))
    ['A']
    """
    tag = LATER_TAG if turn else FIRST_TAG
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = 0
    while (start := text.find(opening, end)) >= 0 and (end := text.find(closing, start)) >= 0:
        yield text[start + len(opening) : end]


def clean_lines(block: str) -> str:
    """The block's non-empty lines, each stripped and lower-cased, joined by newlines."""
    return "\n".join(line for line in map(str.strip, block.lower().split("\n")) if line)


def line_ratio(block: str, target: str, autojunk: bool = False) -> float:
    """``difflib``'s sequence ratio of the block's lines and ``target``, character by character; 1.0
    when equal.

    ``autojunk=True`` is ``difflib``'s own default, which ignores frequent characters once the
    target has 200.

    >>> line_ratio(" AnnaBell \\n\\n", "AnnaBell")
    1.0
    """
    answer, target = clean_lines(block), target.lower()
    if answer == target:
        return 1.0
    compared = answer[: MAX_LENGTH_FACTOR * len(target)]
    if autojunk and len(target) >= JUNK_LENGTH:
        matched = sum(
            same.size for same in SequenceMatcher(None, compared, target).get_matching_blocks()
        )
    else:
        matched = num_matched(compared, target)
    return 2.0 * matched / (len(answer) + len(target))


def num_matched(answer: str, target: str) -> int:
    """Characters in the matching blocks that ``difflib`` finds without its heuristic, in a fraction
    of its time.

    Takes the longest common block (ties: first in ``answer``, then in ``target``) and recurses left
    and right of it. ``str.find`` searches only for blocks longer than the longest so far.

    >>> num_matched("ab//cd", "cdab")
    2
    """
    matched, regions = 0, [(0, len(answer), 0, len(target))]
    while regions:
        begin, end, low, high = regions.pop()
        size = i = j = 0
        start = begin
        while start + size < end:
            at = target.find(answer[start : start + size + 1], low, high)
            if at < 0:
                start += 1
                continue
            size, i, j = size + 1, start, at
            while i + size < end and j + size < high and answer[i + size] == target[j + size]:
                size += 1
        if size:
            matched += size
            regions += [(begin, i, low, j), (i + size, end, j + size, high)]
    return matched


def turn_similarity(text: str, turn: int, target: str, autojunk: bool = False) -> float:
    """Similarity of a reply: that of its last block, provided each block is better than the one
    before.

    0.0 without a block, and 0.0 when a block is not strictly better than the one before it, so that
    repeated or multiple answers are not rewarded.
    """
    best: float | None = None
    for block in find_blocks(text, turn):
        ratio = line_ratio(block, target, autojunk)
        if best is not None and ratio <= best:
            return 0.0
        best = ratio
    return best or 0.0


def conversation_score(
    replies: Sequence[str],
    targets: Sequence[str],
    power: float,
    power_per_turn: bool,
    autojunk: bool = False,
) -> float:
    """The mean over all turns of the game of similarity ** ``power``; a turn without a reply counts
    0.

    ``power_per_turn=False`` applies the power to the mean.
    """
    similarities = [
        turn_similarity(reply, turn, target, autojunk)
        for turn, (reply, target) in enumerate(zip(replies, targets, strict=False))
    ]
    if power_per_turn:
        return sum(s**power for s in similarities) / len(targets)
    return (sum(similarities) / len(targets)) ** power


def exact_share(replies: Sequence[str], targets: Sequence[str]) -> float:
    """The share of the game's turns whose only block contains exactly the right lines."""
    exact = 0
    for turn, (reply, target) in enumerate(zip(replies, targets, strict=False)):
        exact += [clean_lines(block) for block in find_blocks(reply, turn)] == [target.lower()]
    return exact / len(targets)


def format_share(replies: Sequence[str], targets: Sequence[str]) -> float:
    """The share of the game's turns with exactly one block."""
    answered = [
        sum(1 for _ in find_blocks(reply, turn))
        for turn, reply in enumerate(replies[: len(targets)])
    ]
    return answered.count(1) / len(targets)
