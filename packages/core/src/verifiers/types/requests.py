"""A model call: the request and the response."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from verifiers.types.fields import Fields, Immutable
from verifiers.types.messages import AssistantMessage, Content, Message, Messages, _restore


class ModelRequest(Immutable, frozen=True):
    """A model call. ``prompt`` is a list of messages, or text when ``message_type`` is
    "completion".

    >>> request = vf.ModelRequest([vf.UserMessage("hi")], "m", sampling_args={"temperature": 0.0})
    >>> request.message_type, request.tools
    ('chat', None)
    """

    prompt: Messages
    """Messages, or text in completion mode."""
    model: str
    """Name of the model."""
    message_type: str = "chat"
    """"chat" or "completion"."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that the model may call."""
    sampling_args: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Sampling parameters of the request, such as ``temperature``."""
    seed: int | None = None
    """Seed of the sampling, if the server takes it."""
    timeout_s: float | None = None
    """Time limit of the call with its retries, in seconds; None = the client's."""
    require_tokens: bool = False
    """Request token ids and log-probabilities, and reject a response without them."""
    rollout_id: str | None = None
    """Identifies the conversation, so that a server can route its turns to one replica (header
    X-Session-ID)."""
    headers: Mapping[str, str] | None = None
    """Further HTTP headers."""
    sample: str | None = None
    """Which of several samples of an equal prompt this is (sibling and turn); None keeps the reply
    out of a cache."""
    role: str | None = None
    """The role that asks, in an environment of several; a client may have a model for each."""
    state: Mapping[str, Any] | None = None
    """The state of the rollout, for a client that reads it; None outside of a rollout, and in
    another process."""

    def __reduce__(self) -> tuple[object, ...]:
        return ModelRequest, self._without_state()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelRequest) and self._without_state() == other._without_state()

    def __repr__(self) -> str:
        pairs = zip(self.__struct_fields__, self._without_state(), strict=False)
        return f"ModelRequest({', '.join(f'{name}={value!r}' for name, value in pairs)})"

    def _without_state(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "state")


class Usage(Fields, Immutable, frozen=True):
    """Token counts of a call, from the server; ``total_tokens`` is their sum.

    >>> vf.Usage(prompt_tokens=12, completion_tokens=3).total_tokens
    15
    """

    prompt_tokens: int = 0
    """All tokens of the prompt, with those that a cache held."""
    completion_tokens: int = 0
    """All tokens of the completion, with those of hidden reasoning."""
    cached_tokens: int = 0
    """Prompt tokens read from the server's cache."""
    cache_write_tokens: int = 0
    """Prompt tokens written to the server's cache."""
    reasoning_tokens: int = 0
    """Completion tokens of reasoning, where the server tells them apart."""
    total_tokens: int = -1
    """Sum of prompt and completion; computed unless given."""

    def __post_init__(self) -> None:
        if self.total_tokens < 0:
            force_setattr(self, "total_tokens", self.prompt_tokens + self.completion_tokens)


@dataclass(frozen=True, slots=True, init=False)
class ResponseTokens(Fields):
    """The tokens of a call exactly as the server processed and sampled them.

    Args:
        prompt_mask: Accepted if it is 0 for each token of the prompt.
        completion_mask: Accepted if it is 1 for each token of the completion.

    >>> tokens = vf.ResponseTokens(np.array([1, 15, 9]), np.array([7, 2]), np.array([-0.1, -0.7]), version=4)
    >>> len(tokens.prompt_ids), len(tokens.completion_ids) == len(tokens.completion_logprobs)
    (3, True)
    """

    prompt_ids: np.ndarray
    """Token ids of the prompt, int32 [P]."""
    completion_ids: np.ndarray
    """Token ids of the completion, int32 [C]."""
    completion_logprobs: np.ndarray
    """Log-probabilities [C], float64 or float32, of the processed distribution that was sampled."""
    version: int | np.ndarray = -1
    """Policy version: one for the completion, or int [C] when weights changed while it was
    generated; -1 = unknown."""
    routed_experts: object = None
    """Kept as given; nothing here reads it."""

    def __init__(
        self,
        prompt_ids: np.ndarray | Sequence[int],
        completion_ids: np.ndarray | Sequence[int],
        completion_logprobs: np.ndarray | Sequence[float],
        version: int | np.ndarray = -1,
        routed_experts: object = None,
        *,
        prompt_mask: Sequence[int] | None = None,
        completion_mask: Sequence[int] | None = None,
    ):
        """Lists become arrays. *Raises* ValueError for masks other than those that
        the ids imply."""
        assign = object.__setattr__
        assign(self, "prompt_ids", np.asarray(prompt_ids, np.int32))
        assign(self, "completion_ids", np.asarray(completion_ids, np.int32))
        assign(self, "completion_logprobs", float_array(completion_logprobs))
        assign(self, "version", version)
        assign(self, "routed_experts", routed_experts)
        for name, mask in (("prompt_mask", prompt_mask), ("completion_mask", completion_mask)):
            if mask is not None and list(mask) != getattr(self, name):
                raise ValueError(
                    f"{name} of a response is {getattr(self, name)[:1]} for each of its tokens"
                )

    @property
    def prompt_mask(self) -> list[int]:
        """0 for every token of the prompt."""
        return [0] * len(self.prompt_ids)

    @property
    def completion_mask(self) -> list[int]:
        """1 for every token of the completion."""
        return [1] * len(self.completion_ids)

    def keys(self) -> Sequence[str]:
        """Names of the fields, with the two masks."""
        return (
            "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs version"
            " routed_experts".split()
        )


