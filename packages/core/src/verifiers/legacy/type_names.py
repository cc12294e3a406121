"""Names of older ``verifiers.types`` that annotate code or hold a few fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from verifiers.types import AttributeDict, Message

MessageType: TypeAlias = Literal["chat", "completion"]
ChatMessages: TypeAlias = list[Message]
ClientType: TypeAlias = Literal[
    "openai_completions", "openai_chat_completions", "openai_responses", "anthropic_messages"
]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"] | None
MessageContent: TypeAlias = str | list[dict[str, Any]]
ContentPart: TypeAlias = dict[str, Any]
ThinkingBlock: TypeAlias = dict[str, Any]
JsonPrimitive: TypeAlias = str | int | float | bool | None
IndividualRewardFunc: TypeAlias = Callable[..., Any]
GroupRewardFunc: TypeAlias = Callable[..., Any]
StartCallback: TypeAlias = Callable[..., None]
ProgressCallback: TypeAlias = Callable[..., None]
LogCallback: TypeAlias = Callable[[str], None]
TokenUsage: TypeAlias = dict[str, float]
Endpoint: TypeAlias = Mapping[str, Any]
Endpoints: TypeAlias = Mapping[str, Any]
VersionInfo: TypeAlias = dict[str, str | None]
"""``vf_version vf_commit env_version env_commit``."""


class CustomBaseModel(BaseModel):
    """A model of pydantic whose fields also read and write by key.

    >>> class Point(CustomBaseModel):
    ...     x: int
    >>> Point(x=1)["x"], "x" in Point(x=1)
    (1, True)
    """

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def get(self, key: str, default: object = None) -> Any:
        """The field, or ``default`` where there is none."""
        return self[key] if key in self else default


class TimeSpan(CustomBaseModel):
    """A span between two times in seconds."""

    start: float = 0.0
    end: float = 0.0

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return max(0.0, self.end - self.start)


class TimeSpans(CustomBaseModel):
    """Several spans."""

    spans: list[TimeSpan] = []

    @property
    def duration(self) -> float:
        """Seconds of all spans together."""
        return sum(span.duration for span in self.spans)


class GenericContentPart(AttributeDict):
    """A content part of any type: ``GenericContentPart(type=…, …)``."""

    def model_dump(self, **_: object) -> dict[str, object]:
        """The part as plain data."""
        return dict(self)
