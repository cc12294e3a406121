"""Data types: messages, model requests and responses, and why a rollout ended.

Messages are plain ``dict``s that also answer attributes, so code that writes ``m["content"]`` and
code that writes ``m.content`` both work, equality and JSON are those of ``dict``, and
``"tool_calls" in m`` is True only when the message has tool calls. Sampled token ids and
log-probabilities are numpy arrays exactly as the server sent them.

``clients`` parses provider payloads. This package imports no other part of ``verifiers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from verifiers.types.fields import Immutable
from verifiers.types.messages import (
    AssistantMessage,
    AttributeDict,
    Content,
    ImageUrlContentPart,
    InputAudioContentPart,
    Message,
    Messages,
    SystemMessage,
    TextContentPart,
    TextMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from verifiers.types.requests import (
    Attempt,
    Choice,
    ModelRequest,
    Response,
    ResponseMessage,
    ResponseTokens,
    Usage,
    float_array,
)
from verifiers.types.stop_reason import StopReason

__all__ = [
    "AssistantMessage",
    "Attempt",
    "AttributeDict",
    "Choice",
    "Content",
    "DatasetBuilder",
    "ImageUrlContentPart",
    "Immutable",
    "Info",
    "InputAudioContentPart",
    "Message",
    "Messages",
    "ModelRequest",
    "Response",
    "ResponseMessage",
    "ResponseTokens",
    "RewardFunc",
    "SamplingArgs",
    "StopReason",
    "SystemMessage",
    "TextContentPart",
    "TextMessage",
    "Tool",
    "ToolCall",
    "ToolMessage",
    "Usage",
    "UserMessage",
    "float_array",
]

SamplingArgs: TypeAlias = dict[str, Any]
Info: TypeAlias = dict[str, Any]
RewardFunc: TypeAlias = Callable[..., Any]
DatasetBuilder: TypeAlias = Callable[[], Any]
