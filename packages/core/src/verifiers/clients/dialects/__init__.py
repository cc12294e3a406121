"""The wire dialects of model APIs, in both directions and without IO: chat completions, responses,
messages.

Each dialect is one module that is a `Dialect`. A server reads requests and writes answers with it,
a client writes requests and reads answers; what one direction writes, the other reads back equal.

>>> from verifiers.clients.dialects import DIALECTS
>>> sorted(DIALECTS)
['chat', 'messages', 'responses']
"""

from __future__ import annotations

from collections.abc import Mapping

from verifiers.clients.dialects import chat, messages, responses
from verifiers.clients.dialects.protocol import Dialect, DialectRequest, StreamReader, ToolForm
from verifiers.clients.dialects.sse import EventDecoder
from verifiers.clients.reply import StreamedError

__all__ = [
    "DIALECTS",
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
