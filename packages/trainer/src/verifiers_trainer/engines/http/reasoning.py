"""Split the reasoning of a completion from its content; never raises, linear in the text."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """(reasoning, the rest) of a completion that begins with a ``<think>`` block.

    ``opened``: the prompt already ends with ``<think>``, as in some templates. A closing tag
    without an opening tag counts as a block too. A truncated block is all reasoning; text without a
    block has none.

    >>> split_reasoning("<think>two and two</think>It is 4.")
    ('two and two', 'It is 4.')
    >>> split_reasoning("two and", opened=True)
    ('two and', '')
    """
    stripped = text.lstrip()
    begun = stripped.startswith(OPEN)
    inner = stripped[len(OPEN) :] if begun else text
    thought, closed, answer = inner.partition(CLOSE)
    if closed:
        return thought.strip(), answer.lstrip()
    return (thought.strip(), "") if begun or opened else ("", text)
