"""Every server of ours: idle connections, what is no HTTP, and pages of other sites."""

import contextlib
import logging
import re
import socket
import threading
import time

import pytest

from support.embedded import serving as embedded
from support.env_server import served
from support.small_envs import single_turn
from verifiers.clients.serving import ModelServer
from verifiers.testing import FakeServer
from verifiers.view import server as view_server
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library
from verifiers.view.server import Server
from verifiers_agents.gateway import Gateway

IDLE_S = 0.4


@contextlib.contextmanager
def a_gateway(folder):
    gateway = Gateway()
    try:
        yield gateway.url
    finally:
        gateway.stop()


@contextlib.contextmanager
def an_endpoint(folder):
    """Also that of vf-serve."""
    with embedded() as engine:
        yield engine.base_url


@contextlib.contextmanager
def a_test_server(folder):
    with FakeServer() as server:
        yield server.url


@contextlib.contextmanager
def a_served_environment(folder):
    with served(single_turn()) as (url, _):
        yield url


@contextlib.contextmanager
def a_page(folder):
    server = Server(Library(Catalog([folder])))
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(started.set,))
    thread.start()
    started.wait(20)
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


SERVERS = {
    "gateway": (a_gateway, "/r/x/v1/models"),
    "endpoint": (an_endpoint, "/health"),
    "test server": (a_test_server, "/v1/models"),
    "vf-serve-env": (a_served_environment, "/schema"),
    "vf-view": (a_page, "/api/version"),
}


@pytest.fixture(params=SERVERS)
def address(request, tmp_path, monkeypatch):
    """(host, port, path) of a server that closes idle connections early."""
    monkeypatch.setattr(ModelServer, "max_idle_s", IDLE_S)
    monkeypatch.setattr(view_server, "MAX_IDLE_S", IDLE_S)
    monkeypatch.setattr(view_server, "TICKS", 1)
    start, path = SERVERS[request.param]
    with start(tmp_path) as url:
        host, port = re.search(r"//([\w.]+):(\d+)", url).groups()
        yield host, int(port), path


def send(address, *lines, half=False):
    """The answer to these lines of a request, up to the end of the connection."""
    host, port, path = address
    end = "" if half else "\r\n\r\n"
    request = "\r\n".join([f"GET {path} HTTP/1.1", "Connection: close", *lines]) + end
    with socket.create_connection((host, port), timeout=10) as opened:
        opened.sendall(request.encode())
        return b"".join(iter(lambda: opened.recv(65536), b""))


def status(answer):
    return int(answer.split()[1])


@pytest.mark.parametrize("half", ["", "GET / HTTP/1.1\r\nHost: loc"])
def test_a_connection_without_a_request_is_closed_and_the_server_answers(address, half):
    with socket.create_connection(address[:2], timeout=10) as opened:
        opened.sendall(half.encode())
        began = time.monotonic()
        assert opened.recv(1024) == b""
        assert IDLE_S * 0.5 < time.monotonic() - began < 8
    assert status(send(address, f"Host: 127.0.0.1:{address[1]}")) in (200, 401, 404)


def test_what_is_no_http_is_at_most_one_line_of_the_log_for_many(address, caplog):
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            with contextlib.suppress(OSError):
                assert status(send(address, "Host: 127.0.0.1", "no header")) == 400
    assert len(caplog.records) <= 2  # one in a second
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 200


FOREIGN = {
    "another name": ["Host: evil.example"],
    "another origin": ["Origin: http://evil.example", "Host: 127.0.0.1:{port}"],
    "another port's page": ["Origin: http://127.0.0.1:1", "Host: 127.0.0.1:{port}"],
    "a file": ["Origin: null", "Host: 127.0.0.1:{port}"],
    "another site": ["Sec-Fetch-Site: cross-site", "Host: 127.0.0.1:{port}"],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_page_of_another_site_is_refused(address, kind):
    lines = [line.format(port=address[1]) for line in FOREIGN[kind]]
    expected = 421 if kind == "another name" else 403
    assert status(send(address, *lines)) == expected


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_negative_control_programs_and_own_pages_are_answered(address, name):
    host = f"Host: {name}:{address[1]}"
    for lines in (
        [host],
        [host, "Sec-Fetch-Site: same-origin", host.replace("Host: ", "Origin: http://")],
    ):
        assert status(send(address, *lines)) in (200, 401, 404)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_body_that_is_not_what_its_encoding_says_is_refused_in_one_sentence(
    address, encoding, caplog
):
    host, port, path = address
    path = (
        {"/schema": "/tasks", "/v1/models": "/v1/chat/completions", "/health": "/v1/completions"}[
            path.removeprefix("/r/x")
        ]
        if path != "/api/version"
        else path
    )
    head = [f"POST {path} HTTP/1.1", "Connection: close", f"Host: 127.0.0.1:{port}"]
    head += [f"Content-Encoding: {encoding}", "Content-Length: 2", "Content-Type: application/json"]
    with socket.create_connection((host, port), timeout=10) as opened:
        opened.sendall("\r\n".join([*head, "", "xx"]).encode())
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    assert status(answer) in (400, 401, 404, 405)
    assert b"trouble" not in answer
    assert not [record for record in caplog.records if record.exc_info]
