"""Data types: messages, model requests and responses, turns and rollouts.

Messages are plain ``dict``s that also answer attributes, so code that writes ``m["content"]`` and code that
writes ``m.content`` both work, equality and JSON are those of ``dict``, and
``"tool_calls" in m`` is True only when the message has tool calls.
Sampled token ids and log-probabilities are numpy arrays exactly as the server sent them.

``clients`` parses provider payloads. This module imports no other module of the package.
"""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import force_setattr

SamplingArgs: TypeAlias = dict[str, Any]
Info: TypeAlias = dict[str, Any]
Content: TypeAlias = str | Sequence[Mapping[str, Any]]
"""Text, or content parts."""
RewardFunc: TypeAlias = Callable[..., Any]
DatasetBuilder: TypeAlias = Callable[[], Any]


class AttributeDict(dict[str, Any]):
    """A dict whose keys also read and write as attributes; a missing one is an AttributeError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self))


class _DataclassFields:
    """``__dataclass_fields__`` of a class, made when it is first read."""

    def __init__(self) -> None:
        self._by_class: dict[type, dict[str, Field[Any]]] = {}

    def __get__(self, instance: object, owner: type[Immutable]) -> dict[str, Field[Any]]:
        if owner not in self._by_class:
            types: dict[str, Any] = {}
            for base in reversed(owner.__mro__):
                types |= vars(base).get("__annotations__", {})
            names, defaults = owner.__struct_fields__, owner.__struct_defaults__
            without = len(names) - len(defaults)
            described: list[Any] = [(name, types[name]) for name in names[:without]]
            for name, default in zip(names[without:], defaults, strict=True):
                factory = getattr(default, "factory", None)
                value = field(default=default) if factory is None else field(default_factory=factory)
                described.append((name, types[name], value))
            self._by_class[owner] = {one.name: one for one in fields(make_dataclass(owner.__name__, described))}
        return self._by_class[owner]


class Immutable(msgspec.Struct, frozen=True):
    """A frozen dataclass to its users (``replace``, ``fields``, ``asdict``), made in a tenth of the time of one.

    A frozen dataclass assigns each field by a call of ``object.__setattr__``; several of these are made per turn.
    """

    __dataclass_fields__: ClassVar[_DataclassFields] = _DataclassFields()


def _restore(cls: type[dict[str, Any]], items: Mapping[str, Any]) -> Any:
    restored = cls.__new__(cls)
    dict.update(restored, items)
    return restored


# --- messages ---------------------------------------------------------------------------------------------------


class Message(dict[str, Any]):
    """One chat message: ``{"role": …, "content": …}``; the known fields read as attributes, absent ones as None.

    >>> m = UserMessage("hello")
    >>> m.content, m["role"], m.tool_calls, "tool_calls" in m
    ('hello', 'user', None, False)
    """

    __slots__ = ()
    FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking_blocks")

    if TYPE_CHECKING:
        role: str
        content: Any  # text, a list of content parts, or None beside tool calls
        tool_calls: list[ToolCall] | None
        tool_call_id: str | None
        name: str | None
        reasoning_content: str | None
        thinking_blocks: list[Any] | None

    def __getattr__(self, name: str) -> Any:
        if name in Message.FIELDS:
            return self.get(name)
        if name in self:
            return self[name]
        raise AttributeError(f"a message has no {name!r}; its fields are {', '.join(self)}")

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self))

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The message as a plain dict (the spelling of pydantic messages)."""
        return dict(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the fields of ``update`` (the spelling of pydantic messages)."""
        return _restore(type(self), {**(copy.deepcopy(dict(self)) if deep else self), **(update or {})})  # type: ignore[no-any-return]

    @classmethod
    def from_path(cls, path: str | Path) -> Message:
        """A message whose content is the text of a file, for example ``SystemMessage.from_path("prompt.txt")``."""
        return cls(Path(path).read_text(encoding="utf-8"))  # type: ignore[arg-type]


Messages: TypeAlias = "list[Message] | str"


class SystemMessage(Message):
    """A system message.

    Args:
        content: Text, or a list of content parts.
        role: Always "system".

    >>> vf.SystemMessage("Be brief.")
    {'role': 'system', 'content': 'Be brief.'}
    """

    __slots__ = ()

    def __init__(self, content: Content, role: Literal["system"] = "system"):
        super().__init__(role=role, content=content)


class UserMessage(Message):
    """A user message; ``content`` is text or a list of content parts.

    Args:
        content: Text, or a list of content parts.
        role: Always "user".

    >>> vf.UserMessage("hi") == {"role": "user", "content": "hi"}
    True
    """

    __slots__ = ()

    def __init__(self, content: Content, role: Literal["user"] = "user"):
        super().__init__(role=role, content=content)


class AssistantMessage(Message):
    """A message of the model; ``content`` may be None only with ``tool_calls``.

    As the message of a ``Response`` it also has that response's ``finish_reason``, ``is_truncated`` and ``tokens``,
    which are no keys of the message; they are None without a response.

    Args:
        content: Text, or a list of content parts; None beside tool calls.
        tool_calls: The tools that the model calls.
        reasoning_content: Its reasoning, where the server separates it from the text.
        thinking_blocks: Reasoning with signatures, as Anthropic sends it; kept as given.
        role: Always "assistant".

    >>> vf.AssistantMessage("It is 4.", reasoning_content="2 + 2")
    {'role': 'assistant', 'content': 'It is 4.', 'reasoning_content': '2 + 2'}
    """

    __slots__ = ("_response",)

    @property
    def finish_reason(self) -> str | None:
        """Why the model stopped; None without a response."""
        response = self._of()
        return None if response is None else response.finish_reason

    @property
    def is_truncated(self) -> bool | None:
        """Whether a length limit truncated it; None without a response."""
        response = self._of()
        return None if response is None else response.finish_reason == "length"

    @property
    def tokens(self) -> ResponseTokens | None:
        """The tokens of the response; None without."""
        response = self._of()
        return None if response is None else response.tokens

    def _of(self) -> Response | None:
        try:
            reference: weakref.ref[Response] = object.__getattribute__(self, "_response")
        except AttributeError:
            return None
        return reference()

    def __init__(
        self,
        content: Content | None = None,
        tool_calls: Sequence[Mapping[str, Any]] | None = None,
        reasoning_content: str | None = None,
        thinking_blocks: Sequence[Any] | None = None,
        role: Literal["assistant"] = "assistant",
    ):
        super().__init__(role=role, content="" if content is None and not tool_calls else content)
        if tool_calls is not None:
            self["tool_calls"] = tool_calls
        if reasoning_content is not None:
            self["reasoning_content"] = reasoning_content
        if thinking_blocks is not None:
            self["thinking_blocks"] = thinking_blocks


class ResponseMessage(AssistantMessage):
    """The message of a ``Response`` as clients of version 0.1.12 and later build it, with what the response says of it.

    >>> message = ResponseMessage("4", finish_reason="length")
    >>> message, message.is_truncated, Response(message).finish_reason
    ({'role': 'assistant', 'content': '4'}, True, 'length')
    """

    __slots__ = ("_given",)

    def __init__(
        self,
        content: Content | None = None,
        reasoning_content: str | None = None,
        thinking_blocks: Sequence[Any] | None = None,
        tool_calls: Sequence[Mapping[str, Any]] | None = None,
        finish_reason: str | None = None,
        is_truncated: bool | None = None,
        tokens: ResponseTokens | None = None,
        role: Literal["assistant"] = "assistant",
    ):
        super().__init__(content, tool_calls, reasoning_content, thinking_blocks, role)
        reason = "length" if is_truncated else finish_reason or ("tool_calls" if tool_calls else None)
        object.__setattr__(self, "_given", {"finish_reason": reason, "tokens": tokens})

    def given(self) -> dict[str, Any]:
        """``finish_reason`` and ``tokens`` as passed to the constructor; a response takes the tokens over."""
        try:
            given: dict[str, Any] = object.__getattribute__(self, "_given")
        except AttributeError:
            given = {}
        return given

    @property
    def finish_reason(self) -> str | None:
        return super().finish_reason or self.given().get("finish_reason")

    @property
    def is_truncated(self) -> bool | None:
        return self.finish_reason == "length"

    @property
    def tokens(self) -> ResponseTokens | None:
        return super().tokens or self.given().get("tokens")


class ToolMessage(Message):
    """The result of one tool call.

    Args:
        content: What the tool returned, or its error.
        tool_call_id: The ``id`` of the call that it answers.
        role: Always "tool".

    >>> vf.ToolMessage("4", tool_call_id="c1")
    {'role': 'tool', 'content': '4', 'tool_call_id': 'c1'}
    """

    __slots__ = ()

    def __init__(self, content: Content, tool_call_id: str, role: Literal["tool"] = "tool"):
        super().__init__(role=role, content=content)
        if tool_call_id is not None:
            self["tool_call_id"] = tool_call_id


class TextMessage(Message):
    """Text in completion mode.

    Args:
        content: The text.
        role: Always "text".

    >>> vf.TextMessage("2 + 2 =")
    {'role': 'text', 'content': '2 + 2 ='}
    """

    __slots__ = ()

    def __init__(self, content: str, role: Literal["text"] = "text"):
        super().__init__(role=role, content=content)


class _Function(dict[str, Any]):
    """Wire format of an object with a ``function``, whose ``FLAT`` fields also read directly."""

    __slots__ = ()
    FLAT: tuple[str, ...] = ()

    def __missing__(self, key: str) -> Any:
        if key in self.FLAT:
            return self["function"].get(key)
        raise KeyError(key)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self or key in self.FLAT else default

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The flat fields as a plain dict (the spelling of pydantic objects)."""
        fields = {name: self.get(name) for name in (*(("id",) if "id" in self else ()), *self.FLAT)}
        return {name: value for name, value in fields.items() if value is not None} if exclude_none else fields

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the flat fields of ``update`` (the spelling of pydantic objects)."""
        return type(self)(**{**self.model_dump(), **(update or {})})


class ToolCall(_Function):
    """A tool call in the wire format; ``name`` and ``arguments`` (a JSON string) also read flat.

    Args:
        id: Names the call; its result has the same id.
        name: Name of the tool.
        arguments: Arguments: an object, or its JSON text.

    >>> call = vf.ToolCall("c1", "add", {"a": 1})
    >>> call["function"]["name"], call.name, call.arguments
    ('add', 'add', '{"a": 1}')
    """

    __slots__ = ()
    FLAT = ("name", "arguments")

    def __init__(self, id: str = "", name: str = "", arguments: str | Mapping[str, Any] = "{}", **_: Any):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        super().__init__(id=id, type="function", function=AttributeDict(name=name, arguments=text))

    @classmethod
    def from_wire(cls, call: Mapping[str, Any]) -> ToolCall:
        """From ``{"id", "type", "function": {…}}`` or flat ``{"id", "name", "arguments"}``; keeps extra keys."""
        function = call.get("function") or call
        tool_call = cls(call.get("id") or "", function.get("name") or "", function.get("arguments") or "{}")
        tool_call.update((k, v) for k, v in call.items() if k not in ("id", "type", "function", "name", "arguments"))
        return tool_call


class Tool(_Function):
    """An OpenAI function tool; ``name``, ``description``, ``parameters`` and ``strict`` also read flat.

    Args:
        name: Name that the model calls.
        description: What it does, for the model.
        parameters: JSON schema of its arguments.
        strict: Whether the server must follow the schema; None = its default.

    >>> tool = vf.Tool("add", "Add two numbers.", {"type": "object"})
    >>> tool["function"]["name"], tool.name, tool.strict
    ('add', 'add', None)
    """

    __slots__ = ()
    FLAT = ("name", "description", "parameters", "strict")

    def __init__(
        self,
        name: str = "",
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        strict: bool | None = None,
    ):
        function: dict[str, Any] = {"name": name, "description": description, "parameters": dict(parameters or {})}
        if strict is not None:
            function["strict"] = strict
        super().__init__(type="function", function=AttributeDict(function))

    @classmethod
    def from_wire(cls, tool: Mapping[str, Any]) -> Tool:
        """From the nested OpenAI format or the flat one."""
        f = tool.get("function") or tool
        return cls(f.get("name") or "", f.get("description") or "", f.get("parameters") or {}, f.get("strict"))


class _ContentPart(AttributeDict):
    __slots__ = ()

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The part as plain data."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.items()}


class TextContentPart(_ContentPart):
    """``{"type": "text", "text": …}``.

    Args:
        text: The text.

    >>> vf.UserMessage([vf.TextContentPart("What is it?"), vf.ImageUrlContentPart("http://host/a.png")]).content[0]
    {'type': 'text', 'text': 'What is it?'}
    """

    __slots__ = ()

    def __init__(self, text: str):
        super().__init__(type="text", text=text)


class ImageUrlContentPart(_ContentPart):
    """``{"type": "image_url", "image_url": {"url": …}}``; ``url`` may be a data URL.

    Args:
        image_url: Address of the image, or a data URL; a mapping may add ``detail``.

    >>> vf.ImageUrlContentPart("http://host/a.png")
    {'type': 'image_url', 'image_url': {'url': 'http://host/a.png'}}
    """

    __slots__ = ()

    def __init__(self, image_url: str | Mapping[str, Any]):
        source = AttributeDict({"url": image_url} if isinstance(image_url, str) else image_url)
        super().__init__(type="image_url", image_url=source)


class InputAudioContentPart(_ContentPart):
    """``{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}``.

    Args:
        data: The audio in base64.
        format: Its format: "wav" or "mp3".
        input_audio: Both in one mapping, in place of the two.

    >>> vf.InputAudioContentPart("UklGRg==", "wav")
    {'type': 'input_audio', 'input_audio': {'data': 'UklGRg==', 'format': 'wav'}}
    """

    __slots__ = ()

    def __init__(self, data: str | None = None, format: str = "wav", *, input_audio: Mapping[str, Any] | None = None):
        super().__init__(type="input_audio", input_audio=AttributeDict(input_audio or {"data": data, "format": format}))


# --- one model call ---------------------------------------------------------------------------------------------


class ModelRequest(Immutable, frozen=True):
    """One model call. ``prompt`` is a list of messages, or text when ``message_type`` is "completion".

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
    """Seed of the sampling, where the server takes one."""
    timeout_s: float | None = None
    """Time limit of the call with its retries, in seconds; None = the client's."""
    require_tokens: bool = False
    """Request token ids and log-probabilities, and reject a response without them."""
    rollout_id: str | None = None
    """Identifies the conversation, so that a server can route its turns to one replica (header X-Session-ID)."""
    headers: Mapping[str, str] | None = None
    """Further HTTP headers."""
    sample: str | None = None
    """Which of several samples of an equal prompt this is (sibling and turn); None keeps the reply out of a cache."""
    state: Mapping[str, Any] | None = None
    """The state of the rollout, for a client that reads it; None outside of one, and in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelRequest, self._without_state()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelRequest) and self._without_state() == other._without_state()

    def __repr__(self) -> str:
        named = zip(self.__struct_fields__, self._without_state(), strict=False)
        return f"ModelRequest({', '.join(f'{name}={value!r}' for name, value in named)})"

    def _without_state(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "state")


class _Fields:
    """Fields that also read by key, and the spelling of pydantic objects: for the parts of a response."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, name: str, default: object = None) -> Any:
        return getattr(self, name) if name in self.keys() else default

    def keys(self) -> Sequence[str]:
        """Names of the fields."""
        return tuple(self.__dataclass_fields__)  # type: ignore[attr-defined]  # of the dataclasses below

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The fields as plain data."""
        values = {name: _plain(getattr(self, name)) for name in self.keys()}
        return {name: value for name, value in values.items() if value is not None} if exclude_none else values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the fields of ``update``."""
        return replace(self, **(update or {}))  # type: ignore[type-var]  # of the dataclasses below


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.model_dump() if hasattr(value, "model_dump") else value


class Usage(_Fields, Immutable, frozen=True):
    """Token counts of one call, from the server; ``total_tokens`` is their sum.

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
class ResponseTokens(_Fields):
    """The tokens of one call exactly as the server processed and sampled them.

    Args:
        prompt_mask: Accepted where it is 0 for each token of the prompt.
        completion_mask: Accepted where it is 1 for each token of the completion.

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
    """Policy version: one for the completion, or int [C] when weights changed while it was generated; -1 = unknown."""
    routed_experts: Any = None
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
        """Lists become arrays. *Raises* ValueError for masks other than those that the ids imply."""
        assign = object.__setattr__
        assign(self, "prompt_ids", np.asarray(prompt_ids, np.int32))
        assign(self, "completion_ids", np.asarray(completion_ids, np.int32))
        assign(self, "completion_logprobs", float_array(completion_logprobs))
        assign(self, "version", version)
        assign(self, "routed_experts", routed_experts)
        for name, mask in (("prompt_mask", prompt_mask), ("completion_mask", completion_mask)):
            if mask is not None and list(mask) != getattr(self, name):
                raise ValueError(f"{name} of a response is {getattr(self, name)[:1]} for each of its tokens")

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
            "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs version routed_experts".split()
        )


