"""Control calls to one inference server, each with a name and a deadline.

A failed call raises ``WeightSyncError`` with ``stage`` (the name of the call), ``elapsed_s`` and
the last ``response``. Calls are not retried here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES, TooLong, read_chunks
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.http_clients import header_value, open_session, tls_fault
from verifiers_trainer.engines.loop_thread import LoopThread

MAX_RESPONSE_CHARS = 400
"""Maximum number of characters of a response in an error."""
POLL_S = 0.25
POLL_TIMEOUT_S = 5.0
GRACE_S = 1.0
"""Seconds after its deadline in which a call may still raise."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The state of a server: policy version, model name of requests, and number of repairs."""

    version: int
    model: str
    repairs: int = 0


@dataclass(slots=True)
class Server:
    """A server. ``url`` is its root, without ``/v1``."""

    url: str
    api_key: str
    thread: LoopThread = field(repr=False)
    serving: Serving = Serving(-1, "")
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    @property
    def base_url(self) -> str:
        """Root of the OpenAI routes."""
        return f"{self.url}/v1"

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        stage: str,
        timeout_s: float,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """The decoded response of a call. Raises ``WeightSyncError`` on a time-out or a status
        other than 2xx."""
        started = time.monotonic()

        def late() -> WeightSyncError:
            return self.failure(f"did not answer within {timeout_s:.3g} s", stage, started)

        work = self._exchange(method, path, body, query, timeout_s, stage, started)
        return self.thread.wait(work, timeout_s + GRACE_S, late)

    def begin(
        self, method: str, path: str, body: object = None, *, stage: str, timeout_s: float
    ) -> Future[Any]:
        """Start a call without waiting for its response."""
        assert self.thread.loop is not None
        work = self._exchange(method, path, body, None, timeout_s, stage, time.monotonic())
        return asyncio.run_coroutine_threadsafe(work, self.thread.loop)

    def failure(
        self, reason: str, stage: str, started: float, response: str | None = None
    ) -> WeightSyncError:
        """The error of a failed call."""
        return WeightSyncError(
            f"{stage}: {self.url} {reason}",
            stage=stage,
            elapsed_s=time.monotonic() - started,
            response=response,
            url=self.url,
        )

    def is_healthy(self, timeout_s: float = POLL_TIMEOUT_S) -> bool:
        """Whether ``/health`` answers 200 now."""
        try:
            self.call("GET", "/health", stage="health", timeout_s=timeout_s)
        except WeightSyncError:
            return False
        return True

    def wait_healthy(
        self, timeout_s: float, stage: str = "waiting for the server to answer /health"
    ) -> None:
        """Return once ``/health`` answers. Raises ``WeightSyncError`` after ``timeout_s``, and at
        once for a server that is not trusted."""
        started, ask_s = time.monotonic(), min(POLL_TIMEOUT_S, max(0.1, timeout_s))
        while True:
            try:
                self.call("GET", "/health", stage="health", timeout_s=ask_s)
                return
            except WeightSyncError as error:
                if tls_fault(error):
                    raise
                if time.monotonic() - started >= timeout_s:
                    reason = f"did not become healthy within {timeout_s:.3g} s"
                    raise self.failure(reason, stage, started) from error
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None
        if session is not None and self.thread.is_running:
            self.thread.wait(
                session.close(), POLL_TIMEOUT_S, lambda: TimeoutError("the session does not close")
            )

    async def _exchange(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, str] | None,
        timeout_s: float,
        stage: str,
        started: float,
    ) -> object:
        if self._session is None:  # on the thread's loop
            self._session = open_session(
                self.url,
                uses_proxy=False,
                headers={"Authorization": f"Bearer {header_value(self.api_key, 'the key')}"},
                connector={"force_close": True},  # servers may restart meanwhile
            )
        request = self._session.request(
            method,
            self.url + path,
            json=body,
            params=query,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        )
        try:
            async with request as answer:
                content = await read_chunks(
                    answer.content.iter_any(), MAX_OUTPUT_BYTES, "the reply"
                )
        except TimeoutError as error:
            reason = f"did not answer within {timeout_s:.3g} s"
            raise self.failure(reason, stage, started) from error
        except (aiohttp.ClientError, OSError) as error:
            why = tls_fault(error) or f"{type(error).__name__}: {error}"
            reason = f"gave no answer ({why})"
            raise self.failure(reason, stage, started) from error
        except TooLong as error:
            raise self.failure(f"gave no answer ({error})", stage, started) from error
        text = content.decode("utf-8", "replace")
        if not 200 <= answer.status < 300:
            summary = f"HTTP {answer.status} {' '.join(text.split())[:MAX_RESPONSE_CHARS]}"
            raise self.failure(f"answered {summary}", stage, started, summary)
        try:
            return decode_message(text) if text.strip() else None
        except ValueError:
            return text


def server_urls(urls: str) -> list[str]:
    """The roots of one or several servers, separated by commas; a trailing ``/v1`` is optional.

    >>> server_urls("http://127.0.0.1:8000/v1, http://0.0.0.0:8001")
    ['http://127.0.0.1:8000', 'http://127.0.0.1:8001']
    """
    roots = []
    for text in filter(None, (part.strip() for part in urls.split(","))):
        url = URL(text if "://" in text else f"http://{text}")
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"{text!r} is no URL of an inference server; it looks like http://127.0.0.1:8000/v1"
            )
        if url.host == "0.0.0.0":  # a listen address, not a destination
            url = url.with_host("127.0.0.1")
        path = url.path.rstrip("/")
        roots.append(str(url.with_path(path.removesuffix("/v1")).with_query(None)).rstrip("/"))
    if not roots:
        raise ConfigError("no URL of an inference server is given")
    return roots
