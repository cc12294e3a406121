"""An MCP server over HTTP of raw bytes, of the generation with sessions, on loopback.

``answer(message, headers)`` may replace any answer: the bytes of a whole HTTP answer, a coroutine of
them, b"" to close the connection without any, or a function of (reader, writer) that writes itself.
"""

import asyncio
import contextlib
import inspect
import json
import threading

TOOL = {"name": "work", "description": "Work.", "inputSchema": {"type": "object"}}


def http(status, body=b"", kind="application/json", **headers):
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def result(message, **fields):
    body = {"jsonrpc": "2.0", "id": message["id"], "result": fields}
    return http(200, json.dumps(body).encode())


def text(message, words="done"):
    return result(message, content=[{"type": "text", "text": words}])


def error(message, code, words):
    body = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": words}}
    return http(200, json.dumps(body).encode())


def events(*parts, ends=True):
    """An answer as a stream of these bytes, which stays open or ends."""

    async def write(reader, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        for part in parts:
            writer.write(part)
            await writer.drain()
        if not ends:
            await reader.read(1)

    return write


class WireServer:
    def __init__(self, answer=lambda message, headers: None, tools=(TOOL,)):
        self.answer, self.tools = answer, list(tools)
        self.seen, self.calls, self.num_open, self.session = [], [], 0, 1
        self.loop = asyncio.new_event_loop()
        is_ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(is_ready,), daemon=True)
        self.thread.start()
        assert is_ready.wait(10)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def methods(self):
        """HTTP methods and methods of the protocol, as they came."""
        return [message.get("method") or verb for verb, message, _ in self.seen]

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _run(self, is_ready):
        asyncio.set_event_loop(self.loop)
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26, backlog=1000)
        self.server = self.loop.run_until_complete(serving)
        is_ready.set()
        self.loop.run_forever()
        self.server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    async def _serve(self, reader, writer):
        self.num_open += 1
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while await self._exchange(reader, writer):
                await writer.drain()
        self.num_open -= 1
        writer.close()

    async def _exchange(self, reader, writer):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines) if n}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        verb, message = first.split(" ")[0], json.loads(body) if body else {}
        self.seen.append((verb, message, headers))
        if message.get("method") == "tools/call":
            self.calls.append(message["params"].get("arguments", {}).get("x"))
        answer = self.answer(message or {"method": verb}, headers)
        if inspect.isawaitable(answer):
            # a client that leaves ends its answer
            working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(reader.read(1))
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                working.cancel()
                return False
            leaving.cancel()
            await asyncio.wait([leaving])
            answer = await working
        if callable(answer):
            await answer(reader, writer)
            return False
        writer.write(self._usual(verb, message, headers) if answer is None else answer)
        return answer != b""

    def _usual(self, verb, message, headers):
        method = message.get("method")
        if headers.get("mcp-protocol-version", "") >= "2026":
            return http(400, b"Unsupported protocol version", "text/plain")
        if method == "initialize":
            about = {"name": "wire", "version": "1"}
            version = message["params"]["protocolVersion"]
            fields = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": about,
            }
            body = {"jsonrpc": "2.0", "id": message["id"], "result": fields}
            return http(200, json.dumps(body).encode(), mcp_session_id=f"s{self.session}")
        if method and headers.get("mcp-session-id") != f"s{self.session}":
            return http(404, b"no such session", "text/plain")
        if method == "tools/list":
            return result(message, tools=self.tools)
        if method == "tools/call":
            return text(message)
        if method == "ping":
            return result(message)
        return http(202) if method else http(200 if verb == "DELETE" else 405)


@contextlib.contextmanager
def wire_server(*arguments, **options):
    server = WireServer(*arguments, **options)
    try:
        yield server
    finally:
        server.stop()
