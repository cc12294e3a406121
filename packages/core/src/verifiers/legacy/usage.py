"""Older ``verifiers.utils.usage_utils``: the token counts of responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from verifiers.data.messages import field

NAMES = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
"""Names of the two counts, the later where the earlier is absent."""


def extract_usage_tokens(response: object) -> tuple[int, int]:
    """(prompt tokens, completion tokens) of an object or mapping with ``usage``; 0 for what is no
    count.

    >>> extract_usage_tokens({"usage": {"input_tokens": "12", "output_tokens": float("nan")}})
    (12, 0)
    """
    usage = field(response, "usage")
    counts = [
        next((field(usage, name) for name in names if _has(usage, name)), None) for names in NAMES
    ]
    return _count(counts[0]), _count(counts[1])


class StateUsageTracker:
    """Sums of input and output tokens; ``usage`` is a live, read-only mapping of both.

    Made of the ``usage`` of a state, it counts there.
    """

    def __init__(self, counts: dict[str, Any] | None = None) -> None:
        self._sums: dict[str, Any] = {} if counts is None else counts
        self._is_seen = bool(counts)
        for name in ("input_tokens", "output_tokens"):
            self._sums.setdefault(name, 0.0)
        self.usage: Mapping[str, float] = MappingProxyType(self._sums)

    def increment(
        self, input_tokens: int = 0, output_tokens: int = 0, *, mark_seen: bool = True
    ) -> None:
        """Add counts. *Raises* ValueError for a negative count."""
        if input_tokens < 0 or output_tokens < 0:
            raise ValueError(
                f"token counts must be 0 or more, not {input_tokens} and {output_tokens}"
            )
        self._sums["input_tokens"] += input_tokens
        self._sums["output_tokens"] += output_tokens
        self._is_seen = self._is_seen or mark_seen

    def increment_from_response(self, response: object) -> None:
        """Add the counts of a response; a response without ``usage`` changes nothing."""
        if field(response, "usage") is not None:
            self.increment(*extract_usage_tokens(response))

    def snapshot(self) -> dict[str, float] | None:
        """The sums; None until something was counted."""
        return dict(self._sums) if self._is_seen else None


def compute_context_token_metrics(trajectory: Sequence[Mapping[str, object]]) -> dict[str, int]:
    """``final_output_tokens``: sampled over all turns; ``final_input_tokens``: the rest of the last
    conversation."""
    counts = [extract_usage_tokens(step.get("response")) for step in trajectory]
    counts = [count for count in counts if any(count)]
    sampled = sum(completion for _, completion in counts)
    return {
        "final_output_tokens": sampled,
        "final_input_tokens": max(0, sum(counts[-1]) - sampled) if counts else 0,
    }


def _has(usage: object, name: str) -> bool:
    return name in usage if isinstance(usage, Mapping) else hasattr(usage, name)


def _count(value: object) -> int:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever a server sent
    except (TypeError, ValueError):
        return 0
    return max(0, int(number)) if math.isfinite(number) else 0