def float_array(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """An array of floats as it is, float32 or float64; other numbers as float64."""
    array = np.asarray(values)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A HTTP attempt that did not succeed."""

    status: int | None
    reason: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The only choice of a response, as in the OpenAI API."""

    message: Message
    finish_reason: str

    @property
    def text(self) -> Any:
        """The text of a completion that is no message."""
        return self.message.content


class ResponseMessage(AssistantMessage):
    """The message of a ``Response`` as clients of version 0.1.12 and later build it, with what the
    response says of it.

    >>> message = ResponseMessage("4", finish_reason="length")
    >>> message, message.is_truncated, Response(message).finish_reason
    ({'role': 'assistant', 'content': '4'}, True, 'length')
    """

    __slots__ = ("_given",)

    def __init__(
        self,
        content: Content | None = None,
        reasoning_content: str | None = None,
        thinking_blocks: Sequence[object] | None = None,
        tool_calls: Sequence[Mapping[str, object]] | None = None,
        finish_reason: str | None = None,
        is_truncated: bool | None = None,
        tokens: ResponseTokens | None = None,
        role: Literal["assistant"] = "assistant",
    ):
        super().__init__(content, tool_calls, reasoning_content, thinking_blocks, role)
        reason = (
            "length" if is_truncated else finish_reason or ("tool_calls" if tool_calls else None)
        )
        object.__setattr__(self, "_given", {"finish_reason": reason, "tokens": tokens})

    def given(self) -> dict[str, Any]:
        """``finish_reason`` and ``tokens`` as passed to the constructor; a response takes the
        tokens over."""
        try:
            fields: dict[str, object] = object.__getattribute__(self, "_given")
        except AttributeError:
            fields = {}
        return fields

    @property
    def finish_reason(self) -> str | None:
        return super().finish_reason or self.given().get("finish_reason")

    @property
    def is_truncated(self) -> bool | None:
        return self.finish_reason == "length"

    @property
    def tokens(self) -> ResponseTokens | None:
        return super().tokens or self.given().get("tokens")


class Response(Fields, Immutable, frozen=True, weakref=True):
    """A completion. Also has ``choices[0].message`` and ``usage.prompt_tokens`` like OpenAI
    objects.

    >>> response = vf.Response(vf.AssistantMessage("4"), usage=vf.Usage(12, 1))
    >>> response.text, response.choices[0].message.content, response.finish_reason, response.usage.total_tokens
    ('4', '4', 'stop', 13)
    """

    message: Message
    """The message of the model."""
    finish_reason: str = "stop"
    """"stop", "length", "tool_calls" or "abort"."""
    usage: Usage = Usage()
    """Token counts as the server reported them."""
    tokens: ResponseTokens | None = None
    """Token ids and log-probabilities; None unless the server returned them."""
    version: int = -1
    """Policy version of the oldest token; -1 when unknown."""
    model: str = ""
    """Name of the model that answered."""
    id: str = ""
    """Id of the response."""
    created: int = 0
    """When the server made it, in seconds since 1970."""
    attempts: tuple[Attempt, ...] = ()
    """HTTP attempts before it that did not succeed."""
    raw: Any = None
    """The provider's response object; only with the run option ``keep_raw_responses``."""
    tokens_missing: str = ""
    """Why there are no tokens: ``3 log-probabilities for 5 tokens``."""
    token_logprobs: Mapping[str, Any] | None = None
    """``{"texts": […], "logprobs": […]}``, one of each per sampled token, where an evaluation asked
    for them and the server names tokens by their texts."""

    def __post_init__(self) -> None:
        message = self.message
        if isinstance(message, ResponseMessage):
            fields = message.given()
            tokens = fields.pop("tokens", None)  # held once, here
            force_setattr(self, "finish_reason", fields.get("finish_reason") or self.finish_reason)
            force_setattr(self, "tokens", tokens if self.tokens is None else self.tokens)
        if self.usage is None:
            force_setattr(self, "usage", Usage())
        if not isinstance(message, AssistantMessage):
            message = _restore(AssistantMessage, message)
            force_setattr(self, "message", message)
        object.__setattr__(message, "_response", weakref.ref(self))

    def keys(self) -> Sequence[str]:
        """Names of the fields that an older response had."""
        return "id created model usage message finish_reason tokens".split()

    @property
    def choices(self) -> list[Choice]:
        return [Choice(self.message, self.finish_reason)]

    @property
    def text(self) -> str:
        """The completion's text, "" when there is none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""
