"""The contract of a wire dialect: what a server needs of it, and what a client.

The promise: a dialect is pure. It opens nothing, waits for nothing and keeps nothing between calls.
What a body says and this library cannot do is refused with one sentence that names the field
(`ConfigError`), or dropped by name (`DialectRequest.dropped_tools`); it is never misread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.types import Message, ModelRequest, Response, Tool


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How the calls of a tool are written in the dialect of the request that offered it."""

    kind: str
    """"function", "custom" (one free text) or "local_shell"."""
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class DialectRequest:
    """A model call as a program sent it, and what is needed to answer in kind."""

    messages: list[Message]
    model: str
    tools: tuple[Tool, ...] = ()
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    """Under the names of ``ModelRequest.sampling_args``."""
    stream: bool = False
    with_usage: bool = False
    """A stream of chat completions ends with the usage only where the request asks for it."""
    tool_forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """Tools that the model sees as functions and whose calls are written otherwise, by the name the
    model sees."""
    dropped_tools: tuple[str, ...] = ()
    """Tools that run at the vendor (``web_search``), which are not offered to the model."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body that the answer repeats or that choose no token (``metadata``,
    ``thinking``)."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Part of every id in the answer."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model_request(self) -> ModelRequest:
        """The same call for a `Client`."""
        return ModelRequest(
            self.messages,
            self.model,
            tools=list(self.tools) or None,
            sampling_args=self.sampling_args,
        )


class StreamReader(Protocol):
    """Puts the events of a stream together."""

    @property
    def is_done(self) -> bool:
        """Whether the last event arrived."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer is whole if the stream ends here; else it was cut."""

    def feed(self, data: str) -> None:
        """Read the data of an event. Raises: `StreamedError`; ``ValueError`` for data that is no
        such event."""

    def body(self) -> dict[str, object]:
        """The body that the same answer has without a stream."""


class Dialect(Protocol):
    """What a server needs; the modules ``chat``, ``responses`` and ``messages`` have these names."""

    @property
    def NAME(self) -> str: ...

    @property
    def PATHS(self) -> tuple[str, ...]:
        """Paths below the base URL; model calls are posted to the first."""

    def parse_request(self, body: Mapping[str, object]) -> DialectRequest:
        """Read the body of a model call. Raises: ``ConfigError`` that names the field."""

    def response_body(self, response: Response, request: DialectRequest) -> dict[str, Any]:
        """Write a response as the body of the answer."""

    def stream_opening(self, request: DialectRequest) -> Sequence[bytes]:
        """Write the events before the first token; they depend on the request alone."""

    def stream_rest(self, response: Response, request: DialectRequest) -> Iterator[bytes]:
        """Write the events after `stream_opening`, to the last."""

    def keep_alive(self, request: DialectRequest) -> bytes:
        """Write an event that changes nothing, for the wait after `stream_opening`."""

    def error_body(self, status: int, message: str) -> dict[str, Any]:
        """Write the body of an answer with another status than 200."""

    def error_event(self, status: int, message: str, request: DialectRequest) -> bytes:
        """Write the event that ends an opened stream with an error."""


class ClientDialect(Dialect, Protocol):
    """What a client needs too; the modules ``responses`` and ``messages`` have these names."""

    def request_body(
        self, request: ModelRequest, *, stream: bool = False, without: frozenset[str] = frozenset()
    ) -> dict[str, object]:
        """Write a model call; ``without`` names parts that the endpoint refused (`concession`).

        Raises: ``ConfigError`` for what the dialect cannot say.
        """

    def concession(self, status: int, body: bytes) -> str | None:
        """Name the optional part of a request that an error answer refuses; None for another
        failure."""

    def parse_response(
        self, body: Mapping[str, object], request: ModelRequest, where: str
    ) -> Response:
        """Read an answer. Raises: ``MalformedResponse`` that names ``where`` and the field."""

    def stream_reader(self) -> StreamReader:
        """Begin to read one stream."""
