"""Datasets of seeds: rows for environments that start a new episode for every rollout.

Promise: rows differ, so that each has its own content hash; siblings get the same episode; training
and evaluation rows never share a seed. The seed of a row is ``seed + example_id``, stored in
``info["seed"]`` as well because a group of environments renumbers its rows.

This module creates no episode; the environment does, from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verifiers.data.messages import message_text
from verifiers.errors import ConfigError
from verifiers.types import Content, Message, Messages, TextContentPart, UserMessage

Rows = Callable[[], list[dict[str, Any]]]


def episode_rows(num_train: int, num_eval: int, seed: int) -> tuple[Rows | None, Rows | None]:
    """Return builders of the training and evaluation rows; None for an empty set.

    *Raises* ConfigError for a negative number, or when both are 0.

    >>> train, evaluation = episode_rows(2, 1, seed=5)
    >>> evaluation()
    [{'example_id': 2, 'question': '', 'info': {'seed': 7}}]
    """
    for number in (num_train, num_eval):
        if not isinstance(number, int) or number < 0:
            raise ConfigError(f"the number of episodes is {number!r}; it must be 0 or more")
    if not num_train and not num_eval:
        raise ConfigError(
            "no training and no evaluation episodes are requested; request at least one"
        )

    def rows(first: int, number: int) -> Rows | None:
        ids = range(first, first + number)
        return (
            (lambda: [{"example_id": i, "question": "", "info": {"seed": seed + i}} for i in ids])
            if ids
            else None
        )

    return rows(0, num_train), rows(num_train, num_eval)


def add_rows(parameters: Any, num_train: int, num_eval: int, seed: int) -> None:
    """Set ``dataset`` and ``eval_dataset`` of an environment without either. *Raises* ConfigError
    as ``episode_rows``."""
    if parameters.get("dataset") is None and parameters.get("eval_dataset") is None:
        train, evaluation = episode_rows(num_train, num_eval, seed)
        parameters["dataset"], parameters["eval_dataset"] = train, evaluation


def seed_of(row: Mapping[str, Any], seed: int) -> int:
    """Return the seed of a row or a state: its ``info["seed"]``, else ``seed + example_id``."""
    stored = row["info"].get("seed")
    return stored if isinstance(stored, int) else seed + row["example_id"]


def opened(prompt: Messages, observation: Content) -> Messages:
    """Append the first observation to a prompt: to its last message if that is a user message, else
    as a new message."""
    if isinstance(prompt, str):
        return prompt + message_text({"content": observation})
    last = prompt[-1] if prompt else None
    if last is None or last["role"] != "user":
        return [*prompt, UserMessage(observation)]
    return [*prompt[:-1], Message({**last, "content": _joined(last["content"], observation)})]


def _joined(before: Content | None, observation: Content) -> object:
    if not before or not observation:
        return before or observation
    if isinstance(before, str) and isinstance(observation, str):
        return f"{before}\n\n{observation}"
    return [*_parts(before), *_parts(observation)]


def _parts(content: Content) -> list[object]:
    return [TextContentPart(content)] if isinstance(content, str) else list(content)
