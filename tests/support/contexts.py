"""What teachers read in trainings of the tests, by import path."""

from __future__ import annotations

from typing import Any


def nothing(row: Any) -> None:
    """No context."""


def more(group: Any, rollout: Any) -> str:
    """A context of another length for each sibling."""
    return "9" * (1 + [other is rollout for other in group.rollouts].index(True))


def demonstration(row: Any) -> list[dict[str, str]]:
    """A turn before the prompt."""
    return [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "123"}]
