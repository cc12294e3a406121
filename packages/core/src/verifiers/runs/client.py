"""The client of one call: resolved from what the caller gave, and closed only when it was made for this call.

A client object, ``OpenAI()``, or the process's own client may be in use by other calls in the same event loop; closing
it here would cut their requests off. What such a client holds ends with its loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verifiers import clients
from verifiers.clients import Client, ClientConfig, EndpointConfig


@asynccontextmanager
async def client_for(client: Any, model: Any, *, keep_raw: bool = False) -> AsyncIterator[tuple[Client, str]]:
    """(client, model name) of a call. Raises: ``ConfigError`` that lists the ways to name one."""
    resolved, name = clients.client_and_model(client, model, keep_raw=keep_raw)
    try:
        yield resolved, name
    finally:
        if _is_settings(client):
            await clients.close(resolved)


def _is_settings(given: Any) -> bool:
    """Whether a client was made from settings alone, so that nobody else holds it."""
    if isinstance(given, list | tuple):
        return all(_is_settings(member) for member in given)
    if isinstance(given, str):
        return given.partition(":")[0] != "local"
    return isinstance(given, ClientConfig | EndpointConfig)
