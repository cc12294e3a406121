"""Messages, tools and tool calls: ``dict``s that also answer attributes."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

Content: TypeAlias = str | Sequence[Mapping[str, object]]
"""Text, or content parts."""


class AttributeDict(dict[str, Any]):
    """A dict whose keys also read and write as attributes; a missing key is an AttributeError."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), dict(self))


def _restore(cls: type[Mapping[str, object]], items: Mapping[str, object]) -> Any:
    restored = cls.__new__(cls)
    dict.update(restored, items)
    return restored


def _restore_received(
    cls: type[AssistantMessage], items: Mapping[str, object], received: object
) -> object:
    message = _restore(cls, items)
    message.keep_received(received)
    return message


class Message(AttributeDict):
    """A chat message: ``{"role": …, "content": …}``; the known fields read as attributes, absent
    fields as None.

    >>> m = UserMessage("hello")
    >>> m.content, m["role"], m.tool_calls, "tool_calls" in m
    ('hello', 'user', None, False)
    """

    __slots__ = ()
    FIELDS = (
        "role",
        "content",
        "tool_calls",
        "tool_call_id",
        "name",
        "reasoning_content",
        "thinking_blocks",
    )

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

    def model_dump(self, **_: object) -> dict[str, Any]:
        """The message as a plain dict (the spelling of pydantic messages)."""
        return dict(self)

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """A copy with the fields of ``update`` (the spelling of pydantic messages)."""
        fields = copy.deepcopy(dict(self)) if deep else self
        return _restore(type(self), {**fields, **(update or {})})  # type: ignore[no-any-return]

    @classmethod
    def from_path(cls, path: str | Path) -> Message:
        """A message whose content is the text of a file, for example
        ``SystemMessage.from_path("prompt.txt")``."""
        return cls(Path(path).read_text(encoding="utf-8"))  # type: ignore[arg-type]


Messages: TypeAlias = Sequence[Any]


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

    As the message of a ``Response`` it also has that response's ``finish_reason``, ``is_truncated``
    and ``tokens``, which are no keys of the message; they are None without a response. ``received``
    is no key either.

    Args:
        content: Text, or a list of content parts; None beside tool calls.
        tool_calls: The tools that the model calls.
        reasoning_content: Its reasoning, where the server separates it from the text.
        thinking_blocks: Reasoning with signatures, as Anthropic sends it; kept as given.
        role: Always "assistant".

    >>> vf.AssistantMessage("It is 4.", reasoning_content="2 + 2")
    {'role': 'assistant', 'content': 'It is 4.', 'reasoning_content': '2 + 2'}
    """

    __slots__ = ("_received", "_response")

    @property
    def received(self) -> Any:
        """What the server wrote, where this message says it in another form: a message of chat
        completions, or the blocks or items of the other APIs. It goes back to the server; copies
        and pickles of the message keep it, a dict made of it does not."""
        try:
            return object.__getattribute__(self, "_received")
        except AttributeError:
            return None

    def keep_received(self, received: object) -> None:
        """Set ``received``."""
        object.__setattr__(self, "_received", received)

    def __reduce__(self) -> tuple[object, ...]:
        if self.received is None:
            return super().__reduce__()
        return _restore_received, (type(self), dict(self), self.received)

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
    def tokens(self) -> Any:
        """The tokens of the response; None without."""
        response = self._of()
        return None if response is None else response.tokens

    def _of(self) -> Any:
        try:
            reference: weakref.ref[object] = object.__getattribute__(self, "_response")
        except AttributeError:
            return None
        return reference()

    def __init__(
        self,
        content: Content | None = None,
        tool_calls: Sequence[Mapping[str, object]] | None = None,
        reasoning_content: str | None = None,
        thinking_blocks: Sequence[object] | None = None,
        role: Literal["assistant"] = "assistant",
    ):
        super().__init__(role=role, content="" if content is None and not tool_calls else content)
        if tool_calls is not None:
            self["tool_calls"] = tool_calls
        if reasoning_content is not None:
            self["reasoning_content"] = reasoning_content
        if thinking_blocks is not None:
            self["thinking_blocks"] = thinking_blocks


class ToolMessage(Message):
    """The result of a tool call.

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

    def __missing__(self, key: str) -> object:
        if key in self.FLAT:
            return self["function"].get(key)
        raise KeyError(key)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self or key in self.FLAT else default

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), dict(self))

    def model_dump(self, *, exclude_none: bool = False, **_: object) -> dict[str, Any]:
        """The flat fields as a plain dict (the spelling of pydantic objects)."""
        fields = {name: self.get(name) for name in (*(("id",) if "id" in self else ()), *self.FLAT)}
        if exclude_none:
            return {name: value for name, value in fields.items() if value is not None}
        return fields

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
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

    if TYPE_CHECKING:
        id: str
        name: str
        arguments: str

    def __init__(
        self,
        id: str = "",
        name: str = "",
        arguments: str | Mapping[str, object] = "{}",
        **_: object,
    ):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        super().__init__(id=id, type="function", function=AttributeDict(name=name, arguments=text))

    @classmethod
    def from_wire(cls, call: Mapping[str, Any]) -> ToolCall:
        """From ``{"id", "type", "function": {…}}`` or flat ``{"id", "name", "arguments"}``; keeps
        extra keys."""
        function = call.get("function") or call
        tool_call = cls(
            str(call.get("id") or ""),
            str(function.get("name") or ""),
            function.get("arguments") or "{}",
        )
        tool_call.update(
            (k, v)
            for k, v in call.items()
            if k not in ("id", "type", "function", "name", "arguments")
        )
        return tool_call


class Tool(_Function):
    """An OpenAI function tool; ``name``, ``description``, ``parameters`` and ``strict`` also read
    flat.

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

    if TYPE_CHECKING:
        name: str
        description: str
        parameters: dict[str, Any]
        strict: bool | None

    def __init__(
        self,
        name: str = "",
        description: str = "",
        parameters: Mapping[str, object] | None = None,
        strict: bool | None = None,
    ):
        function: dict[str, object] = {
            "name": name,
            "description": description,
            "parameters": dict(parameters or {}),
        }
        if strict is not None:
            function["strict"] = strict
        super().__init__(type="function", function=AttributeDict(function))

    @classmethod
    def from_wire(cls, tool: Mapping[str, Any]) -> Tool:
        """From the nested OpenAI format or the flat format."""
        f = tool.get("function") or tool
        return cls(
            f.get("name") or "",
            f.get("description") or "",
            f.get("parameters") or {},
            f.get("strict"),
        )


class _ContentPart(AttributeDict):
    __slots__ = ()

    def model_dump(self, **_: object) -> dict[str, Any]:
        """The part as plain data."""
        return {
            name: dict(value) if isinstance(value, dict) else value for name, value in self.items()
        }


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

    def __init__(self, image_url: str | Mapping[str, object]):
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

    def __init__(
        self,
        data: str | None = None,
        format: str = "wav",
        *,
        input_audio: Mapping[str, object] | None = None,
    ):
        super().__init__(
            type="input_audio",
            input_audio=AttributeDict(input_audio or {"data": data, "format": format}),
        )
