"""`FakeServer`: a scripted model behind a real OpenAI-compatible endpoint on loopback, with faults to order.

The promise: what a client meets is real HTTP over a real socket, each request's fault is scripted (status, headers,
delay, drip, reset, garbage, silence), and everything that arrived is on record with its time. It runs in a thread, or
in a child process (``process=True``) when the client's own CPU time is to be measured.

It is a test double: it checks no key, speaks HTTP/1.1 with Content-Length only, and binds to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

from verifiers.errors import VerifiersError
from verifiers.testing import wire
from verifiers.testing.connection import COMPLETION_PATHS, PROPER, Behaviour, Connection, Hit, Script, as_behaviour
from verifiers.testing.replies import Replies, as_error, response_of
from verifiers.testing.scripted import ScriptedClient


class FakeServer:
    """A context manager; ``.url`` is the base URL and ends in ``/v1``. It offers every API a client of ours speaks:
    chat completions, completions, responses and messages, streaming where the request asks for it.

    ``replies``: see ``testing.replies``. ``script``: one entry per completion request (see `as_behaviour`), proper
    answers after its end, or a function of the `Hit`. ``models``: names that ``GET /models`` lists, or its
    `Behaviour`. ``tokens``: send token data to who asks. ``record=False`` keeps counts only.

    Example::

        with FakeServer(["hello"], script=[429, Behaviour(reset=True)]) as server:
            ...  # ClientConfig(api_base_url=server.url)
        assert server.count == 3
    """

    def __init__(
        self,
        replies: Any = "ok",
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
        self._client = ScriptedClient("", tokens=tokens)
        self._replies = Replies(replies)
        plain = isinstance(replies, str) and not tokens
        self._ready = {path: _plain_answer(path, replies) for path in COMPLETION_PATHS[:2]} if plain else {}
        self.connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen; returns when requests can be made. Raises: ``OSError`` when the port is taken."""
        if self._is_process:
            self._start_child()
            return
        started = threading.Event()
        outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(started, outcome), name="fake-server", daemon=True)
        self._thread.start()
        started.wait()
        if isinstance(outcome[0], BaseException):
            self._thread.join()
            raise outcome[0]
        self._loop, self._stopping = outcome

    def stop(self) -> None:
        """Drop every connection and stop listening; the record stays."""
        if self._child is not None:
            self._count = self.count
            self._child.stdin.close()  # type: ignore[union-attr]
            self._child.wait(10)
            self._child.stdout.close()  # type: ignore[union-attr]
            self._child = None
        elif self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)
            self._thread = None

    @property
    def count(self) -> int:
        """Completion requests that arrived."""
        if self._child is not None:
            with urllib.request.urlopen(self.url.removesuffix("/v1") + "/stats", timeout=10) as answer:
                stats = json.load(answer)
            self.max_in_flight = stats["max_in_flight"]
            return int(stats["count"])
        return self._count

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
            [sys.executable, "-m", "verifiers.testing.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        pickle.dump(self._settings, self._child.stdin)  # type: ignore[arg-type]
        self._child.stdin.flush()  # type: ignore[union-attr]
        self.url = self._child.stdout.readline().decode().strip()  # type: ignore[union-attr]
        if not self.url:
            raise OSError("the server process did not start")

    def _run(self, started: threading.Event, outcome: list[Any]) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve(started, outcome))

    async def _serve(self, started: threading.Event, outcome: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        try:
            server = await loop.create_server(lambda: Connection(self), *self._address, backlog=8192)
        except OSError as error:
            outcome.append(error)
            started.set()
            return
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"
        outcome += [loop, stopping]
        started.set()
        await stopping.wait()
        server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()

    # --- one request, in the server's thread ---------------------------------------------------------------------

    def count_up(self, num_completions: int) -> int:
        """The index of a request that arrived."""
        self._count += num_completions
        self._num_others += 1 - num_completions
        self.in_flight += num_completions
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        return (self._count if num_completions else self._num_others) - 1

    def leave(self, num_completions: int) -> None:
        """A request is over."""
        self.in_flight -= num_completions

    def handle(self, connection: Connection, hit: Hit) -> None:
        """Answer a request as replies and script say."""
        if hit.path not in COMPLETION_PATHS or hit.method != "POST":
            self._handle_other(connection, hit)
            return
        if self._record:
            self.hits.append(hit)
        behaviour = self._behaviour(hit)
        if behaviour is PROPER and hit.path in self._ready and b'"stream"' not in hit.body:
            connection.answer_later(self._ready[hit.path], self._delay_s)
            return
        task = asyncio.get_running_loop().create_task(self._answer(connection, hit, behaviour))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _handle_other(self, connection: Connection, hit: Hit) -> None:
        self.other_hits.append(hit)
        if hit.path == "/stats":
            stats = {"count": self._count, "max_in_flight": self.max_in_flight}
            connection.answer(wire.http_answer(200, json.dumps(stats).encode()))
        elif hit.path != "/v1/models":
            connection.answer(wire.http_answer(404, wire.error_body("Not Found")))
        elif isinstance(self._models, Behaviour):
            task = asyncio.get_running_loop().create_task(connection.act(self._models, b""))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            connection.answer(wire.http_answer(200, wire.models_body(list(self._models))))

    def _behaviour(self, hit: Hit) -> Behaviour:
        if self._script is None:
            return PROPER
        if callable(self._script):
            return as_behaviour(self._script(hit))
        return as_behaviour(self._script[hit.index]) if hit.index < len(self._script) else PROPER

    async def _answer(self, connection: Connection, hit: Hit, behaviour: Behaviour) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        body = b""
        if behaviour.body is None and behaviour.status == 200:
            status, body = await self._completion(hit)
            if status != 200:
                behaviour = Behaviour(status, behaviour.headers, body, behaviour.delay_s)
        await connection.act(behaviour, body)

    async def _completion(self, hit: Hit) -> tuple[int, bytes]:
        """(status, body) of the script's reply."""
        try:
            request = wire.read_request(hit.path, hit.body)
        except ValueError as error:
            return 400, wire.refusal_body(hit.path, 400, str(error))
        try:
            reply = await self._replies.next(request)
        except Exception as error:  # noqa: BLE001 - the script's own failure is told to the client
            reply = error
        if failure := as_error(reply):
            status = failure.status if isinstance(failure, VerifiersError) else None
            return status or 500, wire.refusal_body(hit.path, status or 500, str(failure))
        response = self._client.finish(response_of(reply, request, hit.index), request)
        return 200, wire.answer_body(hit.path, hit.body, response, request)


def _plain_answer(path: str, text: str) -> bytes:
    """The whole answer of a server that always says the same."""
    request = wire.read_request(path, b'{"model": "scripted", "messages": [], "prompt": ""}')
    return wire.http_answer(200, wire.completion_body(response_of(text, request, 0), request))


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
