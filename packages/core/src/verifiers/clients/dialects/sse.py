"""Server-sent events: events to bytes, and bytes in pieces of any size to events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verifiers.clients.payload import encode

COMMENT = b": keep-alive\n\n"
"""A line that every reader of events skips."""


def event(data: Mapping[str, object] | bytes, name: str | None = None) -> bytes:
    r"""Return the bytes of an event.

    >>> event({"a": 1}, "ping")
    b'event: ping\ndata: {"a":1}\n\n'
    """
    text = data if isinstance(data, bytes) else encode(data)
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: " + text + b"\n\n"


class EventDecoder:
    r"""Yields the data of each whole event; comments are skipped, as ``data`` holds the type.

    ``name``, ``last_id`` and ``retry_ms`` are those of the event that was yielded last.

    >>> decoder = EventDecoder()
    >>> [*decoder.feed(b"event: x\r\nda"), *decoder.feed(b"ta: 1\r\n\r\n: keep-alive\n\nid: 7\ndata: 2\n\n")]
    ['1', '2']
    >>> decoder.last_id
    '7'
    """

    def __init__(self) -> None:
        self._unread: list[bytes] = []
        self._lines: list[str] = []
        self._next_name = ""
        self.name = "message"
        self.last_id = ""
        self.retry_ms: int | None = None

    def feed(self, received: bytes) -> Iterator[str]:
        """Yield the data of the events that these bytes complete."""
        self._unread.append(received)
        if b"\n" not in received:  # joined once, however many pieces a line comes in
            return
        *lines, unread = b"".join(self._unread).split(b"\n")
        self._unread = [unread]
        for line in lines:
            if line in (b"", b"\r"):
                self.name, self._next_name = self._next_name or "message", ""
                if self._lines:
                    data = "\n".join(self._lines)
                    self._lines = []
                    yield data
            else:
                self._take(*line.removesuffix(b"\r").partition(b":")[::2])

    def _take(self, field: bytes, content: bytes) -> None:
        text = content.removeprefix(b" ").decode("utf-8", "replace")
        match field:
            case b"data":
                self._lines.append(text)
            case b"event":
                self._next_name = text
            case b"id":
                self.last_id = text
            case b"retry" if text.isascii() and text.isdigit():
                self.retry_ms = int(text[:9])

    def last(self) -> Iterator[str]:
        """Yield the data of a last event without its blank line, at the end of the stream; it may
        be cut."""
        yield from self.feed(b"\n\n")
