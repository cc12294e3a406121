"""Streamable HTTP to a server of the Model Context Protocol, with sessions or without.

Every request is an exchange of its own, so what happens to one of them (a status, a redirect, an
answer that is cut, compressed, of another type, too long or of too many values) is the ``Loss`` of
that call and of no other. A call that is cancelled closes its exchange. A stream that ends before
its answer is continued where the server can do that (``Last-Event-ID``), after a pause, so many
times, and not beyond the call. Nothing is asked beside the calls: the stream of a server's own
notifications is not opened, because nothing here reads them.

Keys come from variables of this process when the connection is made, and are in no record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from verifiers.clients.dialects.sse import EventDecoder
from verifiers.environments.integrations import mcp_messages
from verifiers.environments.integrations.mcp_messages import (
    Loss,
    Stage,
    decoded,
    encoded,
    unanswered,
)
from verifiers.errors import MissingKeyError
from verifiers.runtime.bounded import TooLong, read_chunks, size_text
from verifiers.runtime.http_clients import header_value, open_session, tls_fault
from verifiers.runtime.redaction import redacted_text, remember_values

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

MAX_SILENCE_S = 300.0
"""Seconds without a byte after which an answer is given up; servers send signs of life."""
MAX_STREAM_MESSAGES = 4
"""Longest messages that a stream may come to, with its answer."""
MAX_QUESTIONS = 100
"""Requests of a server within an answer, each of which is refused."""
PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Shortest and longest pause before a stream is continued; it doubles."""
MAX_CONTINUED = 100
"""How often the stream of an answer is continued."""
TELL_LIMIT_S = 10.0
LEAVE_LIMIT_S = 2.0
"""Seconds for a notification, and for the end of a session."""
KEEPALIVE_S = 4.5
_MAX_QUOTED = 300
_SESSION, _VERSION = "mcp-session-id", "mcp-protocol-version"
_ACCEPT = "application/json, text/event-stream"
log = logging.getLogger("verifiers.mcp")


