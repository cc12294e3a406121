"""What a conversation is worth: per turn the ``difflib`` ratio of the listed lines and the right ones.

Pure functions of texts; they know nothing of messages or environments. Cost is bounded: blocks are found in one pass,
and only the beginning of an answer far longer than the right list is matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vf_alphabet_sort.games import FIRST_TAG, LATER_TAG

try:  # the same numbers about ten times as fast; the extra "speed"
    from cydifflib import SequenceMatcher
except ImportError:
    from difflib import SequenceMatcher

MAX_LENGTH_FACTOR = 4
"""Of a block longer than this many times the right list, only the beginning is matched; its length still counts."""


def find_blocks(text: str, turn: int) -> Iterator[str]:
    """The contents of the turn's tag in ``text``, in order; an opening tag without a closing one holds nothing.

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
    """``difflib``'s sequence ratio of the block's lines and ``target``, character by character; 1.0 when equal.

    ``autojunk=True`` is ``difflib``'s own default, which ignores frequent characters once the target has 200.

    >>> line_ratio(" AnnaBell \\n\\n", "AnnaBell")
    1.0
    """
    answer, target = clean_lines(block), target.lower()
    if answer == target:
        return 1.0
    compared = answer[: MAX_LENGTH_FACTOR * len(target)]
    matched = sum(same.size for same in SequenceMatcher(None, compared, target, autojunk).get_matching_blocks())
    return 2.0 * matched / (len(answer) + len(target))


def turn_similarity(text: str, turn: int, target: str, autojunk: bool = False) -> float:
    """Similarity of one reply: that of its last block, provided each block is better than the one before.

    0.0 without a block, and 0.0 when a block is not strictly better than the one before it: repeating oneself, or
    trying several answers, earns nothing.
    """
    best: float | None = None
    for block in find_blocks(text, turn):
        ratio = line_ratio(block, target, autojunk)
        if best is not None and ratio <= best:
            return 0.0
        best = ratio
    return best or 0.0


def conversation_score(
    replies: Sequence[str], targets: Sequence[str], power: float, power_per_turn: bool, autojunk: bool = False
) -> float:
    """The mean over all turns of the game of similarity ** ``power``; a turn that was never answered counts 0.

    ``power_per_turn=False`` takes the mean first and raises that.
    """
    similarities = [
        turn_similarity(reply, turn, target, autojunk)
        for turn, (reply, target) in enumerate(zip(replies, targets, strict=False))
    ]
    if power_per_turn:
        return sum(s**power for s in similarities) / len(targets)
    return (sum(similarities) / len(targets)) ** power


def exact_share(replies: Sequence[str], targets: Sequence[str]) -> float:
    """The share of the game's turns whose single block holds exactly the right lines."""
    exact = 0
    for turn, (reply, target) in enumerate(zip(replies, targets, strict=False)):
        exact += [clean_lines(block) for block in find_blocks(reply, turn)] == [target.lower()]
    return exact / len(targets)


def format_share(replies: Sequence[str], targets: Sequence[str]) -> float:
    """The share of the game's turns with exactly one block."""
    answered = [sum(1 for _ in find_blocks(reply, turn)) for turn, reply in enumerate(replies[: len(targets)])]
    return answered.count(1) / len(targets)
