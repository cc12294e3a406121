"""The first process of a sandbox that is reached by a stream: it takes orders, and passes requests to a worker.

    keeper SETTINGS             # orders on input, replies on output; ends with its input
    keeper SETTINGS SOCKET      # in the background; orders from ``ask``
    ask SOCKET ORDER [REPLY]    # one order there and its reply as base64; above ``MAX_PRINTED`` in the file REPLY

An order is a message of ``frames``, and so is its reply; replies come in the order of orders. ``start``: a new worker.
``ask``: the body is a request for it, the reply's body its answer; ``gone`` when it ended or answered something else.
``kill``: every process is ended. ``cause``: why the worker ended. The last two carry what was written to the outputs.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import sys
from typing import Any, BinaryIO, cast

from . import frames, kernel
from .supervisor import Warden, restrict

CHUNK = 2**18
MAX_PRINTED = 2**17
GONE = {"gone": True}


class Keeper(Warden):
    """One worker at a time; ``settings`` as the owner's ``kept`` makes them."""

    def __init__(self, settings: dict[str, Any]):
        super().__init__(settings, tuple(settings["places"]))
        self._connection: socket.socket | None = None
        self._poll = select.poll()
        self._sending = memoryview(b"")
        self._received = bytearray()
        self._bounds = (settings["max_header_bytes"], settings["max_file_bytes"])
        self._asker: int | None = None
        self._size = settings["max_output_bytes"]
        self._area = kernel.memory_file("sandbox-output", frames.OUTPUT.size + 2 * self._size)

    def loop(self, orders: Orders) -> None:
        """Until the orders end."""
        orders.register(self._poll)
        tick_s = 1.0
        while True:
            for fd, _ in self._poll.poll(tick_s * 1000):
                if self._connection is not None and fd == self._connection.fileno():
                    self._serve(orders)
                elif not orders.ready(fd, self):
                    self.kill()
                    return
            self.reap()
            tick_s = self.watch()

    def obey(self, stream: int, header: dict[str, Any], body: bytes, orders: Orders) -> None:
        op = header["op"]
        if op == "ask":
            self._ask(stream, body, orders)
        elif op == "start":
            self._stop(orders)
            self._begin(orders)
            orders.reply(stream, {})
        elif op == "cause":
            self.await_worker()
            orders.reply(stream, {"cause": self.cause, **self._head()}, self._written())
        else:
            self._stop(orders)
            orders.reply(stream, self._head(), self._written())

    def _begin(self, orders: Orders) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        os.pwrite(self._area, bytes(frames.OUTPUT.size), 0)
        with theirs:
            self.begin(theirs, os.dup(self._area), [ours.fileno(), self._area, *orders.fds()])
        self._connection = ours
        self._poll.register(ours, select.POLLIN)

    def forget(self, stream: int) -> None:
        """Whoever asked is gone: the answer is one that nobody asked for."""
        if self._asker == stream:
            self._asker = None

    def _stop(self, orders: Orders) -> None:
        self._drop(orders)
        self.kill()

    def _drop(self, orders: Orders) -> None:
        """The worker's connection; whoever waits for its answer hears that there will be none."""
        if self._connection is not None:
            self._poll.unregister(self._connection)
            self._connection.close()
            self._connection = None
        self._received.clear()
        asker, self._asker = self._asker, None
        if asker is not None:
            orders.reply(asker, GONE)

    def _ask(self, stream: int, body: bytes, orders: Orders) -> None:
        if self._connection is None or self._asker is not None:
            orders.reply(stream, GONE)
            return
        self._asker, self._sending = stream, memoryview(body)
        self._poll.modify(self._connection, select.POLLIN | select.POLLOUT)

    def _serve(self, orders: Orders) -> None:
        """Send what there is to send, take what came. Not an answer, or one that nobody asked for, ends the worker."""
        assert self._connection is not None
        try:
            if self._sending:
                self._sending = self._sending[self._connection.send(self._sending[:CHUNK]) :]
                if not self._sending:
                    self._poll.modify(self._connection, select.POLLIN)
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(orders)
        try:
            chunk = self._connection.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        self._received += chunk
        if not chunk or self._asker is None:
            return self._drop(orders)
        size = self._answer_size()
        if size is not None and len(self._received) > size:
            return self._drop(orders)
        if size is not None and len(self._received) == size:
            asker, self._asker = self._asker, None
            answer = bytes(self._received)
            self._received.clear()
            return orders.reply(asker, {}, answer)
        return None

    def _answer_size(self) -> int | None:
        """0 for one that is above the bounds, so that whatever came is too much."""
        if len(self._received) < frames.LENGTHS.size:
            return None
        header, body = frames.LENGTHS.unpack_from(self._received)
        above = header > self._bounds[0] or body > self._bounds[1]
        return 0 if above else frames.LENGTHS.size + header + body

    def _sizes(self) -> list[int]:
        return [min(size, self._size) for size in frames.OUTPUT.unpack(os.pread(self._area, frames.OUTPUT.size, 0))]

    def _head(self) -> dict[str, Any]:
        return {"sizes": self._sizes()}

    def _written(self) -> bytes:
        starts = (frames.OUTPUT.size, frames.OUTPUT.size + self._size)
        return b"".join(os.pread(self._area, size, at) for size, at in zip(self._sizes(), starts, strict=True))


