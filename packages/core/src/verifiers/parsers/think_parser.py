"""``ThinkParser``: for models that must think inside ``<think>…</think>`` before they answer."""

from __future__ import annotations

from typing import Any

from verifiers.data.messages import field, message_text
from verifiers.parsers.parser import Parser

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """Parses what follows the thinking; unclosed thinking leaves no answer.

    A message with ``reasoning_content`` (the server extracted the thinking) counts as one whose
    block is well formed and closed; its content is the tail.

    >>> parser = ThinkParser()
    >>> parser.parse("<think>2 + 2 is 4</think> four"), parser.parse("<think>2 + 2 is")
    ('four', '')
    >>> parser.parse_answer([{"role": "assistant", "reasoning_content": "2 + 2 is 4", "content": "four"}])
    'four'
    """

    def parse(self, text: str) -> Any:
        """``extract_fn`` of the stripped text after the last ``</think>``; of ``""`` without a
        closing tag."""
        _, closed, tail = text.rpartition(CLOSE)
        return self.extract_fn(tail.strip() if closed else "")

    def text_of(self, message: Any) -> str:
        """The content, behind an empty think block when the message carries
        ``reasoning_content``."""
        text = message_text(message)
        return f"{OPEN}{CLOSE}{text}" if field(message, "reasoning_content") else text

    def format_reward(self, completion: Any) -> float:
        """Share of assistant messages that are one think block, from the start, and then something
        else."""
        return self._mean_over_assistant_messages(
            completion, lambda message: float(_is_kept(self.text_of(message)))
        )


def _is_kept(text: str) -> bool:
    text = text.lstrip()
    if not text.startswith(OPEN) or text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return False
    return bool(text.partition(CLOSE)[2].strip())