def headers_of(
    server: str, api_key_var: str | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The headers of a server's requests, whose values are in variables of this process.

    *Raises* MissingKeyError for a variable that is not set; ConfigError for a value that no header
    has.
    """
    names = {"Authorization": api_key_var, **variables} if api_key_var else dict(variables)
    if missing := [name for name in names.values() if not os.environ.get(str(name))]:
        raise MissingKeyError(
            f"the MCP server {server!r} needs {', '.join(map(str, missing))}, which this process"
            " does not have",
            names=missing,
        )
    values = {
        header: header_value(os.environ[str(name)], f"{name}, for the MCP server {server!r},")
        for header, name in names.items()
    }
    remember_values(values.values())
    if api_key_var:
        values["Authorization"] = f"Bearer {values['Authorization']}"
    return values


@contextlib.asynccontextmanager
async def http_streams(
    url: str, headers: Mapping[str, str], connect_limit_s: float
) -> AsyncIterator[tuple[Any, Any]]:
    """(messages of the server, messages to it)."""
    import anyio

    arrived, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, queued = anyio.create_memory_object_stream[Any](0)
    async with open_session(
        url,
        headers={"Accept-Encoding": "identity", **headers},
        connector={"limit": 0, "keepalive_timeout": KEEPALIVE_S},
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=connect_limit_s, sock_read=MAX_SILENCE_S
        ),
    ) as session:
        exchanges = _Exchanges(url, session, arrived)
        sending = asyncio.ensure_future(exchanges.send_all(queued))
        try:
            yield incoming, outgoing
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            await exchanges.end()
            for stream in (arrived, incoming, outgoing, queued):
                stream.close()


class _Exchanges:
    """The requests of a connection that are being answered."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, arrived: MemoryObjectSendStream[object]
    ):
        self._url, self._session, self._arrived = url, session, arrived
        self._session_id = self._version = ""
        self._asking: dict[object, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def send_all(self, queued: MemoryObjectReceiveStream[Any]) -> None:
        """Send what is queued, until it ends. None of it waits for another, except for the end of
        the greeting."""
        async for queued_message in queued:
            message, headers = queued_message.message, self._headers(queued_message)
            method, request_id = getattr(message, "method", ""), getattr(message, "id", None)
            if method and request_id is not None:
                asking = asyncio.ensure_future(self._ask(message, headers))
                self._asking[request_id] = asking
                asking.add_done_callback(partial(self._forget, request_id))
                continue
            if method == "notifications/cancelled":
                cancelled = self._asking.get((message.params or {}).get("requestId"))
                if cancelled is not None:
                    cancelled.cancel()
                if not self._session_id:  # the end of the exchange says it
                    continue
            telling = asyncio.ensure_future(self._tell(message, headers))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            if method == "notifications/initialized":
                await asyncio.wait([telling])

    def _forget(self, request_id: object, _: asyncio.Task[None]) -> None:
        del self._asking[request_id]

    async def end(self) -> None:
        """End what is being asked, and the session."""
        tasks = [*self._asking.values(), *self._telling]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session_id:
            try:
                async with (
                    asyncio.timeout(LEAVE_LIMIT_S),
                    self._session.delete(self._url, headers=self._headers(None)),
                ):
                    pass
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                log.debug("the session at %s was not ended: %s", self._url, error)

    def _headers(self, queued_message: object) -> dict[str, str]:
        stamped = getattr(getattr(queued_message, "metadata", None), "headers", None) or {}
        if getattr(getattr(queued_message, "message", None), "method", "") == "initialize":
            self._version = ""
        else:
            lower = {name.lower(): text for name, text in stamped.items()}
            self._version = lower.get(_VERSION, self._version)
        headers = {"Accept": _ACCEPT, "Content-Type": "application/json"}
        if self._session_id:
            headers[_SESSION] = self._session_id
        if self._version:
            headers[_VERSION] = self._version
        return {**headers, **{n: t for n, t in stamped.items() if n.lower() != _VERSION}}

    async def _tell(self, message: object, headers: Mapping[str, str]) -> None:
        """Send a message that has no answer; its failure costs nothing."""
        try:
            async with asyncio.timeout(TELL_LIMIT_S):
                response = await self._post(message, headers)
                response.close()
        except (TimeoutError, Loss) as error:
            log.debug("%s did not take a notification: %s", self._url, error)

    async def _ask(self, message: Any, headers: Mapping[str, str]) -> None:
        """Forward the answer to a request, or its loss."""
        import anyio

        try:
            answer = await self._answer(message, headers)
        except Loss as loss:
            answer = unanswered(message.id, loss)
        except Exception as error:
            log.exception("a call of %s failed", self._url)
            answer = unanswered(message.id, Loss(f"{type(error).__name__}: {error}"))
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._arrived.send(answer)

    async def _answer(self, message: object, headers: Mapping[str, str]) -> object:
        """The answer to a request. *Raises* Loss."""
        response = await self._post(message, headers)
        try:
            if _is_stream(response):
                decoder = EventDecoder()
                answer = await self._from_stream(response, message, decoder)
                return answer or await self._continued(message, decoder)
            return await self._from_body(response, message)
        finally:
            if not response.content.at_eof():
                response.close()

    async def _post(self, message: Any, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """*Raises* Loss."""
        try:
            body = encoded(message)
            return await self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = tls_fault(error) or redacted_text(str(error))
            raise Loss(why, Stage.NOT_TAKEN) from error
        except TimeoutError as error:
            raise Loss(f"no sign of life for {MAX_SILENCE_S:g} s", Stage.CUT_OFF) from error
        except aiohttp.ClientResponseError as error:
            raise Loss(
                f"its answer is no HTTP: {redacted_text(error.message)[:_MAX_QUOTED]}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise Loss(redacted_text(why), Stage.CUT_OFF) from error
        except ValueError as error:  # a header or a number that cannot be sent; it is not quoted
            raise Loss(f"the call cannot be sent ({type(error).__name__})") from error

    async def _from_body(self, response: aiohttp.ClientResponse, message: Any) -> object:
        """The answer in a body. *Raises* Loss."""
        from mcp.shared.message import SessionMessage

        status = response.status
        location = response.headers.get("location")
        if location is not None and 300 <= status < 400:
            raise Loss(f"it redirects to {redacted_text(location)}: use that address as url")
        body = await _read(response)
        try:
            answer: Any = decoded(body)
        except ValueError as error:
            answer, why = None, str(error)
        if status == 404 and self._session_id:
            raise Loss("it does not know the session any more", Stage.NOT_TAKEN)
        if hasattr(answer, "error") or (hasattr(answer, "result") and status < 300):
            if status < 300 and message.method == "initialize":
                self._session_id = response.headers.get(_SESSION, "")
            answer.id = message.id  # the server may not have read the id
            return SessionMessage(answer)
        if status >= 300:
            words = redacted_text(body[: 4 * _MAX_QUOTED].decode("utf-8", "replace")).strip()
            raise Loss(f"HTTP {status}{f': {words[:_MAX_QUOTED]}' if words else ''}")
        kind = response.headers.get("content-type", "none").split(";")[0]
        if kind != "application/json":
            raise Loss(f"it answered with content of the type {kind[:100]!r}")
        raise Loss(f"its answer cannot be read: {why if answer is None else 'it is a request'}")

    async def _from_stream(
        self, response: aiohttp.ClientResponse, message: Any, decoder: EventDecoder
    ) -> object:
        """The answer in a stream of events; None when it ends before. *Raises* Loss."""
        from mcp.shared.message import SessionMessage

        if message.method == "initialize":
            self._session_id = response.headers.get(_SESSION, "")
        max_bytes, num_unread, num_bytes, num_questions = mcp_messages.MAX_MESSAGE_BYTES, 0, 0, 0
        try:
            async for chunk in response.content.iter_any():
                num_unread, num_bytes = num_unread + len(chunk), num_bytes + len(chunk)
                for data in decoder.feed(chunk):
                    num_unread = 0
                    if len(data) > max_bytes:
                        raise _too_long()
                    if not data or decoder.name != "message":
                        continue
                    event = decoded(data)
                    num_questions += hasattr(event, "method") and hasattr(event, "id")
                    if num_questions > MAX_QUESTIONS:
                        raise Loss(f"it asks more than {MAX_QUESTIONS} times for an answer")
                    if not hasattr(event, "method"):
                        event.id = message.id
                        return SessionMessage(event)
                    await self._arrived.send(SessionMessage(event))
                if num_unread > 2 * max_bytes or num_bytes > MAX_STREAM_MESSAGES * max_bytes:
                    raise _too_long()
        except ValueError as error:
            raise Loss(f"an event of its answer cannot be read: {error}") from error
        except (aiohttp.ClientError, OSError) as error:  # it may be continued
            log.debug("a stream of %s ended: %s", self._url, error)
        return None

    async def _continued(self, message: object, decoder: EventDecoder) -> object:
        """The answer in the rest of a stream that has ended. *Raises* Loss when there is none."""
        ended = Loss("its stream of events ended before the answer")
        for number in range(MAX_CONTINUED if decoder.last_id else 0):
            asked_s = min((decoder.retry_ms or 0) / 1000, MAX_PAUSE_S)
            await asyncio.sleep(max(asked_s, min(PAUSE_S * 2 ** min(number, 9), MAX_PAUSE_S)))
            headers = {**self._headers(None), "Last-Event-ID": decoder.last_id}
            try:
                response = await self._session.get(
                    self._url, headers=headers, allow_redirects=False
                )
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise ended from error
            last_id, decoder = decoder.last_id, EventDecoder()
            decoder.last_id = last_id
            try:
                if not _is_stream(response):
                    raise ended
                if answer := await self._from_stream(response, message, decoder):
                    return answer
            finally:
                response.close()
        raise ended


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    """Whether an answer is a stream of events. *Raises* Loss for one that is compressed."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        response.close()
        raise Loss("it compressed an answer although it was asked not to")
    kind = response.headers.get("content-type", "").lower()
    return response.status < 300 and kind.startswith("text/event-stream")


def _too_long() -> Loss:
    return Loss(f"its answer is longer than {size_text(mcp_messages.MAX_MESSAGE_BYTES)}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """*Raises* Loss."""
    max_bytes = mcp_messages.MAX_MESSAGE_BYTES
    try:
        return await read_chunks(response.content.iter_any(), max_bytes, "an answer")
    except TooLong:
        raise _too_long() from None
    except TimeoutError as error:
        raise Loss(f"no sign of life for {MAX_SILENCE_S:g} s within its answer") from error
    except (aiohttp.ClientError, OSError) as error:
        why = redacted_text(str(error) or type(error).__name__)[:_MAX_QUOTED]
        raise Loss(f"its answer is cut: {why}") from error
