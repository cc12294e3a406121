"""Prices of models at the endpoints of their own vendors, as of ``AS_OF``."""

from __future__ import annotations

import re

AS_OF = "2025-12"
PRICES: dict[str, tuple[float, float]] = {
    "gpt-4o": (2.5, 10.0),
    "gpt-4o-mini": (0.15, 0.6),
    "gpt-4.1": (2.0, 8.0),
    "gpt-4.1-mini": (0.4, 1.6),
    "gpt-4.1-nano": (0.1, 0.4),
    "gpt-5": (1.25, 10.0),
    "gpt-5-mini": (0.25, 2.0),
    "gpt-5-nano": (0.05, 0.4),
    "gpt-5.2": (1.75, 14.0),
    "claude-haiku-4-5": (1.0, 5.0),
    "claude-sonnet-4-5": (3.0, 15.0),
    "claude-opus-4-5": (5.0, 25.0),
}
"""Model -> US dollars per million tokens, read and sampled: the vendors' list prices for prompts of
usual length, without the rebate for cached tokens."""
_DATED = re.compile(r"-(\d{8}|\d{4}-\d\d-\d\d|latest)$")


def list_price(model: str) -> tuple[float, float] | None:
    """The price of a model by its name, with or without a date.

    >>> list_price("gpt-4.1-mini-2025-04-14"), list_price("my-model")
    ((0.4, 1.6), None)
    """
    return PRICES.get(_DATED.sub("", model))
