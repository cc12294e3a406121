"""``ThinkParser``: for models that must think inside ``<think>…</think>`` before they answer."""

from __future__ import annotations

from typing import Any

from verifiers.data.messages import field, message_text
from verifiers.data.text import CLOSE, OPEN
from verifiers.parsers.parser import Parser


class ThinkParser(Parser):
    """Parses what follows the thinking; unclosed thinking leaves no answer.

    A message with ``reasoning_content`` (the server extracted the thinking) counts as a message
    whose block is well formed and closed; its content is the tail.

    >>> parser = ThinkParser()
    >>> parser.parse("<think>2 + 2 is 4</think> four"), parser.parse("<think>2 + 2 is")
    ('four', '')
    >>> parser.parse_answer([{"role": "assistant", "reasoning_content": "2 + 2 is 4", "content": "four"}])
    'four'
    """

    def parse(self, text: str) -> Any:
        """``extract_fn`` of the stripped text after the last ``</think>``, of ``""`` without it."""
        _, closed, tail = text.rpartition(CLOSE)
        return self.extract_fn(tail.strip() if closed else "")

    def text_of(self, message: object) -> str:
        """The content, behind an empty think block if the message has ``reasoning_content``."""
        text = message_text(message)
        return f"{OPEN}{CLOSE}{text}" if field(message, "reasoning_content") else text

    def format_reward(self, completion: Any) -> float:
        """Share of assistant messages that are one think block, from the start, and then something
        else. The template may have opened the block."""
        return self._mean_over_assistant_messages(
            completion, lambda message: float(_is_kept(self.text_of(message)))
        )


def _is_kept(text: str) -> bool:
    thought, _, tail = text.partition(CLOSE)
    if OPEN in tail or CLOSE in tail or not tail.strip():
        return False
    return OPEN not in thought or thought.lstrip().startswith(OPEN)
