"""Messages of the Model Context Protocol as bytes, for both transports: bounded, and with the cause
where a call has no answer.

The protocol's library tells a call that failed by an error's number, which a server may use for its
tools' own errors. A call that the transport failed carries a ``Loss`` in its place, which no server
can send.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from verifiers.errors import InfraError
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES
from verifiers.runtime.decoding import check_values

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCMessage

MAX_MESSAGE_BYTES = MAX_OUTPUT_BYTES
"""Longest message of a server."""
_OWN_ERROR = object()
"""In the error of a server that has the number of a closed connection: it is its own."""
_ENDS = 1024
_VERSION = rb'"jsonrpc"\s{0,9}:\s{0,9}"2\.0"\s{0,9}'
_ID = rb'"id"\s{0,9}:\s{0,9}"?(\d{1,18})"?\s{0,9}'
_FIRST_ID = re.compile(rb"\s{0,9}\{\s{0,9}(?:%s,\s{0,9})?%s," % (_VERSION, _ID))
_LAST_ID = re.compile(rb",\s{0,9}%s(?:,\s{0,9}%s)?\}\s{0,9}\Z" % (_ID, _VERSION))


class Stage(Enum):
    """How far a call without an answer had come."""

    NOT_TAKEN = "the server did not take it"
    CUT_OFF = "the connection ended before the answer began"
    ANSWERED = "its answer cannot be used"


class Loss(InfraError):
    """A call has no answer; the message says why."""

    def __init__(self, why: str, stage: Stage = Stage.ANSWERED):
        super().__init__(why)
        self.stage = stage


def decoded(content: str | bytes) -> JSONRPCMessage:
    """A message of a server. *Raises* ValueError for what is none, or too much."""
    from mcp_types import CONNECTION_CLOSED, JSONRPCError, jsonrpc_message_adapter

    check_values(content)
    try:
        message = jsonrpc_message_adapter.validate_json(content, by_name=False)
    except ValueError as error:
        raise ValueError("it is no message of the protocol") from error
    if isinstance(message, JSONRPCError) and message.error.code == CONNECTION_CLOSED:
        message.error.data = _OWN_ERROR
    return message


def encoded(message: JSONRPCMessage) -> bytes:
    """A message to a server. *Raises* ValueError for numbers that JSON has not."""
    return json.dumps(
        message.model_dump(by_alias=True, exclude_unset=True), allow_nan=False, default=str
    ).encode()


def unanswered(request_id: Any, loss: Loss) -> SessionMessage:
    """What the library takes for the answer to a request that has none."""
    from mcp.shared.message import SessionMessage
    from mcp_types import CONNECTION_CLOSED, ErrorData, JSONRPCError

    error = ErrorData(code=CONNECTION_CLOSED, message=str(loss), data=loss)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


def loss_of(error: Any) -> Loss | None:
    """Why a call has no answer; None for an error of the server itself."""
    from mcp_types import CONNECTION_CLOSED

    if isinstance(error.data, Loss):
        return error.data
    if error.code == CONNECTION_CLOSED and error.data is not _OWN_ERROR:
        return Loss("it ended", Stage.CUT_OFF)
    return None


def id_of(start: bytes, end: bytes) -> int | None:
    """The id of a response by the start and the end of its text; None where neither shows it.

    >>> id_of(b'{"jsonrpc":"2.0","id":7,"result":{"con', b'tent":[]}}'), id_of(b'{"result":', b'},"id":7}')
    (7, 7)
    >>> id_of(b'{"method":"log","id":', b'"id":7},{}')
    """
    match = _FIRST_ID.match(start[:_ENDS]) or _LAST_ID.search(end[-_ENDS:])
    return int(match[1]) if match else None
