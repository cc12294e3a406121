"""Loopback is never reached through a proxy, a key goes to no other address, and no message has it."""

import asyncio
import http.server
import socketserver
import threading
import urllib.error
import urllib.request

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
