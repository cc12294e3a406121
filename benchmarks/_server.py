"""A minimal model server: precomputed responses over a bare asyncio protocol.

It runs in a separate process, so that a benchmark's CPU time is the client's alone, and it is
faster than any client here, so that none of them waits for it. It responds after ``delay_s`` with
valid OpenAI JSON for each turn, with 256 token ids and log-probabilities where requested.

It validates nothing and injects no faults; the scripted server for tests is
``verifiers.testing.FakeServer``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from functools import cache, partial

from _measure import new_event_loop, raise_open_file_limit

TEXT = "The answer is 42. " * 20
"""Every completion of the model."""

TOOL_TURNS = 4
"""Turns on which a model with tools calls one; the next is a text."""
TOKENS_PER_TURN = 256
PROMPT_TOKENS, ENVIRONMENT_TOKENS = 128, 16
"""Tokens of the first prompt, and of the environment's message between two turns."""


class BareServer:
    """A context manager around the server process; ``.url`` ends in ``/v1``."""

    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s
        self.url = ""

    def __enter__(self) -> BareServer:
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(self.delay_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.url = self._child.stdout.readline().strip()
        if not self.url:
            raise OSError("the server process did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate(timeout=10)  # closes its stdin, which ends it


@cache
def answer(turn: int, with_tokens: bool, with_tools: bool = False) -> bytes:
    """The HTTP response of one turn; with tools, a tool call on the first ``TOOL_TURNS``."""
    num_prompt = PROMPT_TOKENS + turn * (TOKENS_PER_TURN + ENVIRONMENT_TOKENS)
    choice: dict = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": TEXT},
    }
    if with_tools and turn < TOOL_TURNS:
        function = {"name": "square", "arguments": json.dumps({"n": turn})}
        choice["message"] = {"role": "assistant", "content": None}
        choice["message"]["tool_calls"] = [
            {"id": f"call_{turn}", "type": "function", "function": function}
        ]
        choice["finish_reason"] = "tool_calls"
    body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    if with_tokens:
        token_ids = [7 + i % 90 for i in range(num_prompt + TOKENS_PER_TURN)]
        body["prompt_token_ids"] = token_ids[:num_prompt]
        choice["token_ids"] = token_ids[num_prompt:]
        sampled = [
            {"token": f"t{i}", "logprob": -0.001 * i - 0.12345} for i in range(TOKENS_PER_TURN)
        ]
        choice["logprobs"] = {"content": sampled}
    body["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": TOKENS_PER_TURN,
        "total_tokens": num_prompt + TOKENS_PER_TURN,
    }
    return _http(json.dumps(body).encode())


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


MODELS = _http(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')


class _Connection(asyncio.Protocol):
    """The connection of one client, which sends a request only after the previous response."""

    def __init__(self, delay_s: float):
        self._delay_s = delay_s
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, received: bytes) -> None:
        self._received = buffer = self._received + received
        head, blank, body = buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        if head.startswith(b"GET"):
            self._received = b""
            self._transport.write(MODELS)
            return
        _, _, after = head.lower().partition(b"content-length:")
        if len(body) < int(after.split(b"\r\n", 1)[0]):
            return
        self._received = b""
        buffer = answer(
            body.count(b'"assistant"'), b'"return_token_ids"' in body, b'"tools":' in body
        )
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._send, buffer)
        else:
            self._transport.write(buffer)

    def _send(self, buffered: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(buffered)


async def _serve(delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(_Connection, delay_s), "127.0.0.1", 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    raise_open_file_limit()
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(_serve(float(sys.argv[1])))
