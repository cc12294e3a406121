"""HTTP transport to a model endpoint, and the clients of OpenAI-compatible completions.

The promise: one pooled session per event loop, opened by the first request there and closed with
the loop; bodies are decoded straight to `Response`, without SDK objects; every failure is an
exception of ``errors`` without secrets; ``retry`` is the only retry layer. The constructor opens
nothing and needs no key.

This module neither normalizes messages nor selects the model.
"""

from __future__ import annotations

import asyncio
import functools
import io
import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Unpack

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from verifiers.clients.cache import cache_key, current_cache
from verifiers.clients.failures import (
    Endpoint,
    Standing,
    failure,
    of_account,
    refuses_argument,
    without_reply,
)
from verifiers.clients.limiter import AdaptiveLimiter
from verifiers.clients.pacing import Pace, pace_of
from verifiers.clients.payload import (
    LIMIT_NAMES,
    limit_name,
    reasoning_name,
    refused_in_history,
    to_body,
)
from verifiers.clients.protocol import ClientConfig, ClientOptions, vendor_of
from verifiers.clients.reply import StreamedError, decode, excerpt, to_response
from verifiers.clients.retry import RetryPolicy, call_with_retries
from verifiers.clients.spending import metered
from verifiers.errors import (
    ConfigError,
    EndpointUnreachable,
    MalformedResponse,
    MissingKeyError,
    ModelRefused,
    ModelUnavailable,
    RateLimited,
)
from verifiers.runtime.bounded import TooLong, read_chunks, size_text
from verifiers.runtime.calls import PerLoop
from verifiers.runtime.deadlines import Deadline
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.http_clients import (
    header_value,
    is_loopback_url,
    open_session,
    tls_fault,
)
from verifiers.runtime.redaction import (
    digested,
    is_plain_header,
    remember_secrets,
    remember_values,
)
from verifiers.runtime.signatures import spell_out
from verifiers.storage.described import describe, type_name
from verifiers.storage.identity import Free, Identified
from verifiers.types import ModelRequest, Response

KEEPALIVE_S = 4.5  # below the 5 s after which uvicorn closes an idle connection
SPARE_FILES = 64  # files that the rest of the process may open later


_VARIABLE = re.compile(r"([A-Za-z]{1,20} )?\$(?:([A-Za-z_]\w{0,99})|\{([A-Za-z_]\w{0,99})\})")
"""A header that is the value of a variable, after the name of a scheme or alone."""


class Pool:
    """Resources of a client in one event loop: session, limiter, what is known of the key and the
    models, and the endpoint for error messages."""

    __slots__ = ("endpoint", "limiter", "session", "standing")

    def __init__(
        self, session: aiohttp.ClientSession, limiter: AdaptiveLimiter, endpoint: Endpoint
    ):
        self.session = session
        self.limiter = limiter
        self.endpoint = endpoint
        self.standing = Standing()


Answer = tuple[int, bytes, tuple[str | None, str | None]]
"""(status, body, headers retry-after-ms and Retry-After) of an exchange."""


@dataclass(slots=True)
class Call:
    """A completion on its way: what is sent, and what its attempts have found."""

    request: ModelRequest
    url: URL
    headers: Mapping[str, str] | None
    without: frozenset[str]
    """Parts of the request that are left out, because the endpoint refused them."""
    body: bytes
    num_tokens: int = 0
    """What the last exchange counts for its pace."""
    keep: Callable[[bytes], Awaitable[None]] | None = None
    """Puts the answer into the cache."""


