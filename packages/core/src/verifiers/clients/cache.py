"""A durable cache of completions, opt-in: a request that was answered before is answered from disk
and costs nothing.

The promise: an entry is used for an equal request only: same endpoint and client settings,
messages, tools, sampling arguments, seed, and the same sample (``ModelRequest.sample``: which
sibling, which turn), so that siblings stay different samples. An entry is one file, written
atomically: concurrent processes and kill -9 leave whole entries or none. Its checksum is over the
key of its request too, so an entry that was damaged, changed, moved to the name of another, or that
cannot be read as a reply is a miss. Secrets in the request are not written.

Only requests that say which sample they are, are cached: those of environments and of judges. The
model behind an endpoint is taken to be the same while its name is; delete the folder when that has
changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from verifiers.errors import ConfigError, MalformedResponse
from verifiers.runtime.bounded import read_file
from verifiers.runtime.json import canonical_json, decode_row
from verifiers.runtime.redaction import redacted
from verifiers.storage.files import atomic_write
from verifiers.types import ModelRequest, Response

_writing: set[Path] = set()
"""Entries that a thread of this process is writing: ``atomic_write`` has one temporary name per
process and file."""
_lock = threading.Lock()
_current: ContextVar[CompletionCache | None] = ContextVar("verifiers_cache", default=None)


class _Entry(msgspec.Struct):
    request: msgspec.Raw
    reply: msgspec.Raw
    sha256: str


_DECODER = msgspec.json.Decoder(_Entry)
MAX_ENTRY_BYTES = 512 * 2**20
"""Limit of a file that is read as an entry: a request and its reply."""


def _checksum(key: str, request: bytes, reply: bytes) -> str:
    digest = hashlib.sha256(key.encode())
    for part in (request, reply):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


class CompletionCache:
    """Replies of endpoints by request, below ``folder``. *Raises* ConfigError when it cannot be
    created."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.num_hits = 0
        self.num_misses = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the cache cannot be kept in {folder}: {error.strerror or error}", path=str(folder)
            ) from error

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Cache the requests of this context, and of tasks that start in it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def get(self, key: str, read: Callable[[bytes], Response]) -> Response | None:
        """What ``read`` makes of the reply to an equal request; None without an entry."""
        body = await asyncio.to_thread(self._read, key)
        if body is not None:
            with contextlib.suppress(MalformedResponse):
                response = read(body)
                self.num_hits += 1
                return response
        self.num_misses += 1
        return None

    async def put(self, key: str, request: bytes, reply: bytes) -> None:
        """Store the body of a reply, unless another call of this process is storing a reply for an
        equal request.

        *Raises* ConfigError when it cannot be written.
        """
        redacted_request = msgspec.json.encode(redacted(decode_row(request)))
        checksum = _checksum(key, redacted_request, reply)
        entry = msgspec.json.encode(
            _Entry(msgspec.Raw(redacted_request), msgspec.Raw(reply), checksum)
        )
        try:
            await asyncio.to_thread(self._write, key, entry)
        except OSError as error:
            raise ConfigError(
                f"the cache in {self.folder} cannot be written: {error.strerror or error}"
            ) from error

    def summary(self) -> dict[str, Any]:
        """``folder hits misses`` since it was opened."""
        return {"folder": str(self.folder), "hits": self.num_hits, "misses": self.num_misses}

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key[2:]}.json"

    def _read(self, key: str) -> bytes | None:
        try:
            entry = _DECODER.decode(read_file(self._path(key), MAX_ENTRY_BYTES))
        except (OSError, ValueError, RecursionError, msgspec.DecodeError):
            return None
        body = bytes(entry.reply)
        return body if entry.sha256 == _checksum(key, bytes(entry.request), body) else None

    def _write(self, key: str, entry: bytes) -> None:
        path = self._path(key).absolute()
        with _lock:
            if path in _writing:
                return
            _writing.add(path)
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write(path, entry)
        finally:
            with _lock:
                _writing.remove(path)


def current_cache() -> CompletionCache | None:
    """The cache of this context, for requests that say which sample they are."""
    return _current.get()


def cache_key(base_url: str, identity: object, request: ModelRequest, content: bytes) -> str:
    """The key of a request: SHA-256 over everything that may change its reply."""
    parts = {
        "base_url": base_url,
        "client": identity,
        "type": request.message_type,
        "sample": request.sample,
    }
    return hashlib.sha256(canonical_json(parts) + b"\n" + content).hexdigest()


def is_cacheable(client: object) -> bool:
    """Whether the replies of a client are cached: those over HTTP, to a server outside this
    process."""
    members = getattr(client, "members", None)
    if members is not None:
        return all(is_cacheable(member) for member, _ in members)
    return bool(getattr(client, "is_cacheable", False))


def check_cacheable(client: object) -> None:
    """*Raises* ConfigError for a client whose replies are not cached."""
    if not is_cacheable(client):
        raise ConfigError(
            f"cache_dir cannot hold the replies of {type(client).__name__}: only those of"
            " a server over HTTP, reached by OpenAI() or a ClientConfig, are cached"
        )