def float_array(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """An array of floats as it is, float32 or float64; other numbers as float64."""
    array = np.asarray(values)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One HTTP attempt that did not succeed."""

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


class Response(_Fields, Immutable, frozen=True, weakref=True):
    """One completion. Also has ``choices[0].message`` and ``usage.prompt_tokens`` like OpenAI objects.

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
    """``{"texts": […], "logprobs": […]}``, one of each per sampled token, where an evaluation asked for them and the
    server names tokens by their texts."""

    def __post_init__(self) -> None:
        message = self.message
        if isinstance(message, ResponseMessage):
            given = message.given()
            tokens = given.pop("tokens", None)  # held once, here
            force_setattr(self, "finish_reason", given.get("finish_reason") or self.finish_reason)
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


# --- one rollout ------------------------------------------------------------------------------------------------


class StopReason(StrEnum):
    """Why a rollout ended: the library's conditions. An author's condition has the name of its method.

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
        """Whether a rollout that ended for this reason was truncated by a limit of tokens or time."""
        return reason in _TRUNCATING


_TRUNCATING = StopReason.MAX_SEQ_LEN, StopReason.MAX_COMPLETION_TOKENS, StopReason.PROMPT_TOO_LONG, StopReason.TIMEOUT


class Turn(Immutable, frozen=True, eq=False):
    """One model call exactly as sampled. Tokens are never decoded and encoded again.

    The second turn of a conversation, in which the environment added the token 9; the policy was updated while it was
    generated::

        Turn(prompt_ids=[1, 15, 7, 2, 9], completion_ids=[4, 2], sampler_logprobs=[-0.1, -0.7], version=[4, 5],
             num_shared=4)

    *Raises* ValueError when the shapes disagree, or the prompt is empty: its first token would have no context.
    """

    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    sampler_logprobs: np.ndarray  # float32 [C], nats, of the processed distribution that was sampled
    version: int | np.ndarray = -1
    """Policy version: one for the turn, or int32 [C] when weights changed while it was generated; -1 = unknown."""
    is_truncated: bool = False
    """Whether a length limit truncated the completion."""
    num_shared: int = 0
    """Leading prompt tokens that are known to equal the previous turn's prompt and completion; not compared again."""
    role: str = ""
    """The role that took the turn, where roles have rewards of their own (``MultiAgentEnv``); else empty."""

    def __post_init__(self) -> None:
        prompt, sampled, logprobs = self.prompt_ids, self.completion_ids, self.sampler_logprobs
        is_row = type(prompt) is type(sampled) is type(logprobs) is np.ndarray and (
            prompt.ndim == sampled.ndim == logprobs.ndim == 1
        )
        if not (is_row and prompt.dtype is sampled.dtype is _INT and logprobs.dtype is _FLOAT):  # as a step has them
            self._convert()
        num_sampled = len(self.completion_ids)
        if len(self.sampler_logprobs) != num_sampled:
            raise ValueError(
                f"a turn has {num_sampled} completion ids and {len(self.sampler_logprobs)} log-probabilities"
            )
        if type(self.version) is not int and np.shape(self.version) not in ((), self.completion_ids.shape):
            raise ValueError(f"a turn has {num_sampled} completion ids and versions of shape {np.shape(self.version)}")
        if not len(self.prompt_ids):
            raise ValueError("a turn has no prompt ids; its first token would have nothing to be conditioned on")

    def _convert(self) -> None:
        for name, dtype in (("prompt_ids", _INT), ("completion_ids", _INT), ("sampler_logprobs", _FLOAT)):
            array = np.asarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1:
                raise ValueError(f"{name} of a turn must have one dimension, got shape {array.shape}")
            force_setattr(self, name, array)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)  # their classes are looked up at every use


