"""``MaybeThinkParser``: for models that may think in tags first, or not."""

from __future__ import annotations

from typing import Any

from verifiers.data.text import CLOSE
from verifiers.parsers.parser import Parser
from verifiers.parsers.think_parser import ThinkParser


class MaybeThinkParser(ThinkParser):
    """As ``ThinkParser``, but text without a closing tag is parsed whole, and no format is
    required.

    >>> MaybeThinkParser().parse("four"), MaybeThinkParser().parse("<think>2 + 2</think>four")
    ('four', 'four')
    """

    def parse(self, text: str) -> Any:
        """``extract_fn`` of the stripped text after the last ``</think>``; of the whole stripped
        text without the tag."""
        _, closed, tail = text.rpartition(CLOSE)
        return self.extract_fn((tail if closed else text).strip())

    def format_reward(self, completion: Any) -> float:
        """1.0: thinking is optional."""
        return Parser.format_reward(self, completion)
