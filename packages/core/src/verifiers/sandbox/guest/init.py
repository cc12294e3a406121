"""Guest init: the first process of a sandbox that the host reaches over a stream instead of a
shared socket.

It handles requests from the host and forwards requests for the code to a worker. Two programs:

    main SETTINGS                 # requests on stdin, replies on stdout; ends when stdin closes
    main SETTINGS SOCKET          # in the background; requests over connections to the Unix socket SOCKET
    send SOCKET REQUEST [REPLY]   # one request; prints the reply as base64, above MAX_PRINTED writes it to file REPLY

SETTINGS is base64 of JSON. A request is a message of ``frames``, and so is its reply; replies come
in the order of the requests. Operations (``op``):

* ``start``: start a new worker.
* ``forward``: the body is a request for the worker, the reply's body its answer; the reply is
  ``gone`` when the worker ended or its answer is malformed.
* ``kill``: kill every process.
* ``cause``: report why the worker ended.

Replies to ``kill`` and ``cause`` carry the captured stdout and stderr.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

from . import frames, kernel
from .supervisor import Supervisor, restrict

CHUNK = 2**18
MAX_PRINTED = 2**17
"""Characters that ``send`` prints; services bound the output of a command."""
GONE = {"gone": True}


class GuestInit(Supervisor):
    """A supervisor with one worker at a time; ``settings`` as encoded by ``encoded_settings`` on
    the host."""

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings, tuple(settings["places"]))
        self._connection: socket.socket | None = None
        self._poll = select.poll()
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._max_sizes = (settings["max_header_bytes"], settings["max_file_bytes"])
        self._requester: int | None = None
        """Stream whose request waits for the worker's answer."""
        self._max_output = settings["max_output_bytes"]
        self._area = kernel.memory_file("sandbox-output", frames.OUTPUT.size + 2 * self._max_output)

    def serve(self, requests: Requests) -> None:
        """Handle requests until the end of their stream."""
        requests.register(self._poll)
        tick_s = 1.0
        while True:
            for fd, _ in self._poll.poll(tick_s * 1000):
                if self._connection is not None and fd == self._connection.fileno():
                    self._exchange(requests)
                elif not requests.read(fd, self):
                    self.kill()
                    return
            self.reap()
            tick_s = self.check_limits()

    def handle(
        self, stream: int, header: Mapping[str, object], body: bytes, requests: Requests
    ) -> None:
        op = header["op"]
        if op == "forward":
            self._forward(stream, body, requests)
        elif op == "start":
            self._stop(requests)
            self._start(requests)
            requests.reply(stream, {})
        elif op == "cause":
            self.await_worker()
            self._reply_outputs(stream, {"cause": self.cause}, requests)
        else:
            self._stop(requests)
            self._reply_outputs(stream, {}, requests)

    def forget(self, stream: int) -> None:
        """Drop the answer to a request whose requester has disconnected."""
        if self._requester == stream:
            self._requester = None

    def _start(self, requests: Requests) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        os.pwrite(self._area, bytes(frames.OUTPUT.size), 0)
        with theirs:
            self.start_worker(
                theirs, os.dup(self._area), [ours.fileno(), self._area, *requests.fds()]
            )
        self._connection = ours
        self._poll.register(ours, select.POLLIN)

    def _stop(self, requests: Requests) -> None:
        self._disconnect(requests)
        self.kill()

    def _disconnect(self, requests: Requests) -> None:
        """Close the worker's connection; a pending request is answered with ``gone``."""
        if self._connection is not None:
            self._poll.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self._received.clear()
        requester, self._requester = self._requester, None
        if requester is not None:
            requests.reply(requester, GONE)

    def _forward(self, stream: int, body: bytes, requests: Requests) -> None:
        if self._connection is None or self._requester is not None:
            requests.reply(stream, GONE)
            return
        self._requester, self._unsent = stream, memoryview(body)
        self._poll.modify(self._connection, select.POLLIN | select.POLLOUT)

    def _exchange(self, requests: Requests) -> None:
        """Send to the worker and receive from it without blocking. Data other than one answer per
        request ends it."""
        assert self._connection is not None
        try:
            if self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent[:CHUNK]) :]
                if not self._unsent:
                    self._poll.modify(self._connection, select.POLLIN)
        except BlockingIOError:
            pass  # poll reports when the rest can be sent
        except OSError:
            return self._disconnect(requests)
        try:
            chunk = self._connection.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        self._received += chunk
        if not chunk or self._requester is None:
            return self._disconnect(requests)
        size = self._answer_size()
        if size is not None and len(self._received) > size:
            return self._disconnect(requests)
        if size is not None and len(self._received) == size:
            requester, self._requester = self._requester, None
            answer = bytes(self._received)
            self._received.clear()
            return requests.reply(requester, {}, answer)
        return None

    def _answer_size(self) -> int | None:
        """Bytes of the answer, None until its lengths are received; 0 above the bounds: any data is
        too long."""
        if len(self._received) < frames.LENGTHS.size:
            return None
        header, body = frames.LENGTHS.unpack_from(self._received)
        above = header > self._max_sizes[0] or body > self._max_sizes[1]
        return 0 if above else frames.LENGTHS.size + header + body

    def _reply_outputs(self, stream: int, header: dict[str, Any], requests: Requests) -> None:
        outputs = frames.outputs_in(self._area, self._max_output)
        requests.reply(stream, {**header, "sizes": [*map(len, outputs)]}, b"".join(outputs))