class HttpClient(Identified, ABC):
    """What the clients of all APIs share: settings, connections, the key, one exchange, the check
    before a run.

    Parameters: see `OpenAIChatCompletionsClient`.
    """

    client_type: str
    path: str
    """Where model calls are posted, below the base URL."""
    key_header = "Authorization"
    is_metered = is_cacheable = True

    @spell_out(ClientOptions, ClientConfig)
    def __init__(
        self,
        config: ClientConfig | None = None,
        *,
        base_url: Annotated[str | None, Free("a server may move; the run notes it")] = None,
        api_key: Annotated[str | None, Free("a secret")] = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        retry: Annotated[RetryPolicy | None, Free("only how often a failure is repeated")] = None,
        keep_raw: Annotated[bool, Free("only what stays in memory")] = False,
        tools_shown: bool | None = None,
        **fields: Unpack[ClientOptions],
    ):
        if config is not None and not isinstance(config, ClientConfig):
            raise ConfigError(
                f"config must be a ClientConfig, not {type(config).__name__}; as_client() accepts"
                " other types"
            )
        if config is not None and vendor_of(config.client_type) != vendor_of(self.client_type):
            raise ConfigError(
                f"{type(self).__name__} needs ClientConfig(client_type={self.client_type!r}); this"
                f" one is of type {config.client_type!r}, whose URL and key are another vendor's",
                key="client_type",
            )
        try:
            config = replace(config or ClientConfig(client_type=self.client_type), **fields)
        except TypeError as error:
            raise ConfigError(f"{type(self).__name__}: {error}") from None
        if base_url is not None:
            config = replace(config, api_base_url=base_url)
        if headers:
            config = replace(config, extra_headers={**config.extra_headers, **headers})
        self.config = config
        self.keep_raw = keep_raw
        self._tools_shown = tools_shown
        self.retry = retry or RetryPolicy(max_retries=config.max_retries)
        self._api_key = api_key
        # model -> parts of a request that the endpoint refused by name, left out from then on
        self._without: defaultdict[str, frozenset[str]] = defaultdict(frozenset)
        base = _parse_base_url(config.api_base_url)
        self._query = {**base.query, **(query or {})}
        self._base = base.with_query(None)
        remember_secrets(self._query)
        self._post_url = self._url(self.path)
        self._pools: PerLoop[Pool] = PerLoop(self._open, lambda pool: pool.session.close())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    @property
    def base_url(self) -> str:
        """The base URL without a query."""
        return str(self._base)

    def identity(self) -> dict[str, object]:
        """The settings that affect a request; ``headers`` and further fields are part of
        ``config``."""
        return {
            "class": type_name(type(self)),
            "config": describe(self.config),
            "query": {  # of a key its digest
                name: digested(f"?{name}={value}").partition("=")[2]
                for name, value in self._query.items()
            },
            "tools_shown": self._tools_shown,
        }

    def check_key(self) -> None:
        """*Raises* MissingKeyError when the endpoint needs a key and its variable is not set. Sends
        nothing."""
        self._key()
        self._headers()

    # --- one completion: each sender adds one concern to the one below it -------------------------

    async def complete(self, request: ModelRequest) -> Response:
        """Return one completion, from the current cache if it is there. Raises as
        `Client.complete`."""
        call = self._call(request)
        cache = None if request.sample is None else current_cache()
        if cache is not None:
            content = to_body(request, "max_tokens")  # under one name of the token limit
            key = cache_key(self.base_url, self.identity(), request, content)
            stored = await cache.get(key, lambda body: self._response(body, request, self.base_url))
            if stored is not None:
                return stored
            call.keep = functools.partial(cache.put, key, content)
        return await self._retried(call)

    async def _retried(self, call: Call) -> Response:
        """Make attempts within the current budget until one succeeds; what every request would
        meet is told from what this one meets."""
        attempt, pool = metered(self, call.request, lambda: self._attempt(call)), self._pools.here()
        attempts = call_with_retries(attempt, self.retry, pool.limiter, call.request.timeout_s)
        return await pool.standing.call(call.request.model, attempts)

    async def _attempt(self, call: Call) -> Response:
        """Make one attempt and read its answer, whose tokens count for the pace, and which goes
        into the cache."""
        pool, request = self._pools.here(), call.request
        try:
            answer = await self._negotiated(call, pool)
            response = self._read_answer(answer, request, pool.endpoint)
        except StreamedError as error:
            raise failure(error.status, str(error).encode(), pool.endpoint, request.model) from None
        self._without[request.model] |= reasoning_name(response)
        if (pace := self._pace()) is not None:
            pace.settle(call.num_tokens, response)
        if call.keep is not None:
            await call.keep(answer)
        return response

    async def _negotiated(self, call: Call, pool: Pool) -> bytes:
        """Post the request, again without each part that the endpoint refuses by name. Raises the
        `failure` of any other refusal."""
        while True:
            status, answer, retry_after = await self._paced(call, pool)
            if status == 200:
                self._without[call.request.model] |= call.without
                return answer
            part = self._refused_part(status, answer, call.request, call.without)
            if part is None or part in call.without:
                raise failure(status, answer, pool.endpoint, call.request.model, retry_after)
            call.without |= {part}
            call.body = self._body(call.request, call.without)

    async def _paced(self, call: Call, pool: Pool) -> Answer:
        """Post the request once, when the rates of the endpoint allow it."""
        if (pace := self._pace()) is not None:
            call.num_tokens = await pace.wait(call.request)
        return await self._exchange(pool, "POST", call.url, call.body, call.headers)

    def _call(self, request: ModelRequest) -> Call:
        without = self._without[request.model]
        is_text = request.message_type == "completion"
        return Call(
            request,
            self._url("completions") if is_text else self._post_url,
            request_headers(request),
            without,
            self._body(request, without),
        )

    def _read_answer(self, answer: bytes, request: ModelRequest, endpoint: Endpoint) -> Response:
        """The answer read; one without a reply says why, without the body as it came."""
        try:
            return self._response(answer, request, endpoint.url)
        except MalformedResponse as error:
            refused = without_reply(error, answer, endpoint, request.model)
            raise refused from error.__cause__  # its own text holds the body as it came

    @abstractmethod
    def _body(self, request: ModelRequest, without: frozenset[str]) -> bytes:
        """The body of a request without the parts that the endpoint refused."""

    @abstractmethod
    def _refused_part(
        self, status: int, answer: bytes, request: ModelRequest, without: frozenset[str]
    ) -> str | None:
        """The part of a request ``without`` others that an error answer refuses by name; None for
        another failure."""

    @abstractmethod
    def _response(self, answer: bytes, request: ModelRequest, where: str) -> Response:
        """The answer read. Raises: ``MalformedResponse`` that names ``where``; `StreamedError`."""

    async def shows_tools(self) -> bool | None:
        """Return ``tools_shown`` of the constructor; the server is not queried."""
        return self._tools_shown

    async def aclose(self) -> None:
        """Close the session of the running loop; other loops keep theirs, and a later request opens
        another."""
        await self._pools.aclose()

    async def preflight(self, model: str | None = None, timeout_s: float = 10.0) -> str | None:
        """Ask for the models before a run; return a warning when they lack ``model``, else None.

        A server without a listing is sent nothing else: the first request of the run finds a wrong
        URL or key.

        Raises: ``EndpointUnreachable`` (nothing listens, not an API), ``AuthenticationFailed``,
        ``BudgetExhausted`` (an account without money), ``MissingKeyError``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                names = await self.list_models()
        except TimeoutError:
            raise EndpointUnreachable(
                f"{self.base_url} did not answer within {timeout_s:g} s", url=self.base_url
            ) from None
        except ModelRefused as error:
            raise of_account(error) or error from error.__cause__
        except (ModelUnavailable, RateLimited) as error:
            if error.status is not None:
                return f"{error}; requests will be repeated"
            message = f"{error}: start the server or correct the base URL"
            raise EndpointUnreachable(message, url=self.base_url) from error.__cause__
        if model is None or not names or model in names:
            return None
        return (
            f"{self.base_url} lists {', '.join(names[:5])}{', …' if len(names) > 5 else ''}, not"
            f" {model!r}"
        )

    async def list_models(self) -> list[str] | None:
        """Return the names that ``GET /models`` lists, or None without a listing. One attempt, no
        retries."""
        pool = self._pools.here()
        status, body, retry_after = await self._exchange(
            pool, "GET", self._url("models"), None, None
        )
        if status in (400, 404, 405, 422, 501):
            return None
        if status != 200:
            raise failure(status, body, pool.endpoint, "", retry_after)
        try:
            listing = decode_message(body)
        except ValueError:
            what = "a web page" if body.lstrip()[:1] == b"<" else "no JSON"
            message = (
                f"{self.base_url} answered with {what}, it is not a model API: correct the base URL"
                " (…/v1)"
            )
            raise EndpointUnreachable(message, url=self.base_url, status=status) from None
        entries = listing.get("data") if isinstance(listing, dict) else None
        entries = entries if isinstance(entries, list) else []
        return [
            entry["id"]
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]

    async def _exchange(
        self,
        pool: Pool,
        method: str,
        url: URL,
        body: bytes | None,
        headers: Mapping[str, str] | None,
    ) -> Answer:
        """Return the answer of a HTTP exchange."""
        data: object = body if body is None or len(body) < 2**20 else io.BytesIO(body)
        try:
            with Deadline(self.config.timeout):
                response = await pool.session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                )
                content = await self._read(response)
            if 200 <= response.status < 300:  # some proxies answer every POST with 201
                return 200, content, (None, None)
            return (
                response.status,
                content,
                (response.headers.get("retry-after-ms"), response.headers.get("Retry-After")),
            )
        except TimeoutError as error:
            what = _timeout_text(error, self.config)
            raise ModelUnavailable(f"{self.base_url} {what}", url=self.base_url) from error
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
            if fault := tls_fault(error):  # no repetition and no other server mends it
                message = f"no answer from {self.base_url}: {fault}"
                raise EndpointUnreachable(message, url=self.base_url) from error
            message = f"no answer from {self.base_url} ({_connection_fault(error)})"
            raise ModelUnavailable(pool.endpoint.redact(message), url=self.base_url) from error
        except ValueError as error:  # raised by aiohttp for a header with a line end
            raise ModelRefused(
                f"a header of the call to {self.base_url} cannot be sent", url=self.base_url
            ) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The decoded body; the connection is released at its end, and closed when cancelled or
        when it is too long."""
        chunks = response.content.iter_any()
        try:
            return await read_chunks(chunks, self.config.max_response_bytes, "the reply")
        except BaseException as error:
            # a cancellation too: the next request would read the rest of the body
            response.close()
            if not isinstance(error, TooLong):
                raise
            raise self._too_long() from error

    def _too_long(self) -> MalformedResponse:
        return MalformedResponse(
            f"{self.base_url} answered with more than {size_text(self.config.max_response_bytes)}"
            " (decoded), so the connection was closed; if its replies are that long, set"
            " max_response_bytes of its ClientConfig higher",
            url=self.base_url,
        )

    def _open(self) -> Pool:
        config = self.config
        key = self._key()
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            **self._headers(),
        }
        for name, value in self._credentials(key).items():
            headers.setdefault(name, value)
        num_connections = min(config.max_connections, connection_room())
        session = open_session(
            self.base_url,
            connector={"limit": num_connections, "keepalive_timeout": KEEPALIVE_S},
            timeout=aiohttp.ClientTimeout(  # the total: _exchange
                total=None, sock_connect=config.connect_timeout, sock_read=self._idle_timeout()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
        )
        return Pool(session, AdaptiveLimiter(num_connections), self._endpoint(key))

    def _pace(self) -> Pace | None:
        config = self.config
        key = config.api_key_var if self._api_key is None else self._api_key
        return pace_of(self.base_url, key, config.requests_per_minute, config.tokens_per_minute)

    def _endpoint(self, key: str | None) -> Endpoint:
        has_key = self._api_key is not None
        written = self.config.extra_headers
        sent = [*self._headers().items(), *self._query.items()]
        secrets = {
            key or "",
            *(  # what a variable brought is always hidden
                value
                for name, value in sent
                if written.get(name, value) != value or not is_plain_header(name, value)
            ),
        }
        return Endpoint(
            url=self.base_url,
            key_name=(
                "the api_key of the client"
                if has_key
                else f"the variable {self.config.api_key_var}"
            ),
            api_key_var=None if has_key else self.config.api_key_var,
            has_key=bool(key) or self._sends_own_key(),
            secrets=tuple(sorted((s for s in secrets if len(s) >= 6), key=len, reverse=True)),
        )

    def _idle_timeout(self) -> float | None:
        """Seconds without a byte after which an attempt fails; None without a bound of its own."""
        return None

    def _credentials(self, key: str | None) -> dict[str, str]:
        """Headers that the API needs beside the request's own."""
        return {self.key_header: f"Bearer {key}"} if key else {}

    def _headers(self) -> dict[str, str]:
        """The headers of the settings, with the values of the variables that they name (``$TEAM``,
        ``Bearer ${TOKEN}``). *Raises* MissingKeyError for a variable that is not set."""
        headers = dict(self.config.extra_headers)
        for header, text in headers.items():
            if (match := _VARIABLE.fullmatch(text)) is None:
                continue
            variable = match[2] or match[3]
            if not (value := os.environ.get(variable, "").strip()):
                raise MissingKeyError(
                    f"the header {header} of {self.base_url} is the value of the variable"
                    f" {variable}, which is not set: set it, or change the header",
                    names=[variable],
                )
            remember_secrets({"api_key": value})
            headers[header] = (match[1] or "") + value
        return headers

    def _key(self) -> str | None:
        key = (
            self._api_key if self._api_key is not None else os.environ.get(self.config.api_key_var)
        )
        if key is None and not is_loopback_url(self.base_url) and not self._sends_own_key():
            name = self.config.api_key_var
            raise MissingKeyError(
                f"{self.base_url} needs a key: set the environment variable {name} (any text where"
                " none is checked)",
                names=[name],
            )
        key = header_value(key or "", f"the key for {self.base_url}")
        remember_values([key])
        return key or None

    def _sends_own_key(self) -> bool:
        """Whether the headers of the settings hold the key."""
        names = {name.lower() for name in self.config.extra_headers}
        return bool(names & {"authorization", self.key_header.lower()})

    def _url(self, path: str) -> URL:
        return (self._base / path).update_query(self._query) if self._query else self._base / path


class OpenAIChatCompletionsClient(HttpClient):
    """Chat completions (and text completions, for requests that ask for them) over HTTP.

    Keywords override the fields of ``config``. ``api_key`` is the key itself; without it the
    variable ``config.api_key_var`` is read at the first request. ``query`` is added to every URL.
    ``keep_raw`` puts the decoded body on ``Response.raw``. ``tools_shown``: whether the chat
    template of the model shows tools; None if unknown.

    Example: ``OpenAIChatCompletionsClient(base_url="http://127.0.0.1:8000/v1", max_retries=4)``

    >>> client = vf.OpenAIChatCompletionsClient(vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1"))
    >>> client.base_url
    'http://127.0.0.1:8000/v1'
    """

    client_type = "openai_chat_completions"
    path = "chat/completions"

    def _body(self, request: ModelRequest, without: frozenset[str]) -> bytes:
        name = limit_name(without, is_older=request.message_type == "completion")
        return to_body(request, name, without.difference(LIMIT_NAMES))

    def _refused_part(
        self, status: int, answer: bytes, request: ModelRequest, without: frozenset[str]
    ) -> str | None:
        name = limit_name(without, is_older=request.message_type == "completion")
        if refuses_argument(status, answer, name):
            return name
        text = excerpt(answer, 2000)
        return refused_in_history(status, text, request, without.difference(LIMIT_NAMES))

    def _response(self, answer: bytes, request: ModelRequest, where: str) -> Response:
        completion = decode(answer, where)
        raw = None
        if self.keep_raw:  # with the arrays that ``decode`` skips
            raw = decode_message(answer, self.config.max_response_bytes // 16, len(answer))
        return to_response(completion, request, where, raw)


class OpenAICompletionsClient(OpenAIChatCompletionsClient):
    """Text completions over HTTP. Raises: ``ConfigError`` for a request with messages.

    >>> vf.OpenAICompletionsClient(vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1")).base_url
    'http://127.0.0.1:8000/v1'
    """

    client_type = "openai_completions"
    path = "completions"

    async def complete(self, request: ModelRequest) -> Response:
        if not isinstance(request.prompt, str):
            raise ConfigError(
                "openai_completions continues text: use message_type='completion', or a chat client"
            )
        if request.message_type != "completion":
            request = replace(request, message_type="completion")
        return await super().complete(request)


def request_headers(request: ModelRequest) -> CIMultiDict[str] | None:
    """Return the headers of a request beside those of the session, in aiohttp's type, which it
    would make of them."""
    if request.rollout_id is None and not request.headers:
        return None
    headers = CIMultiDict(request.headers or ())
    if request.rollout_id is not None:
        headers["X-Session-ID"] = request.rollout_id
    return headers


def _parse_base_url(text: str) -> URL:
    url = URL(text.strip().rstrip("/"))
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"the base URL {text!r} is no http(s) URL; it looks like http://127.0.0.1:8000/v1"
        )
    if url.user or url.password:
        raise ConfigError(
            "the base URL contains a user or password; put the key into a variable, or use"
            " extra_headers"
        )
    return url


def connection_room() -> int:
    """Return how many connections this process may open, with ``SPARE_FILES`` in reserve; at least
    8."""
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError:  # unsupported on this platform
        num_open = 0
    return max(8, open_file_limit() - num_open - SPARE_FILES)


def open_file_limit() -> int:
    """Return how many files this process may have open; a large number on platforms without a
    limit."""
    try:
        import resource
    except ImportError:
        return 8192
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1_000_000


def _timeout_text(error: TimeoutError, config: ClientConfig) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"accepted no connection within {config.connect_timeout:g} s"
    if isinstance(error, aiohttp.SocketTimeoutError):
        return f"sent nothing for {config.idle_timeout:g} s (idle_timeout of its ClientConfig)"
    return f"did not finish a response within {config.timeout:g} s"


def _connection_fault(error: Exception) -> str:
    """Describe a connection error briefly; the exception itself is chained."""
    cause = getattr(error, "os_error", None) or error.__cause__ or error
    if isinstance(cause, ConnectionRefusedError) or "refused" in str(cause).lower():
        return "connection refused"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError | BrokenPipeError):
        return "connection closed by the server"
    return f"{type(error).__name__}: {error}"[:200]
