"""Server-sent events: events to bytes, and bytes in pieces of any size to events.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.clients.payload import encode

COMMENT = b": keep-alive\n\n"
"""A line that every reader of events skips."""


def event(data: Mapping[str, Any] | bytes, name: str | None = None) -> bytes:
    r"""Return the bytes of an event.

    >>> event({"a": 1}, "ping")
    b'event: ping\ndata: {"a":1}\n\n'
    """
    text = data if isinstance(data, bytes) else encode(data)
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: " + text + b"\n\n"


class EventDecoder:
    r"""Yields the data of each whole event; comments, names and ids are skipped, as ``data`` holds
    the type.

    >>> decoder = EventDecoder()
    >>> [*decoder.feed(b"event: x\r\nda"), *decoder.feed(b"ta: 1\r\n\r\n: keep-alive\n\ndata: 2\n\n")]
    ['1', '2']
    """

    def __init__(self) -> None:
        self._unread = b""
        self._lines: list[str] = []

    def feed(self, received: bytes) -> Iterator[str]:
        """Yield the data of the events that these bytes complete."""
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            if line in (b"", b"\r"):
                if self._lines:
                    data = "\n".join(self._lines)
                    self._lines = []
                    yield data
            elif line.startswith(b"data:"):
                text = line[5:].decode("utf-8", "replace")
                self._lines.append(text.removesuffix("\r").removeprefix(" "))
