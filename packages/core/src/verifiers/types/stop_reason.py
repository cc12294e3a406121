"""Why a rollout ended."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why a rollout ended: the library's conditions. An author's condition has the name of its
    method.

    >>> StopReason("max_turns_reached") is StopReason.MAX_TURNS, StopReason.truncates("timeout_reached")
    (True, True)
    """

    ERROR = "has_error"
    FINAL_RESPONSE = "has_final_env_response"
    MAX_TURNS = "max_turns_reached"
    MAX_SEQ_LEN = "max_seq_len_reached"
    MAX_COMPLETION_TOKENS = "max_total_completion_tokens_reached"
    PROMPT_TOO_LONG = "prompt_too_long"
    TIMEOUT = "timeout_reached"

    @classmethod
    def truncates(cls, reason: str | None) -> bool:
        """Whether a rollout that ended for this reason was truncated by a limit of
        tokens or time."""
        return reason in _TRUNCATING


_TRUNCATING = (
    StopReason.MAX_SEQ_LEN,
    StopReason.MAX_COMPLETION_TOKENS,
    StopReason.PROMPT_TOO_LONG,
    StopReason.TIMEOUT,
)
