"""Clients of the APIs whose answers are streams: OpenAI's responses and Anthropic's messages.

The promise: a request and its answer are those of the dialect, nothing that the vendor needs back
is lost; a stream that is cut, silent for too long or not of the dialect is a failure that is
repeated, never a shorter answer; a part of a request that an endpoint refuses by name is left out
from then on.

The dialects are in ``dialects``, the connection is that of ``http``, and ``retry`` is the only
retry layer.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import aiohttp
from yarl import URL

from verifiers.clients.dialects import ClientDialect, EventDecoder, messages, responses
from verifiers.clients.failures import refuses_argument
from verifiers.clients.http import HttpClient
from verifiers.clients.payload import encode
from verifiers.clients.reply import excerpt, malformed, streamed_error
from verifiers.errors import MalformedResponse, ModelUnavailable
from verifiers.runtime.decoding import MAX_REPLY_VALUES, check_values, decode_message
from verifiers.types import ModelRequest, Response

STREAM = "stream"
"""The part of a request that an endpoint without streams refuses."""
MAX_UNCHECKED_BYTES = 4 * 2**20
"""Of a stream, between two looks at how much it has become."""
ANTHROPIC_VERSION = "2023-06-01"


class StreamedClient(HttpClient):
    """A client of a dialect."""

    dialect: ClassVar[ClientDialect]

    def _body(self, request: ModelRequest, without: frozenset[str]) -> bytes:
        return encode(
            self.dialect.request_body(request, stream=STREAM not in without, without=without)
        )

    def _refused_part(
        self, status: int, answer: bytes, request: ModelRequest, without: frozenset[str]
    ) -> str | None:
        if refuses_argument(status, answer, STREAM):
            return STREAM
        return self.dialect.concession(status, answer)

    def _response(self, answer: bytes, request: ModelRequest, where: str) -> Response:
        body_read = _object(answer, where)
        if (error := body_read.get("error")) and not body_read.keys() & {
            "choices",
            "content",
            "output",
        }:
            raise streamed_error(error)
        response = self.dialect.parse_response(body_read, request, where)
        return replace(response, raw=body_read) if self.keep_raw else response

    def _idle_timeout(self) -> float | None:
        return self.config.idle_timeout

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body; that of a stream is put together from its events."""
        if response.status != 200 or response.content_type != "text/event-stream":
            return await super()._read(response)
        decoder, reader = EventDecoder(), self.dialect.stream_reader()
        num_bytes = num_unchecked = 0
        try:
            async for chunk in response.content.iter_any():
                num_bytes += len(chunk)
                if num_bytes > self.config.max_response_bytes:
                    raise self._too_long()
                for data in decoder.feed(chunk):
                    reader.feed(data)
                    num_unchecked += len(data)
                    if num_unchecked > MAX_UNCHECKED_BYTES:  # small events add up
                        check_values(encode(reader.body()), MAX_REPLY_VALUES)
                        num_unchecked = 0
                if reader.is_done:
                    return encode(reader.body())
            with suppress(json.JSONDecodeError):  # a last event that is cut
                for data in decoder.last():
                    reader.feed(data)
            if reader.is_whole:
                return encode(reader.body())
        except ValueError as error:
            message = (
                f"{self.base_url} streamed an event that is none of the {self.dialect.NAME} API:"
                f" {error}"
            )
            raise MalformedResponse(message, url=self.base_url) from error
        finally:
            if not response.content.at_eof():
                response.close()
        raise ModelUnavailable(
            f"{self.base_url} ended its stream before the answer was whole", url=self.base_url
        )


def _object(body: bytes, where: str) -> dict[str, object]:
    try:
        body_read = decode_message(body, MAX_REPLY_VALUES, len(body))
    except ValueError as error:
        raise malformed(body, where, error) from error
    if isinstance(body_read, dict):
        return body_read
    raise MalformedResponse(f"{where} answered 200 with no JSON object", body=excerpt(body))


class OpenAIResponsesClient(StreamedClient):
    """OpenAI's responses API over HTTP, as a stream. Parameters: see `OpenAIChatCompletionsClient`.

    Nothing is stored at the vendor (``store=False``); encrypted reasoning is kept in the message's
    ``thinking_blocks`` and sent back on the next turn. Raises: ``ConfigError`` for arguments the
    API lacks (``seed``, ``stop``).

    >>> client = vf.OpenAIResponsesClient(base_url="http://127.0.0.1:8000/v1")
    >>> client.config.client_type, client.config.api_key_var
    ('openai_responses', 'OPENAI_API_KEY')
    """

    client_type = "openai_responses"
    path = "responses"
    dialect: ClassVar[ClientDialect] = responses


class AnthropicMessagesClient(StreamedClient):
    """Anthropic's messages API over HTTP, as a stream. Parameters: see
    `OpenAIChatCompletionsClient`.

    The base URL may end in ``/v1`` or stand before it. Thinking blocks with their signatures are
    kept in the message's ``thinking_blocks`` and sent back on the next turn. A call without
    ``max_tokens`` gets 8192, because the API requires a limit. Raises: ``ConfigError`` for
    arguments the API lacks (``seed``, penalties).

    >>> client = vf.AnthropicMessagesClient(base_url="http://127.0.0.1:8000")
    >>> client.config.client_type, client.config.api_key_var
    ('anthropic_messages', 'ANTHROPIC_API_KEY')
    """

    client_type = "anthropic_messages"
    path = "messages"
    dialect: ClassVar[ClientDialect] = messages
    key_header = "x-api-key"

    def _credentials(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": ANTHROPIC_VERSION} | ({self.key_header: key} if key else {})

    def _url(self, path: str) -> URL:
        return super()._url(path if self._base.name == "v1" else f"v1/{path}")
