"""``InProcessClient``: the client of a model that this process itself serves on loopback, from its
first request on."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.storage.identity import Identified
from verifiers.types import ModelRequest, Response


class InProcessClient(Identified, ABC):
    """Starts its server at the first request and stops it when it is closed; the constructor starts
    nothing."""

    is_metered = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._http: OpenAIChatCompletionsClient | None = None
        self._num_in_flight = 0

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._http is not None

    async def complete(self, request: ModelRequest) -> Response:
        """Return one completion; the first call starts the server. *Raises* as
        ``Client.complete``."""
        self._num_in_flight += 1
        try:
            return await (await self._running()).complete(request)
        finally:
            self._num_in_flight -= 1

    async def aclose(self) -> None:
        """Close this loop's connections, and stop the server unless requests are in flight."""
        if self._http is not None and self._num_in_flight == 0:
            await self._http.aclose()
            await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop the server and free the model; the next request starts it again."""
        with self._lock:
            self._http = None
            self._close()

    async def _running(self) -> OpenAIChatCompletionsClient:
        """The client of the running server, after waiting for a start by another call."""
        return await asyncio.to_thread(self._start) if self._http is None else self._http

    def _start(self) -> OpenAIChatCompletionsClient:
        with self._lock:
            if self._http is None:
                self._http = self._open()
            return self._http

    @abstractmethod
    def _open(self) -> OpenAIChatCompletionsClient:
        """Start the server; a client of it."""

    @abstractmethod
    def _close(self) -> None:
        """Stop the server."""
