"""Model clients: one request in, one response or one classified error out.

``as_client`` accepts ``OpenAI``, ``AsyncOpenAI``, a test double, a config, a registry alias or
``"local"``; plain SDK clients use the transport of this package, which is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from verifiers.clients.endpoints import EndpointGroup, load_endpoints
from verifiers.clients.protocol import Client, ClientConfig, EndpointConfig
from verifiers.clients.resolve import (
    as_client,
    client_and_model,
    close,
    register_model_resolver,
    use_client,
)

if TYPE_CHECKING:
    from verifiers.clients.http import OpenAIChatCompletionsClient, OpenAICompletionsClient
    from verifiers.clients.retry import RetryPolicy
    from verifiers.clients.streamed import AnthropicMessagesClient, OpenAIResponsesClient

__all__ = [
    "AnthropicMessagesClient",
    "Client",
    "ClientConfig",
    "EndpointConfig",
    "EndpointGroup",
    "OpenAIChatCompletionsClient",
    "OpenAICompletionsClient",
    "OpenAIResponsesClient",
    "RetryPolicy",
    "as_client",
    "client_and_model",
    "close",
    "load_endpoints",
    "register_model_resolver",
    "use_client",
]

_LAZY = {
    "AnthropicMessagesClient": "verifiers.clients.streamed",
    "OpenAIChatCompletionsClient": "verifiers.clients.http",
    "OpenAICompletionsClient": "verifiers.clients.http",
    "OpenAIResponsesClient": "verifiers.clients.streamed",
    "RetryPolicy": "verifiers.clients.retry",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
