"""The protocol of model clients, and the settings of one endpoint.

The promise: a `Client` turns one `ModelRequest` into one `Response` or raises an error of ``errors.py``; no other
detail of a provider leaves this package. Constructing a client opens nothing and needs no key.

The transport is in ``http``, SDK objects are in ``adapters``, and ``resolve`` selects the client of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias, TypedDict, runtime_checkable

from verifiers.errors import ConfigError
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.suggest import closest
from verifiers.storage.identity import Free
from verifiers.types import ModelRequest, Response

OPENAI_BASE_URL = "https://api.openai.com/v1"
CLIENT_TYPES = ("openai_chat_completions", "openai_completions")
LATER_CLIENT_TYPES = frozenset(
    "openai_chat_completions_token openai_responses anthropic_messages renderer nemorl_chat_completions".split()
)


@runtime_checkable
class Client(Protocol):
    """Anything with ``async complete(request)``; ``async aclose()`` is optional.

    >>> class Shout:
    ...     async def complete(self, request):
    ...         return vf.Response(vf.AssistantMessage(request.prompt[-1].content.upper()))
    >>> vf.SingleTurnEnv(dataset=[{"question": "hi"}]).evaluate(Shout(), "m")["completions"]
    [[{'role': 'assistant', 'content': 'HI'}]]
    """

    async def complete(self, request: ModelRequest) -> Response:
        """Return the completion of one request.

        Raises: ``ModelError`` and ``OverlongPromptError`` for this request alone; ``AuthenticationFailed``,
        ``ModelNotFound`` and ``EndpointUnreachable`` when no other request can succeed either.
        """
        ...


class ChatSDK(Protocol):
    """``OpenAI()``, ``AsyncOpenAI()`` or another object with ``chat.completions.create``, for type checkers."""

    @property
    def chat(self) -> Any: ...


class ResponseSDK(Protocol):
    """An object with ``get_response``, for type checkers."""

    @property
    def get_response(self) -> Any: ...


class NamedModel(Protocol):
    """A live model with ``name_or_path``, for type checkers."""

    @property
    def name_or_path(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One variant of a registry entry: a model name and its endpoint.

    >>> vf.EndpointConfig("small", "qwen3-4b", "http://127.0.0.1:8000/v1").api_key_var
    'OPENAI_API_KEY'
    """

    endpoint_id: Annotated[str, Free("a name for people")]
    model: str
    api_base_url: Annotated[str, Free("a server may move; the run notes it")] = OPENAI_BASE_URL
    api_key_var: Annotated[str, Free("a name for a secret")] = "OPENAI_API_KEY"
    client_type: str = "openai_chat_completions"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    usd_per_million_input_tokens: Annotated[float | None, Free("only what it costs")] = None
    """With the output price, enables the cost of a run."""
    usd_per_million_output_tokens: Annotated[float | None, Free("only what it costs")] = None


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Where and how to reach one endpoint, or several (``endpoint_configs``: round robin).

    Example: ``ClientConfig(api_base_url="http://127.0.0.1:8000/v1", max_retries=4)``

    >>> config = vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1", timeout=60)
    >>> config.max_retries, config.client_type
    (10, 'openai_chat_completions')
    """

    client_idx: Annotated[int, Free("a number for callers")] = 0
    client_type: str = "openai_chat_completions"
    api_key_var: Annotated[str, Free("a name for a secret")] = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, never the key. A loopback base URL needs none."""
    api_base_url: Annotated[str, Free("a server may move; the run notes it")] = OPENAI_BASE_URL
    timeout: Annotated[float, Free("only how long an attempt may take")] = 3600.0
    """Time limit of one attempt, in seconds."""
    connect_timeout: Annotated[float, Free("only how long an attempt may take")] = 5.0
    """Time limit of opening a connection, in seconds."""
    max_connections: Annotated[int, Free("only how fast")] = 28000
    """Requests in flight to the endpoint; capped by the open-file limit of the process."""
    max_response_bytes: Annotated[int, Free("only how long a reply may be")] = 64 * 2**20
    """Longest decoded body of a reply; a longer one is a ``MalformedResponse``, and the connection is closed."""
    max_retries: Annotated[int, Free("only how often a failure is repeated")] = 10
    """Retries of one request after its first attempt."""
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_headers_from_state: Mapping[str, str] = field(default_factory=dict)
    """Header name -> key of the rollout's state; the environment sets ``ModelRequest.headers`` from it."""
    endpoint_configs: Sequence[EndpointConfig | ClientConfig] = ()
    usd_per_million_input_tokens: Annotated[float | None, Free("only what it costs")] = None
    """With the output price, enables the cost of a run."""
    usd_per_million_output_tokens: Annotated[float | None, Free("only what it costs")] = None

    def __post_init__(self) -> None:
        remember_secrets(self.extra_headers)
        check_client_type(self.client_type)
        for name in ("timeout", "connect_timeout", "max_connections", "max_response_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"ClientConfig.{name} must be above 0, not {getattr(self, name)!r}", key=name)
        if self.max_retries < 0:
            raise ConfigError(f"ClientConfig.max_retries must be 0 or more, not {self.max_retries}", key="max_retries")


class ClientOptions(TypedDict, total=False):
    """The fields of ``ClientConfig``, for constructors that accept them as keywords."""

    client_idx: int
    client_type: str
    api_key_var: str
    api_base_url: str
    timeout: float
    connect_timeout: float
    max_connections: int
    max_response_bytes: int
    max_retries: int
    extra_headers: Mapping[str, str]
    extra_headers_from_state: Mapping[str, str]
    endpoint_configs: Sequence[EndpointConfig | ClientConfig]
    usd_per_million_input_tokens: float | None
    usd_per_million_output_tokens: float | None


ClientLike: TypeAlias = (
    Client | ChatSDK | ResponseSDK | ClientConfig | EndpointConfig | Sequence[ClientConfig | EndpointConfig] | str
)
"""Types that ``as_client`` converts to a ``Client``."""
ModelLike: TypeAlias = str | NamedModel


def headers_from_state(client: object) -> Mapping[str, str]:
    """Return header -> key of the state whose value a client sends, from its settings or those of its members."""
    of_members = getattr(client, "headers_from_state", None)
    if of_members is not None:
        return dict(of_members)
    return getattr(getattr(client, "config", None), "extra_headers_from_state", None) or {}


async def shows_tools(client: object) -> bool | None:
    """Return whether the chat template of the model shows the tools of a request; None if unknown.

    It is unknown for every server outside this process.

    Clients that know it have a method ``async shows_tools()``.
    """
    method = getattr(client, "shows_tools", None)
    result: bool | None = None if method is None else await method()
    return result


def check_client_type(client_type: str) -> None:
    """Raises: ``ConfigError`` unless this release supports the type."""
    if client_type in CLIENT_TYPES:
        return
    if client_type in LATER_CLIENT_TYPES:
        raise ConfigError(f"client_type {client_type!r} comes later; use one of {', '.join(CLIENT_TYPES)}")
    known = closest(client_type, CLIENT_TYPES) or f"; known: {', '.join(CLIENT_TYPES)}"
    raise ConfigError(f"there is no client_type {client_type!r}{known}")


def model_name(model: object) -> str | None:
    """Return the name of a model, passed as text or as an object with ``name_or_path``; None stays None."""
    if model is None or isinstance(model, str):
        return model
    name = getattr(model, "name_or_path", None)
    if isinstance(name, str) and name:
        return name
    raise ConfigError(f"model must be a name or an object with name_or_path, not {type(model).__name__}")


PRICE_FIELDS = ("usd_per_million_input_tokens", "usd_per_million_output_tokens")


def prices_of(client: object) -> dict[str, float] | None:
    """Return the prices of a client by ``PRICE_FIELDS``; None if one is missing or its endpoints differ.

    >>> from verifiers.clients import ClientConfig, as_client
    >>> config = ClientConfig(usd_per_million_input_tokens=0.4, usd_per_million_output_tokens=1.6)
    >>> prices_of(as_client(config))
    {'usd_per_million_input_tokens': 0.4, 'usd_per_million_output_tokens': 1.6}
    """
    members = getattr(client, "members", None)
    if members is not None:
        first, *others = [prices_of(member) for member, _ in members]
        return first if all(other == first for other in others) else None
    config = getattr(client, "config", None)
    prices = {name: getattr(config, name, None) for name in PRICE_FIELDS}
    known = {name: float(price) for name, price in prices.items() if price is not None}
    return known if len(known) == len(PRICE_FIELDS) else None
