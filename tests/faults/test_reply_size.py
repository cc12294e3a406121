"""Promise: memory is bounded whatever a server sends: a reply has a limit on its decoded bytes.

What other readers hold (files, child processes) is in ``core/runtime/test_bounded.py``.
"""

from __future__ import annotations

import gzip
import math
import signal
import socket
import threading
import time
import tracemalloc

import pytest

import verifiers as vf
from support.eval_command import end, install_toy, start
from support.small_envs import single_turn
from verifiers.clients import RetryPolicy
from verifiers.testing import Behaviour, FakeServer

MIB = 2**20
BOMB = gzip.compress(bytes(64 * MIB), 9)
"""65 kB that unpack to 64 MiB."""
MODELS = b'{"data": [{"id": "m"}]}'
ZIPPED = {"Content-Encoding": "gzip"}
NO_REPEATS = RetryPolicy(max_retries=0)


class EndlessServer:
    """Answers every completion with a body that never ends; ``num_bytes`` were accepted by the
    client's side."""

    def __init__(self, head: bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        self.head, self.num_bytes, self.num_closed = head, 0, 0

    def __enter__(self) -> EndlessServer:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
        with connection:
            if connection.recv(2**16).startswith(b"GET"):
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                    % len(MODELS)
                    + MODELS
                )
                return
            try:
                connection.sendall(self.head)
                while True:
                    connection.sendall(chunk)
                    self.num_bytes += len(chunk)
            except OSError:  # the client closed the connection
                self.num_closed += 1


def client_of(server, **fields):
    return vf.OpenAIChatCompletionsClient(base_url=server.url, retry=NO_REPEATS, **fields)


def peak_bytes(run):
    """(what ``run()`` returned, the most memory that Python held meanwhile)."""
    tracemalloc.start()
    try:
        return run(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("status", [200, 500], ids=("a completion", "an error"))
def test_a_reply_that_unpacks_beyond_the_limit_costs_its_rollout_and_little_memory(status):
    bomb = Behaviour(status, ZIPPED, BOMB)
    with FakeServer("1", script=lambda hit: bomb if hit.index == 0 else None) as server:
        client = client_of(server, max_response_bytes=MIB)
        results, peak = peak_bytes(lambda: single_turn(4).evaluate(client, "m", max_concurrent=1))
    (error,) = [error for error in results["errors"] if error is not None]
    assert error["error"] == "MalformedResponse"
    assert "answered with more than 1 MiB (decoded)" in error["message"]
    assert "max_response_bytes" in error["message"]
    assert sum(map(math.isnan, results["rewards"])) == 1
    assert peak < 8 * MIB


def test_with_a_limit_above_the_bomb_it_is_held_whole():
    """Negative control."""
    with FakeServer("1", [Behaviour(200, ZIPPED, BOMB)]) as server:
        client = client_of(server, max_response_bytes=256 * MIB)
        results, peak = peak_bytes(lambda: single_turn(1).evaluate(client, "m"))
    assert "no valid JSON" in results["errors"][0]["message"]
    assert peak > 64 * MIB


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n",
    ],
    ids=("chunked", "until the connection closes", "a length announced"),
)
def test_a_reply_without_end_is_left_at_the_limit_and_its_connection_closed(head):
    with EndlessServer(head) as server:
        client = client_of(server, max_response_bytes=4 * MIB)
        results, peak = peak_bytes(lambda: single_turn(1).evaluate(client, "m", preflight=False))
        deadline = time.monotonic() + 5
        while not server.num_closed and time.monotonic() < deadline:
            time.sleep(0.01)
    assert results["errors"][0]["error"] == "MalformedResponse"
    assert server.num_closed == 1
    assert server.num_bytes < 16 * MIB
    assert peak < 16 * MIB


def test_a_reply_within_the_limit_is_read_and_its_connection_used_again():
    body = '{"choices": [{"message": {"content": "%s"}, "finish_reason": "stop"}]}' % (
        "1" * (MIB // 2)
    )
    zipped = Behaviour(200, ZIPPED, gzip.compress(body.encode()))
    with FakeServer("1", script=lambda hit: zipped) as server:
        client = client_of(server, max_response_bytes=MIB)
        results = single_turn(3).evaluate(client, "m", max_concurrent=1)
        assert len(server.connections) <= 1
    assert [len(completion[-1]["content"]) for completion in results["completions"]] == [
        MIB // 2
    ] * 3


def test_a_judge_that_answers_without_end_leaves_the_reward_unknown():
    with EndlessServer() as server, FakeServer("1") as policy:
        judge = client_of(server, max_response_bytes=MIB)
        env = single_turn(1)
        env.rubric = vf.JudgeRubric(judge_client=judge, judge_models=["m"])
        results = env.evaluate(client_of(policy), "m")
    assert math.isnan(results["rewards"][0])
    assert "more than 1 MiB" in results["errors"][0]["message"]


def test_sigterm_ends_an_evaluation_that_reads_replies_without_end(tmp_path):
    install_toy(tmp_path)
    with EndlessServer() as server:
        child = start(tmp_path, "toy", "-b", server.url, "-m", "m", "-n", "6", "-c", "6")
        deadline = time.monotonic() + 30
        while server.num_bytes < 128 * MIB and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        ran = end(child)
        assert time.monotonic() - began < 10
    assert ran.code == 143, ran.err


@pytest.mark.parametrize("max_response_bytes", [0, -1])
def test_a_limit_that_nothing_fits_is_refused(max_response_bytes):
    with pytest.raises(
        vf.ConfigError, match="max_response_bytes must be a whole number of at least 1"
    ):
        vf.ClientConfig(max_response_bytes=max_response_bytes)
