"""The wire dialects of model APIs, in both directions and without IO: chat completions, responses,
messages.

Each dialect is one module that is a `Dialect`, with which a server reads requests and writes
answers. With a `ClientDialect` a client writes requests and reads answers too; what one direction
writes, the other reads back equal. The client of chat completions is in ``http``.

>>> from verifiers.clients.dialects import DIALECTS
>>> sorted(DIALECTS)
['chat', 'messages', 'responses']
"""

from __future__ import annotations

from collections.abc import Mapping

from verifiers.clients.dialects import chat, messages, responses
from verifiers.clients.dialects.protocol import (
    ClientDialect,
    Dialect,
    DialectRequest,
    StreamReader,
    ToolForm,
)
from verifiers.clients.dialects.sse import EventDecoder
from verifiers.clients.reply import StreamedError

__all__ = [
    "DIALECTS",
    "ClientDialect",
    "Dialect",
    "DialectRequest",
    "EventDecoder",
    "StreamReader",
    "StreamedError",
    "ToolForm",
    "chat",
    "messages",
    "responses",
]

DIALECTS: Mapping[str, Dialect] = {"chat": chat, "responses": responses, "messages": messages}
"""Name -> dialect."""
