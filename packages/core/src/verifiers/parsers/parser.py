"""``Parser``: the base of all parsers, and the plainest of them.

A parser only reads text. It never raises for any text of a model, and its run time is linear in the
text. Rubrics judge answers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from verifiers.data.messages import field, message_text
from verifiers.storage.identity import Identified
from verifiers.types import AssistantMessage

T = TypeVar("T")


def identity(text: T) -> T:
    """``text`` itself."""
    return text


def is_plain(parser: object) -> bool:
    """Whether it is a ``Parser`` that returns the text itself."""
    return type(parser) is Parser and parser.extract_fn is identity


class Parser(Identified):
    """Return ``extract_fn`` of the last assistant message; no format is required.

    Args:
        extract_fn: Function from the text of the last assistant message to the answer; default: the
            text itself.

    A completion is a list of messages in any form, or text (completion mode), which counts as one
    assistant message.

    >>> Parser(str.upper).parse_answer([{"role": "assistant", "content": "paris"}])
    'PARIS'
    """

    def __init__(self, extract_fn: Callable[[str], object] = identity):
        self.extract_fn = extract_fn

    @functools.cached_property
    def logger(self) -> logging.Logger:
        """Named after its class."""
        return logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")

    def parse(self, text: str) -> Any:
        """``extract_fn(text)``."""
        return self.extract_fn(text)

    def parse_answer(self, completion: Any) -> Any:
        """``parse`` of the text, or of the last assistant message's; None without a message."""
        if isinstance(completion, str):
            return self.parse(completion)
        messages = self.get_assistant_messages(completion)
        return self.parse(self.text_of(messages[-1])) if messages else None

    def text_of(self, message: object) -> str:
        """The text of a message to parse: the text of its content, ``""`` when it is None."""
        return message_text(message)

    def get_assistant_messages(self, completion: Iterable[object] | str | None) -> list[Any]:
        """The assistant messages of a completion, in order."""
        return _of_role(completion, "assistant")

    def get_system_messages(self, completion: Iterable[object] | str | None) -> list[Any]:
        """The system messages of a completion, in order."""
        return _of_role(completion, "system")

    def get_user_messages(self, completion: Iterable[object] | str | None) -> list[Any]:
        """The user messages of a completion, in order."""
        return _of_role(completion, "user")

    def get_tool_messages(self, completion: Iterable[object] | str | None) -> list[Any]:
        """The tool messages of a completion, in order."""
        return _of_role(completion, "tool")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function ``format_reward_func(completion, **kwargs)``, 0 to 1, of format
        compliance."""

        def format_reward_func(completion: object, **_: object) -> float:
            return self.format_reward(completion)

        return format_reward_func

    def format_reward(self, completion: Any) -> float:
        """1.0: any text will do."""
        return 1.0

    def _mean_over_assistant_messages(
        self, completion: Iterable[object] | str | None, reward: Callable[[object], float]
    ) -> float:
        """The mean of ``reward(message)``; 0.0 without assistant messages."""
        messages = self.get_assistant_messages(completion)
        return sum(reward(message) for message in messages) / len(messages) if messages else 0.0


def _of_role(completion: Iterable[object] | str | None, role: str) -> list[Any]:
    if isinstance(completion, str):
        return [AssistantMessage(completion)] if role == "assistant" else []
    return [message for message in completion or () if field(message, "role") == role]
