"""`FakeServer`: a scripted model behind a real OpenAI-compatible endpoint on loopback, with faults
to order.

The promise: what a client meets is real HTTP over a real socket, each request's fault is scripted
(status, headers, delay, drip, reset, garbage, silence), and everything that arrived is on record
with its time. It runs in a thread, or in a child process (``process=True``) when the client's own
CPU time is to be measured.

It is a test double: it checks no key, speaks HTTP/1.1, and binds to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from verifiers.clients.payload import encode
from verifiers.clients.serving import START_S, Answer, ModelServer, dialect_of, models_body
from verifiers.errors import ModelRefused, VerifiersError
from verifiers.runtime.http_clients import open_url
from verifiers.testing import wire
from verifiers.testing.connection import (
    COMPLETION_PATHS,
    PROPER,
    Behaviour,
    Hit,
    Script,
    act,
    as_behaviour,
)
from verifiers.testing.replies import Replies, as_error, response_of
from verifiers.testing.scripted import ScriptedClient


class FakeServer(ModelServer):
    """A context manager; ``.url`` is the base URL and ends in ``/v1``. It offers every API a client
    of ours speaks: chat completions, completions, responses and messages, streaming where the
    request asks for it.

    ``replies``: see ``testing.replies``. ``script``: one entry per completion request (see
    `as_behaviour`), proper answers after its end, or a function of the `Hit`. ``models``: names
    that ``GET /models`` lists, or its
    `Behaviour`. ``tokens``: send token data to who asks. ``record=False`` keeps counts only.

    Example::

        with FakeServer(["hello"], script=[429, Behaviour(reset=True)]) as server:
            ...  # ClientConfig(api_base_url=server.url)
        assert server.count == 3
    """

    thread_name = "fake-server"
    shutdown_s = 0.05

    def __init__(
        self,
        replies: object = "ok",
        script: Script = None,
        *,
        tokens: bool = False,
        delay_s: float = 0.0,
        models: Sequence[str] | Behaviour = ("scripted",),
        record: bool = True,
        process: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        super().__init__()
        self.hits: list[Hit] = []
        self.other_hits: list[Hit] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.url = ""
        self._settings = {
            "replies": replies,
            "script": script,
            "tokens": tokens,
            "delay_s": delay_s,
            "models": models,
            "record": record,
            "host": host,
            "port": port,
        }
        self._is_process = process
        self._count = 0
        self._num_others = 0
        self._script = script
        self._models = models
        self._record = record
        self._delay_s = delay_s
        self._address = (host, port)
        self.host = host
        self._client = ScriptedClient("", tokens=tokens)
        self._replies = Replies(replies)
        self._child: subprocess.Popen[bytes] | None = None

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, deadline_s: float = START_S) -> None:
        """Listen; returns when requests can be made. Raises: ``OSError`` when the port is taken."""
        if self._is_process:
            self._start_child()
            return
        super().start(deadline_s)

    def stop(self) -> None:
        """Drop every connection and stop listening; the record stays."""
        if self._child is not None:
            self._count = self.count
            self._child.stdin.close()  # type: ignore[union-attr]
            self._child.wait(10)
            self._child.stdout.close()  # type: ignore[union-attr]
            self._child = None
        else:
            super().stop()

    @property
    def count(self) -> int:
        """Completion requests that arrived."""
        if self._child is not None:
            with open_url(self.url.removesuffix("/v1") + "/stats", 10.0) as answer:
                stats = json.load(answer)
            self.max_in_flight = stats["max_in_flight"]
            return int(stats["count"])
        return self._count

    @property
    def connections(self) -> Collection[Any]:
        """The open connections."""
        return self.http.connections

    @property
    def times_s(self) -> list[float]:
        """When each completion request arrived (``time.monotonic()``)."""
        return [hit.time_s for hit in self.hits]

    @property
    def requests(self) -> list[Any]:
        """The decoded body of each completion request."""
        return [hit.json() for hit in self.hits]

    def _start_child(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "verifiers.testing.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        pickle.dump(self._settings, self._child.stdin)  # type: ignore[arg-type]
        self._child.stdin.flush()  # type: ignore[union-attr]
        self.url = self._child.stdout.readline().decode().strip()  # type: ignore[union-attr]
        if not self.url:
            raise OSError("the server process did not start")

    async def listen(self, runner: web.ServerRunner) -> None:
        await web.TCPSite(runner, *self._address, backlog=8192).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    # --- one request, in the server's thread ------------------------------------------------------

    async def respond(self, request: web.BaseRequest) -> Answer:
        """Answer a request as replies and script say."""
        body = await self.body(request)
        path, _, query = request.raw_path.partition("?")
        is_completion = request.method == "POST" and path in COMPLETION_PATHS
        headers = {name.lower(): value for name, value in request.headers.items()}
        index = self._count if is_completion else self._num_others
        hit = Hit(index, time.monotonic(), request.method, path, query, headers, body)
        if not is_completion:
            self._num_others += 1
            self.other_hits.append(hit)
            return await self._get(request, path)
        self._count += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        if self._record:
            self.hits.append(hit)
        try:
            await asyncio.sleep(self._delay_s)
            behaviour, completion = self._behaviour(hit), b""
            if behaviour.status != 200:
                completion = _error_body(hit, behaviour.status, f"scripted {behaviour.status}")
            elif behaviour.body is None:
                status, completion = await self._completion(hit)
                behaviour = replace(behaviour, status=status)
            return await act(request, behaviour, completion)
        finally:
            self.in_flight -= 1

    async def _get(self, request: web.BaseRequest, path: str) -> Answer:
        if path == "/stats":
            return {"count": self._count, "max_in_flight": self.max_in_flight}
        if path != "/v1/models":
            raise ModelRefused("Not Found", status=404)
        if isinstance(self._models, Behaviour):
            return await act(request, self._models, b"")
        return models_body(*({"id": name} for name in self._models))

    def _behaviour(self, hit: Hit) -> Behaviour:
        if self._script is None:
            return PROPER
        if callable(self._script):
            return as_behaviour(self._script(hit))
        return as_behaviour(self._script[hit.index]) if hit.index < len(self._script) else PROPER

    async def _completion(self, hit: Hit) -> tuple[int, bytes]:
        """(status, body) of the script's reply."""
        try:
            request = wire.read_request(hit.path, hit.body)
        except ValueError as error:
            return 400, _error_body(hit, 400, str(error))
        try:
            reply = await self._replies.next(request)
        except Exception as error:  # noqa: BLE001 - the script's own failure is told to the client
            reply = error
        if failure := as_error(reply):
            status = failure.status if isinstance(failure, VerifiersError) else None
            return status or 500, _error_body(hit, status or 500, str(failure))
        response = self._client.finish(response_of(reply, request, hit.index), request)
        return 200, wire.answer_body(hit.path, hit.body, response, request)


def _error_body(hit: Hit, status: int, message: str) -> bytes:
    return encode(dialect_of(hit.path).error_body(status, message))


def _run_child() -> None:
    """The child process: serve what the parent describes on stdin until stdin ends."""
    server = FakeServer(**pickle.load(sys.stdin.buffer))
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()


if __name__ == "__main__":
    _run_child()