class Orders:
    """Where orders come from: one stream (input and output), or connections to a socket, one order each."""

    def __init__(self, reading: int, writing: int | None, listening: socket.socket | None = None):
        self._writing = writing
        self._listening = listening
        self._waiting: dict[int, bytearray] = {} if listening else {reading: bytearray()}
        self._clients: dict[int, socket.socket] = {}
        self._poll: select.poll | None = None

    def fds(self) -> list[int]:
        """What a worker must not have."""
        own = [] if self._writing is None else [self._writing]
        return [*own, *self._waiting, *([self._listening.fileno()] if self._listening else [])]

    def register(self, poll: select.poll) -> None:
        self._poll = poll
        for fd in [self._listening.fileno()] if self._listening else self._waiting:
            poll.register(fd, select.POLLIN)

    def ready(self, fd: int, keeper: Keeper) -> bool:
        """False at the end of the one stream."""
        assert self._poll is not None
        if self._listening is not None and fd == self._listening.fileno():
            client, _ = self._listening.accept()
            self._clients[client.fileno()], self._waiting[client.fileno()] = client, bytearray()
            self._poll.register(client, select.POLLIN)
            return True
        if fd not in self._waiting:
            return True
        chunk = os.read(fd, CHUNK)
        if not chunk:
            keeper.forget(fd)
            self._close(fd)
            return self._listening is not None
        self._waiting[fd] += chunk
        while fd in self._waiting and (message := frames.take(self._waiting[fd])) is not None:
            keeper.obey(fd, *message, self)
        return True

    def reply(self, stream: int, header: dict[str, Any], body: bytes = b"") -> None:
        """A client that went away has none."""
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
        del self._waiting[fd]
        if fd in self._clients:
            self._clients.pop(fd).close()


def main() -> None:
    settings = json.loads(base64.b64decode(sys.argv[1]))
    path = sys.argv[2] if len(sys.argv) > 2 else None
    sys.argv[:] = [""]
    os.makedirs(settings["home"], exist_ok=True)
    for place in settings["folders"]:
        os.makedirs(place, exist_ok=True)
    if path is None:
        streams = os.dup(0), os.dup(1)
    else:
        listening = _listen(path)
    _quiet(0, 1)
    keeper = Keeper(settings)
    if settings["confined"]:
        restrict(settings)
    _quiet(2)  # a file of the owner's, which gVisor lets the code open under /proc/1/fd
    keeper.loop(Orders(*streams) if path is None else Orders(-1, None, listening))
    os._exit(0)


def _listen(path: str) -> socket.socket:
    """The caller's process ends when orders can come; the keeper goes on without it."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    return listening


def _quiet(*fds: int) -> None:
    """Descriptors of the caller's are nobody's here."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)


def ask() -> None:
    path, order, *rest = sys.argv[1:]
    packed = base64.b64decode(order) if order != "-" else sys.stdin.buffer.read()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(packed)
        reply = frames.read(cast(BinaryIO, connection.makefile("rb")))
    if reply is None:
        sys.exit("the keeper is gone")
    encoded = base64.b64encode(frames.pack(*reply))
    if len(encoded) > MAX_PRINTED and rest:
        with open(rest[0], "wb") as file:
            file.write(encoded)
        encoded = b"@"
    sys.stdout.buffer.write(encoded)
