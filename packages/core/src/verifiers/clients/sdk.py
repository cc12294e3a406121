"""Read the settings of a plain ``openai`` client for the transport of this package, without
importing ``openai``.

The promise: `read_plain` returns base URL, key, headers, query, timeouts and retry count of an
``OpenAI`` or ``AsyncOpenAI`` with the default behaviour of the SDK; for anything else (a subclass,
a custom HTTP client, credentials other than a key, a replaced ``create``) it returns None, and
``adapters`` calls the object itself. The object itself is never changed or closed.
"""

from __future__ import annotations

from typing import Any

from verifiers.clients.protocol import ClientConfig

SDK_DEFAULT_MAX_RETRIES = 2
_DEFAULT_HTTP_CLIENTS = ("SyncHttpxClientWrapper", "AsyncHttpxClientWrapper")
_OTHER_CREDENTIALS = ("_api_key_provider", "_provider", "workload_identity", "admin_api_key")
_SDK_HEADERS = ("x-stainless-", "accept", "content-type", "user-agent")


def is_sdk_object(client: object) -> bool:
    """Return whether the class of the object belongs to the ``openai`` package."""
    return type(client).__module__.split(".")[0] == "openai"


def read_plain(client: Any) -> dict[str, Any] | None:
    """Return keywords of `OpenAIChatCompletionsClient` for a plain SDK client, else None."""
    if not is_sdk_object(client) or type(client).__name__ not in ("OpenAI", "AsyncOpenAI"):
        return None
    if type(getattr(client, "_client", None)).__name__ not in _DEFAULT_HTTP_CLIENTS:
        return None
    if any(getattr(client, name, None) for name in _OTHER_CREDENTIALS) or _is_patched(client):
        return None
    timeout_s, connect_s = _timeouts(client.timeout)
    retries = client.max_retries
    headers = {
        name: value
        for name, value in client.default_headers.items()
        if isinstance(value, str) and not name.lower().startswith(_SDK_HEADERS)
    }
    config = ClientConfig(
        api_base_url=str(client.base_url),
        timeout=timeout_s,
        connect_timeout=connect_s,
        # An explicit 2 is indistinguishable from the SDK's default and is replaced; any other
        # number is used.
        max_retries=(
            ClientConfig().max_retries if retries == SDK_DEFAULT_MAX_RETRIES else max(0, retries)
        ),
        extra_headers=headers,
    )
    query = {
        name: str(value) for name, value in (getattr(client, "default_query", None) or {}).items()
    }
    return {"config": config, "api_key": client.api_key or "", "query": query}


def _is_patched(client: object) -> bool:
    """Return whether ``create`` is replaced on this instance, which caches ``chat`` and
    ``completions``."""
    attributes = vars(client)
    chat = attributes.get("chat")
    resources = [
        chat,
        attributes.get("completions"),
        vars(chat).get("completions") if hasattr(chat, "__dict__") else None,
    ]
    return any(
        resource is not None
        and (not is_sdk_object(resource) or "create" in getattr(resource, "__dict__", {}))
        for resource in resources
    )


def _timeouts(timeout: object) -> tuple[float, float]:
    """Return (seconds per attempt, seconds to connect) from a number, a ``Timeout`` or None of the
    SDK."""
    defaults = ClientConfig()
    if isinstance(timeout, int | float):
        return float(timeout), min(float(timeout), defaults.connect_timeout)
    read_s, connect_s = getattr(timeout, "read", None), getattr(timeout, "connect", None)
    return read_s or defaults.timeout, connect_s or defaults.connect_timeout
