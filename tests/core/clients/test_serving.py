"""The base of the servers of model APIs over real sockets: bounds, refusals, streams, start and
stop."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from verifiers.clients import serving
from verifiers.clients.dialects import DIALECTS
from verifiers.clients.serving import ModelServer, read_object, send_stream
from verifiers.errors import ModelRefused
from verifiers.runtime.decoding import MAX_VALUES

MAX_BYTES = 1000


class Echo(ModelServer):
    """Answers with the number of bytes or of fields of a body, or as a stream of two events and a
    refusal."""

    max_body_bytes = MAX_BYTES

    def __init__(self, port=0):
        super().__init__()
        self.port = port
        self.num_ended = 0

    async def listen(self, runner):
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]

    async def respond(self, request):
        if request.path == "/bytes":
            return {"size": len(await self.body(request))}
        if request.path == "/stream":
            return await send_stream(
                request, self.events(int(request.query["after"])), self.error_event
            )
        if request.path == "/hold":
            await self.body(request)
            self.released = asyncio.Event()
            await self.released.wait()
            return {}
        if request.path == "/wait":
            try:
                await asyncio.sleep(60)
            finally:
                self.num_ended += 1
        return {"size": len(read_object(await self.body(request)))}

    async def events(self, num_events):
        for _ in range(num_events):
            yield b"data: 1\n\n"
        raise ModelRefused("no more", status=503, field="messages")

    def error_event(self, status, message):
        return f"data: {status} {message}\n\n".encode()


@pytest.fixture
def server():
    echo = Echo()
    echo.start()
    yield echo
    echo.stop()


async def post(server, path, data=b"{}", **more):
    async with aiohttp.ClientSession() as session:
        async with session.post(
            f"http://127.0.0.1:{server.port}{path}", data=data, **more
        ) as reply:
            return reply.status, await reply.text()


@pytest.mark.parametrize(("size", "status"), [(MAX_BYTES, 200), (MAX_BYTES + 1, 413)])
async def test_a_body_above_the_bound_is_refused_and_one_at_it_is_read(server, size, status):
    assert (await post(server, "/bytes", b"x" * size))[0] == status


async def test_the_bound_counts_decoded_bytes(server):
    status, text = await post(server, "/bytes", b"x" * 10**6, compress="deflate")
    assert (status, json.loads(text)["error"]["message"]) == (
        413,
        "the body is longer than 1000 bytes",
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 999, b"\xff"])
async def test_what_is_no_object_is_refused(server, body):
    assert (await post(server, "/v1/chat/completions", body))[0] == 400


@pytest.mark.parametrize(("num_values", "status"), [(MAX_VALUES, 200), (MAX_VALUES + 1, 400)])
async def test_the_objects_of_a_body_are_bounded_before_they_are_made(num_values, status):
    body = b'{"a": [' + b",".join([b"1"] * (num_values - 1)) + b"]}"  # two brackets, the commas
    echo = Echo()
    echo.max_body_bytes = len(body)
    echo.start()
    try:
        assert (await post(echo, "/v1/chat/completions", body))[0] == status
    finally:
        echo.stop()


async def test_the_oldest_idle_connection_makes_room_and_none_in_use_does():
    echo = Echo()
    echo.max_idle = 3
    echo.start()
    try:
        waiting = asyncio.ensure_future(post(echo, "/wait"))
        await asyncio.sleep(0.3)
        opened = []
        for _ in range(5):
            opened.append(await asyncio.open_connection("127.0.0.1", echo.port))
            await asyncio.sleep(0.1)
        ended = [reader.at_eof() for reader, _ in opened]
        assert ended == [True, True, False, False, False]
        assert not waiting.done()
        waiting.cancel()
    finally:
        for _, writer in opened:
            writer.close()
        echo.stop()


async def test_long_bodies_wait_until_there_is_room_for_them_and_short_ones_do_not(monkeypatch):
    monkeypatch.setattr(serving, "SHORT_BYTES", 10)
    echo = Echo()
    echo.max_held_bytes, echo.max_idle_s = 1500, 1.0
    echo.start()
    try:
        first = asyncio.ensure_future(post(echo, "/hold", b"x" * 1000))
        await asyncio.sleep(0.2)
        second = asyncio.ensure_future(post(echo, "/bytes", b"x" * 1000))
        assert (await post(echo, "/bytes", b"x" * 10))[0] == 200
        status, text = await second
        assert (status, "the body was not read within 1 s" in text) == (503, True)
        third = asyncio.ensure_future(post(echo, "/bytes", b"x" * 1000))
        await asyncio.sleep(0.2)
        assert not third.done()
        echo.call(echo.released.set)
        assert [(await each)[0] for each in (first, third)] == [200, 200]
    finally:
        echo.stop()


async def test_a_body_that_does_not_come_is_refused_in_time():
    echo = Echo()
    echo.max_idle_s = 0.3
    echo.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
        writer.write(b"POST /bytes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
    finally:
        echo.stop()


async def test_what_is_no_http_is_one_line_of_the_log(server, caplog):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nbad header\r\n\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    (record,) = [record for record in caplog.records if record.name == serving.log.name]
    assert record.exc_info is None
    assert "\n" not in record.getMessage()


async def test_negative_control_a_fault_of_the_server_has_its_traceback(
    server, caplog, monkeypatch
):
    async def broken(self, request):
        raise LookupError("a fault")

    monkeypatch.setattr(Echo, "respond", broken)
    assert (await post(server, "/"))[0] == 500
    (record,) = [record for record in caplog.records if record.name == serving.log.name]
    assert record.exc_info is not None


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_refusal_has_the_form_of_its_path(server, name):
    _, text = await post(server, f"/v1/{DIALECTS[name].PATHS[0]}", b"[]")
    assert json.loads(text) == DIALECTS[name].error_body(400, "the body is not an object")


async def test_a_stream_is_refused_as_a_whole_before_its_first_event_and_inside_after_it(server):
    status, text = await post(server, "/stream?after=0")
    error = json.loads(text)["error"]
    assert (status, error["message"], error["param"]) == (503, "no more", "messages")
    assert await post(server, "/stream?after=2") == (
        200,
        "data: 1\n\ndata: 1\n\ndata: 503 no more\n\n",
    )


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /bytes HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    )
    assert (
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    )
    writer.write(b"abc")
    assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_a_client_that_disconnects_ends_its_request(server):
    with contextlib.suppress(TimeoutError):
        await post(server, "/wait", timeout=aiohttp.ClientTimeout(0.2))
    for _ in range(100):
        if server.num_ended:
            break
        await asyncio.sleep(0.05)
    assert server.num_ended == 1


def test_an_address_that_is_taken_is_an_error_of_the_start():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match="address already in use"),
    ):
        Echo(listener.getsockname()[1]).start()


def test_a_start_that_takes_too_long_is_an_error(monkeypatch):
    async def never(self, runner):
        await asyncio.sleep(1)

    monkeypatch.setattr(Echo, "listen", never)
    with pytest.raises(TimeoutError, match="no answer"):
        Echo().start(0.1)


async def test_stop_ends_what_is_answered_and_may_be_called_again(server):
    waiting = asyncio.ensure_future(post(server, "/wait"))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(server.stop)
    server.stop()
    with pytest.raises(aiohttp.ClientError):
        await waiting
    assert server.shutdown_s < serving.STOP_S


async def begin(server, head, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /bytes HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


CHUNKED = b"Transfer-Encoding: chunked"
HEADS = {"chunked": CHUNKED, "announced": b"Content-Length: 1500"}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_a_body_counts_as_it_comes_so_one_that_does_not_end_takes_no_room(monkeypatch, head):
    monkeypatch.setattr(serving, "SHORT_BYTES", 10)
    echo = Echo()
    echo.max_held_bytes, echo.max_body_bytes = 1500, 5000
    echo.start()
    try:
        begun = [await begin(echo, head, b"5\r\nabcde\r\n") for _ in range(3)]
        await asyncio.sleep(0.1)
        status, _ = await asyncio.wait_for(post(echo, "/bytes", b"x" * 1400), 5)
        assert status == 200
        for _, writer in begun:
            writer.close()
    finally:
        echo.stop()


async def test_bodies_that_all_wait_for_the_rest_of_their_room_end_one_after_another(monkeypatch):
    monkeypatch.setattr(serving, "SHORT_BYTES", 10)
    echo = Echo()
    echo.max_held_bytes, echo.max_body_bytes = 1500, 5000
    echo.start()
    try:
        part = b"2bc\r\n" + b"x" * 700 + b"\r\n"
        begun = [await begin(echo, CHUNKED, part) for _ in range(2)]
        await asyncio.sleep(0.1)
        for _, writer in begun:
            writer.write(part)
        await asyncio.sleep(0.1)
        for _, writer in begun:
            writer.write(b"0\r\n\r\n")
        for reader, writer in begun:
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
            writer.close()
    finally:
        echo.stop()


async def test_a_body_that_stands_still_is_refused_before_its_time_is_over():
    echo = Echo()
    echo.max_stall_s = 0.3
    echo.start()
    try:
        reader, writer = await begin(echo, CHUNKED, b"3\r\nabc\r\n")
        assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
        assert b"because none of it came for 0.3 s" in await reader.read(1000)
        writer.close()
    finally:
        echo.stop()


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    ("lines", "body", "said"),
    [
        (
            "Content-Encoding: br\r\nContent-Length: 2\r\n",
            b"xx",
            "the body cannot be decoded, send it",
        ),
        ("Content-Encoding: gzip\r\nContent-Length: 2\r\n", b"xx", "the body cannot be decoded as"),
        ("bad header\r\n", b"", "the request is no HTTP"),
    ],
    ids=["br", "gzip", "header"],
)
async def test_what_cannot_be_read_is_refused_in_the_form_of_its_path(
    server, name, lines, body, said, monkeypatch
):
    monkeypatch.setattr("aiohttp.http_parser.HAS_BROTLI", False)
    path = f"/v1/{DIALECTS[name].PATHS[0]}"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{lines}\r\n"
    writer.write(head.encode() + body)
    got = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    fields = json.loads(got.partition(b"\r\n\r\n")[2])
    sentence = fields["error"]["message"]
    assert b" 400 " in got.partition(b"\r\n")[0]
    assert said in sentence
    assert "\n" not in sentence
    assert fields == DIALECTS[name].error_body(400, sentence)


async def test_a_fault_of_the_server_is_told_in_the_form_of_its_path(server, monkeypatch):
    async def broken(self, request):
        raise LookupError("what nobody else may read")

    monkeypatch.setattr(Echo, "respond", broken)
    status, text = await post(server, "/v1/messages")
    sentence = "the server failed, its log says why"
    assert (status, json.loads(text)) == (500, DIALECTS["messages"].error_body(500, sentence))
