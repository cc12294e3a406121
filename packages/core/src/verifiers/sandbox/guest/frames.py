"""Messages between host and guest: two lengths, a JSON object (header), then raw bytes (body).

The host reads answers with ``host.channel``, which validates them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

LENGTHS = struct.Struct("!II")
OUTPUT = struct.Struct("=QQ")
"""Header of the shared output area: bytes of stdout and of stderr so far. Two regions of equal size
follow."""


def outputs_in(area_fd: int, max_bytes: int) -> list[bytes]:
    """stdout and stderr in an output area. Its worker can write to it, so sizes are clamped to the
    bound."""
    head = os.pread(area_fd, OUTPUT.size, 0).ljust(OUTPUT.size, b"\0")
    return [
        os.pread(area_fd, min(size, max_bytes), OUTPUT.size + number * max_bytes)
        for number, size in enumerate(OUTPUT.unpack(head))
    ]


def pack(header: Mapping[str, object], body: bytes = b"") -> bytes:
    """Encode one message."""
    encoded = json.dumps(header).encode("ascii")
    return b"".join((LENGTHS.pack(len(encoded), len(body)), encoded, body))


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read the next message, header and body; None at the end of the stream."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_size, body_size = LENGTHS.unpack(lengths)
    header = json.loads(stream.read(header_size))
    return header, stream.read(body_size) if body_size else b""


def take(received: bytearray) -> tuple[dict[str, Any], bytes] | None:
    """Remove the first message from a buffer; None when it is not complete yet."""
    if len(received) < LENGTHS.size:
        return None
    header_size, body_size = LENGTHS.unpack_from(received)
    start, end = LENGTHS.size + header_size, LENGTHS.size + header_size + body_size
    if len(received) < end:
        return None
    header, body = json.loads(bytes(received[LENGTHS.size : start])), bytes(received[start:end])
    del received[:end]
    return header, body