class Requests:
    """Source of requests: one stream (input and output), or connections to a socket with one
    request each."""

    def __init__(self, reading: int, writing: int | None, listening: socket.socket | None = None):
        self._writing = writing
        self._listening = listening
        self._received: dict[int, bytearray] = {} if listening else {reading: bytearray()}
        self._clients: dict[int, socket.socket] = {}
        self._poll: select.poll | None = None

    def fds(self) -> list[int]:
        """File descriptors that a worker must not inherit."""
        writing = [] if self._writing is None else [self._writing]
        return [*writing, *self._received, *([self._listening.fileno()] if self._listening else [])]

    def register(self, poll: select.poll) -> None:
        self._poll = poll
        for fd in [self._listening.fileno()] if self._listening else self._received:
            poll.register(fd, select.POLLIN)

    def read(self, fd: int, init: GuestInit) -> bool:
        """Read available data and handle complete requests. False at the end of the
        single stream."""
        assert self._poll is not None
        if self._listening is not None and fd == self._listening.fileno():
            client, _ = self._listening.accept()
            self._clients[client.fileno()], self._received[client.fileno()] = client, bytearray()
            self._poll.register(client, select.POLLIN)
            return True
        if fd not in self._received:
            return True
        chunk = os.read(fd, CHUNK)
        if not chunk:
            init.forget(fd)
            self._close(fd)
            return self._listening is not None
        self._received[fd] += chunk
        while fd in self._received and (message := frames.take(self._received[fd])) is not None:
            init.handle(fd, *message, self)
        return True

    def reply(self, stream: int, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a reply, dropped for a disconnected client; when the single stream is closed, this
        process ends."""
        packed = memoryview(frames.pack(header, body))
        fd = stream if self._writing is None else self._writing
        try:
            while packed:
                packed = packed[os.write(fd, packed) :]
        except OSError:
            if self._listening is None:
                os._exit(0)

    def _close(self, fd: int) -> None:
        assert self._poll is not None
        self._poll.unregister(fd)
        del self._received[fd]
        if fd in self._clients:
            self._clients.pop(fd).close()


def main() -> None:
    """Run the guest init. Does not return."""
    settings = json.loads(base64.b64decode(sys.argv[1]))
    path = sys.argv[2] if len(sys.argv) > 2 else None
    sys.argv[:] = [""]
    os.makedirs(settings["home"], exist_ok=True)
    for folder in settings["folders"]:
        os.makedirs(folder, exist_ok=True)
    if path is None:
        requests = Requests(os.dup(0), os.dup(1))
    else:
        requests = Requests(-1, None, _listen(path))
    _point_to_null(0, 1)
    init = GuestInit(settings)
    if settings["confined"]:
        restrict(settings)
    _point_to_null(2)  # stderr is a host file, which code under gVisor can open as /proc/1/fd/2
    init.serve(requests)
    os._exit(0)


def _listen(path: str) -> socket.socket:
    """Listen on ``path`` and continue in the background; the calling process ends once requests can
    be sent."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    return listening


def _point_to_null(*fds: int) -> None:
    """Redirect file descriptors inherited from the parent to /dev/null, so that their numbers are
    not reused."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)


def send() -> None:
    """Send one request to a guest init that listens on a socket, and print its reply."""
    path, request, *paths = sys.argv[1:]
    packed = base64.b64decode(request) if request != "-" else sys.stdin.buffer.read()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(packed)
        reply = frames.read(cast(BinaryIO, connection.makefile("rb")))
    if reply is None:
        sys.exit("the guest init has ended")
    encoded = base64.b64encode(frames.pack(*reply))
    if len(encoded) > MAX_PRINTED and paths:
        with open(paths[0], "wb") as file:
            file.write(encoded)
        encoded = b"@"
    sys.stdout.buffer.write(encoded)
