"""Streamable HTTP to a server of the Model Context Protocol, with sessions or without.

The protocol's library speaks it, over a client that gives each request that cannot be answered an
answer of its own: an error that says why, for a server that cannot be reached, another status, a
redirect, an answer longer than ``MAX_MESSAGE_BYTES`` or a session that the server has forgotten. So
one of them costs one call, and the connection is made again. Keys come from variables of this
process when the connection is made, and are in no record.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import MissingKeyError
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES, TooLong, read_chunks
from verifiers.runtime.redaction import redacted_text, remember_secrets

if TYPE_CHECKING:
    import httpx2

MAX_MESSAGE_BYTES = MAX_OUTPUT_BYTES
"""Longest message of a server."""
MAX_SILENCE_S = 300.0
"""Seconds without a byte after which an answer is given up; servers send signs of life."""
_MAX_QUOTED = 300


def headers_of(
    server: str, api_key_var: str | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The headers of a server's requests, whose values are in variables of this process.

    *Raises* MissingKeyError for a variable that is not set.
    """
    names = {"Authorization": api_key_var, **variables} if api_key_var else dict(variables)
    if missing := [name for name in names.values() if not os.environ.get(str(name))]:
        raise MissingKeyError(
            f"the MCP server {server!r} needs {', '.join(map(str, missing))}, which this process"
            " does not have",
            names=missing,
        )
    values = {header: os.environ[str(name)] for header, name in names.items()}
    remember_secrets({"headers": values})
    if api_key_var:
        values["Authorization"] = f"Bearer {values['Authorization']}"
    return values


@contextlib.asynccontextmanager
async def http_streams(
    url: str, headers: Mapping[str, str], connect_limit_s: float
) -> AsyncIterator[tuple[Any, Any]]:
    """(messages of the server, messages to it)."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class Client(httpx2.AsyncClient):
        async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
            try:
                return await _checked(await super().send(request, **options))
            except (httpx2.HTTPError, TooLong) as error:
                return _failed(request, str(error) or type(error).__name__)

    async with (
        Client(
            headers={"Accept-Encoding": "identity", **headers},
            timeout=httpx2.Timeout(connect_limit_s, read=MAX_SILENCE_S),
        ) as client,
        streamable_http_client(
            url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        ) as streams,
    ):
        yield streams


async def _checked(response: httpx2.Response) -> httpx2.Response:
    """The response as it may be read, a stream of events still open. *Raises* TooLong."""
    import httpx2

    request, status = response.request, response.status_code
    kind = response.headers.get("content-type", "").lower()
    if status < 300 and kind.startswith("text/event-stream"):
        return response
    try:
        if response.headers.get("content-encoding", "identity") != "identity":
            return _failed(request, "it compressed an answer although it was asked not to")
        body = await read_chunks(response.aiter_raw(), MAX_MESSAGE_BYTES, "an answer")
    finally:
        await response.aclose()
    if "location" in response.headers and 300 <= status < 400:
        location = redacted_text(response.headers["location"])
        return _failed(request, f"it redirects to {location}: use that address as url")
    if status == 404 and "mcp-session-id" in request.headers:
        return _failed(request, "it does not know the session any more")
    if status >= 400 and not _is_error(body):
        words = redacted_text(body.decode("utf-8", "replace")).strip()[:_MAX_QUOTED]
        return _failed(request, f"HTTP {status}{f': {words}' if words else ''}")
    if status == 200 and request.method == "POST" and not kind.startswith("application/json"):
        return _failed(request, f"it answered with content of the type {kind or 'none'!r}")
    return httpx2.Response(status, headers=response.headers, content=body, request=request)


def _is_error(body: bytes) -> bool:
    """Whether it is an error of the protocol."""
    from mcp_types import JSONRPCError, jsonrpc_message_adapter

    try:
        return isinstance(jsonrpc_message_adapter.validate_json(body), JSONRPCError)
    except ValueError:
        return False


def _failed(request: httpx2.Request, why: str) -> httpx2.Response:
    """What the library takes for a server's own error in answer to this request."""
    import httpx2
    from mcp_types import CONNECTION_CLOSED

    if request.method != "POST":  # a stream that few servers offer, or the end of a session
        return httpx2.Response(405, request=request)
    error = {"code": CONNECTION_CLOSED, "message": why}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    return httpx2.Response(
        502, headers={"Content-Type": "application/json"}, content=body, request=request
    )
