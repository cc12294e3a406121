"""Names of older ``verifiers.types`` that annotate code and hold nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from verifiers.types import Message

MessageType: TypeAlias = Literal["chat", "completion"]
ChatMessages: TypeAlias = list[Message]
ClientType: TypeAlias = Literal[
    "openai_completions", "openai_chat_completions", "openai_responses", "anthropic_messages"
]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"] | None
MessageContent: TypeAlias = str | list[dict[str, Any]]
ContentPart: TypeAlias = dict[str, Any]
GenericContentPart: TypeAlias = dict[str, Any]
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
