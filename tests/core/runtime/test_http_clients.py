"""Loopback is never reached through a proxy, a key goes to no other address, and no message has it."""

import asyncio
import contextlib
import http.server
import socketserver
import threading
import urllib.error
import urllib.request

import aiohttp
import pytest

from verifiers.errors import ConfigError
from verifiers.runtime import http_clients
from verifiers.runtime.http_clients import header_value, is_loopback_url, open_session, open_url

SECRET = "Zq7-private-value-of-the-test"


class Recorder(http.server.BaseHTTPRequestHandler):
    seen: list
    redirects_to = None

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(307 if self.redirects_to else 200)
        if self.redirects_to:
            self.send_header("Location", self.redirects_to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def servers():
    """Two: (their address, what they were asked, their class)."""
    started = []
    for _ in range(2):
        recorder = type("OneRecorder", (Recorder,), {"seen": []})
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), recorder)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        started.append((server, recorder))
    yield [(f"http://127.0.0.1:{s.server_address[1]}", r.seen, r) for s, r in started]
    for server, _ in started:
        server.shutdown()
        server.server_close()


async def by_session(url):
    async with (
        open_session(url, headers={"Authorization": SECRET}) as session,
        session.get(url, allow_redirects=False) as answer,
    ):
        return answer.status


def by_urllib(url):
    request = urllib.request.Request(url, headers={"Authorization": SECRET})
    try:
        with open_url(request, 5.0) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def ask(url):
    return [asyncio.run(by_session(url)), by_urllib(url)]


@pytest.mark.parametrize("is_asked", [False, True], ids=["loopback", "another machine"])
def test_a_proxy_of_the_environment_is_not_asked_for_loopback(monkeypatch, servers, is_asked):
    """The second is the negative control: with another name it would be."""
    (proxy, asked_proxy, _), (server, asked, _) = servers
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    if is_asked:
        monkeypatch.setattr(http_clients, "is_loopback_url", lambda url: False)
    assert ask(server) == [200, 200]
    assert (len(asked_proxy), len(asked)) == ((2, 0) if is_asked else (0, 2))


def test_a_redirect_is_an_error_and_takes_no_key_along(servers):
    (first, _, recorder), (second, asked, _) = servers
    recorder.redirects_to = second
    assert ask(first) == [307, 307]
    assert asked == []


@pytest.mark.parametrize(
    ("url", "is_loopback"),
    [
        ("http://127.0.0.1:1/v1", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:80", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://0.0.0.0:8000", True),
        ("http://LOCALHOST./x", True),
        ("http://a.localhost", True),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1.example.org", False),
        ("http://10.0.0.1", False),
        ("http://[::2", False),
        ("", False),
    ],
)
def test_what_loopback_is(url, is_loopback):
    assert is_loopback_url(url) is is_loopback


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \t"])
def test_a_key_of_a_mounted_file_is_sent_without_its_end(end):
    assert header_value(SECRET + end, "KEY") == SECRET


@pytest.mark.parametrize("middle", ["\n", "\r", "\0", "ä", "\x7f"])
def test_a_key_that_no_header_takes_is_named_and_not_quoted(middle):
    with pytest.raises(ConfigError, match=r"^KEY contains characters") as caught:
        header_value(SECRET + middle + "x", "KEY")
    assert SECRET not in str(caught.value)


# --- connections that are kept --------------------------------------------------------------------


async def answers_beside(surplus_s, session_of):
    """What three requests get of a server that sends a second answer to the first one,
    ``surplus_s`` later."""

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                for text in ("/0", "surplus") if path == "/0" else (path,):
                    if text == "surplus":
                        await asyncio.sleep(surplus_s)
                    body = text.encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                    )
                    await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    said = []
    async with session_of(url) as session:
        for path in ("/0", "/1", "/2"):
            async with session.get(url + path) as answer:
                said.append(await answer.text())
            await asyncio.sleep(0.1)
    server.close()
    return said


@pytest.mark.parametrize("surplus_s", [0.0, 0.02])
async def test_an_answer_that_nobody_asked_for_is_nobodys(surplus_s):
    assert await answers_beside(surplus_s, open_session) == ["/0", "/1", "/2"]


async def test_negative_control_kept_as_it_is_a_connection_gives_it_to_the_next_request():
    said = await answers_beside(0.02, lambda url: aiohttp.ClientSession())
    assert said == ["/0", "surplus", "/1"]


async def test_a_silent_connection_is_used_again():
    opened = []

    async def serve(reader, writer):
        opened.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with open_session(url) as session:
        for _ in range(5):
            async with session.get(url) as answer:
                await answer.read()
    server.close()
    assert len(opened) == 1
