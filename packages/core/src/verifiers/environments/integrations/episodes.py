"""Datasets of seeds: rows for environments that deal a fresh episode to every rollout.

Promise: rows differ, so that each has an identity on disk; siblings of one row play the same episode; training and
evaluation rows never share a seed. The seed of a row is ``seed + example_id``; it is written into ``info["seed"]`` too,
because a group of environments numbers its rows anew.

This module makes no episode: what a seed means is the environment's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verifiers.data.messages import message_text
from verifiers.errors import ConfigError
from verifiers.types import Content, Message, Messages, TextContentPart, UserMessage

Rows = Callable[[], list[dict[str, Any]]]


def episode_rows(num_train: int, num_eval: int, seed: int) -> tuple[Rows | None, Rows | None]:
    """Builders of the training and evaluation rows; None for an empty set.

    *Raises* ConfigError for numbers that are no numbers of rows.

    >>> train, evaluation = episode_rows(2, 1, seed=5)
    >>> evaluation()
    [{'example_id': 2, 'question': '', 'info': {'seed': 7}}]
    """
    for number in (num_train, num_eval):
        if not isinstance(number, int) or number < 0:
            raise ConfigError(f"the number of episodes is {number!r}; it must be 0 or more")
    if not num_train and not num_eval:
        raise ConfigError("no training and no evaluation episodes are asked for; ask for at least one")

    def rows(first: int, number: int) -> Rows | None:
        ids = range(first, first + number)
        return (lambda: [{"example_id": i, "question": "", "info": {"seed": seed + i}} for i in ids]) if ids else None

    return rows(0, num_train), rows(num_train, num_eval)


def seed_of(row: Mapping[str, Any], seed: int) -> int:
    """The seed of a row or a state: its ``info["seed"]``, else ``seed + example_id``."""
    given = row["info"].get("seed")
    return given if isinstance(given, int) else seed + row["example_id"]


def opened(prompt: Messages, observation: Content) -> Messages:
    """The prompt with the first observation at its end: in its last message when that is the user's, else as one."""
    if isinstance(prompt, str):
        return prompt + message_text({"content": observation})
    last = prompt[-1] if prompt else None
    if last is None or last["role"] != "user":
        return [*prompt, UserMessage(observation)]
    return [*prompt[:-1], Message({**last, "content": _joined(last["content"], observation)})]


def _joined(before: object, observation: object) -> Any:
    if not before or not observation:
        return before or observation
    if isinstance(before, str) and isinstance(observation, str):
        return f"{before}\n\n{observation}"
    return [*_parts(before), *_parts(observation)]


def _parts(content: Any) -> list[Any]:
    return [TextContentPart(content)] if isinstance(content, str) else list(content)