class Rollout(Immutable, frozen=True):
    """One finished rollout: its sampled turns, reward and metrics; passed from the runner to training.

    ``State`` is the author's mutable view of the same rollout while it runs; ``state.rollout()`` freezes it::

        Rollout(turns=(Turn(...),), reward=1.0, metrics={"exact_match": 1.0}, stop="max_turns_reached")
    """

    turns: tuple[Turn, ...]
    """The turns to train, which have tokens; empty when the endpoint returned none."""
    reward: float
    """NaN when unknown."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    error: str | None = None
    """``ClassName: message`` of the error that ended it."""
    stop: str | None = None
    """A ``StopReason``, or the name of an author's stop condition."""
    is_truncated: bool = False
    text: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """``prompt``, ``completion`` and ``answer``, for logs."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's rewards per turn, beside the reward; empty when it sets none."""
    advantage: float | None = None
    """As the rubric computed it over the group: by its ``@advantage`` method, else reward minus mean. None before."""
    cause: str | None = None
    """The innermost exception and where it was raised: ``ValueError in right (sums.py:12)``."""
    role_rewards: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The reward of each role that took a turn to train, NaN when unknown; empty where roles have none of their own."""

    def of_role(self, role: str) -> Rollout:
        """What is trained of one role: its turns, its reward, and whether a limit truncated it."""
        numbers = [number for number, turn in enumerate(self.turns) if turn.role == role]
        follows = [number > 0 and self.turns[number - 1].role == role for number in numbers]
        turns = tuple(
            self.turns[number] if is_next else replace(self.turns[number], num_shared=0)
            for number, is_next in zip(numbers, follows, strict=True)
        )
        return replace(
            self,
            turns=turns,
            reward=self.role_rewards.get(role, math.nan),
            is_truncated=StopReason.truncates(self.stop) or any(turn.is_truncated for turn in turns),
            turn_rewards=tuple(self.turn_rewards[number] for number in numbers) if self.turn_rewards else (),
            advantage=None,
            role_rewards={},
        )

    @property
    def oldest_version(self) -> int | None:
        """The policy version of its oldest token; None without tokens."""
        return min((int(np.min(turn.version)) for turn in self.turns if len(turn.completion_ids)), default=None)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled, over all turns."""
        return sum(len(turn.completion_ids) for turn in self.turns)
