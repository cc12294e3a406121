"""The protocol of model clients, and the settings of an endpoint.

The promise: a `Client` turns one `ModelRequest` into one `Response` or raises an error of
``errors.py``; no other detail of a provider leaves this package. Constructing a client opens
nothing and needs no key.

The transport is in ``http``, SDK objects are in ``adapters``, and ``resolve`` selects the client of
a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    get_type_hints,
    runtime_checkable,
)

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runtime.notations import SHORT_CLIENT_TYPES, Text
from verifiers.runtime.redaction import remember_headers
from verifiers.runtime.suggest import check_keywords, closest
from verifiers.runtime.values import FINITE, Limit, Range, convert, parts
from verifiers.storage.identity import Free
from verifiers.types import ModelRequest, Response

OPENAI_BASE_URL = "https://api.openai.com/v1"
VENDOR = "vendor"
"""As base URL or variable of a key: that of the vendor whose API the client type is."""
Price = Annotated[float, Range(ge=0.0, le=FINITE, noun="a number of US dollars, 0 or more")]
ABOVE_0 = Range(gt=0.0, noun="a number above 0")
CLIENT_TYPES = tuple(SHORT_CLIENT_TYPES.values())
LATER_CLIENT_TYPES = frozenset(
    "openai_chat_completions_token renderer nemorl_chat_completions".split()
)


@dataclass(frozen=True, slots=True)
class Vendor:
    """Where the API of a client type is by default."""

    base_url: str = OPENAI_BASE_URL
    api_key_var: str = "OPENAI_API_KEY"
    base_url_var: str = "OPENAI_BASE_URL"


_ANTHROPIC = Vendor("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL")


def vendor_of(client_type: str) -> Vendor:
    """Return the default base URL and the variables of a client type.

    >>> vendor_of("anthropic_messages").api_key_var, vendor_of("openai_responses").api_key_var
    ('ANTHROPIC_API_KEY', 'OPENAI_API_KEY')
    """
    return _ANTHROPIC if client_type == "anthropic_messages" else Vendor()


@runtime_checkable
class Client(Protocol):
    """Anything with ``async complete(request)``; ``async aclose()`` is optional.

    A subclass without ``complete`` has the methods of the third generation
    (``legacy.template_client``).

    >>> class Shout:
    ...     async def complete(self, request):
    ...         return vf.Response(vf.AssistantMessage(request.prompt[-1].content.upper()))
    >>> vf.SingleTurnEnv(dataset=[{"question": "hi"}]).evaluate(Shout(), "m")["completions"]
    [[{'role': 'assistant', 'content': 'HI'}]]
    """

    async def complete(self, request: ModelRequest) -> Response:
        """Return the completion of a request.

        Raises: ``ModelError`` and ``OverlongPromptError`` for this request alone;
        ``AuthenticationFailed``, ``ModelNotFound``, ``EndpointUnreachable`` and
        ``BudgetExhausted`` when no other request can succeed either.
        """
        ...


class ChatSDK(Protocol):
    """``OpenAI()``, ``AsyncOpenAI()`` or another object with ``chat.completions.create``, for type
    checkers."""

    @property
    def chat(self) -> Any: ...


class ResponseSDK(Protocol):
    """An object with ``get_response``, for type checkers."""

    @property
    def get_response(self) -> object: ...


class NamedModel(Protocol):
    """A live model with ``name_or_path``, for type checkers."""

    @property
    def name_or_path(self) -> object: ...


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A variant of a registry entry: a model name and its endpoint. Its fields also read by the
    registry's keys.

    >>> endpoint = vf.EndpointConfig("small", "qwen3-4b", "http://127.0.0.1:8000/v1")
    >>> endpoint.api_key_var, endpoint["url"], endpoint.get("key"), "nothing" in endpoint
    ('OPENAI_API_KEY', 'http://127.0.0.1:8000/v1', 'OPENAI_API_KEY', False)
    """

    endpoint_id: Annotated[Text, Free("a name for people")]
    """Its alias in the registry."""
    model: Text
    """Name of the model, as the endpoint knows it."""
    api_base_url: Annotated[Text, Free("a server may move; the run notes it")] = VENDOR
    """``"vendor"`` is the vendor's own."""
    api_key_var: Annotated[Text, Free("a name for a secret")] = VENDOR
    """``"vendor"`` is ``OPENAI_API_KEY`` or ``ANTHROPIC_API_KEY``, by the client type."""
    client_type: Text = "openai_chat_completions"
    """API of the endpoint, as in ``ClientConfig``."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request."""
    usd_per_million_input_tokens: Annotated[Price | None, Free("only what it costs")] = None
    """With the output price, enables the cost of a run."""
    usd_per_million_output_tokens: Annotated[Price | None, Free("only what it costs")] = None
    """Price of sampled tokens."""
    requests_per_minute: Annotated[Limit | None, Free("only how fast")] = None
    """Requests that the endpoint serves in a minute; they start evenly, over all rollouts of the
    process."""
    tokens_per_minute: Annotated[Limit | None, Free("only how fast")] = None
    """Tokens of requests and answers that the endpoint serves in a minute."""
    source: Annotated[str, Free("where it is written")] = field(
        default="", repr=False, compare=False
    )
    """The file of the registry that has it."""

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, compat.ENDPOINT_KEYS.get(key, key))

    def __contains__(self, key: object) -> bool:
        return (
            isinstance(key, str) and compat.ENDPOINT_KEYS.get(key, key) in self.__dataclass_fields__
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> Sequence[str]:
        """Names of the fields."""
        return tuple(self.__dataclass_fields__)

    def check_is_spoken(self) -> None:
        """*Raises* ConfigError that names the registry and the entry, for a kind that no client
        here speaks."""
        if self.client_type not in CLIENT_TYPES:
            prefix = f"{self.source}: " if self.source else ""
            raise ConfigError(
                f"{prefix}the endpoint {self.endpoint_id!r} is of the kind {self.client_type!r},"
                " which no client of this release speaks; choose an endpoint of the kind"
                f" {' or '.join(CLIENT_TYPES)}",
                key="client_type",
            )

    def __post_init__(self) -> None:
        _fill_in_vendor(self)


@dataclass(slots=True)
class ClientConfig:
    """Where and how to reach one endpoint, or several (``endpoint_configs``: round robin; dicts
    become configs).

    A field may be assigned; ``model_dump``, ``model_copy`` and ``model_validate`` are those of
    pydantic objects.

    Example: ``ClientConfig(api_base_url="http://127.0.0.1:8000/v1", max_retries=4)``

    >>> config = vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1", timeout=60)
    >>> config.max_retries, config.client_type
    (10, 'openai_chat_completions')
    """

    client_idx: Annotated[int, Free("a number for callers")] = 0
    """A number for callers."""
    client_type: str = "openai_chat_completions"
    """API of the endpoint: openai_chat_completions, openai_completions, openai_responses or
    anthropic_messages."""
    api_key_var: Annotated[str, Free("a name for a secret")] = VENDOR
    """Name of the environment variable that holds the key, never the key. A loopback base URL needs
    none.

    ``"vendor"`` is ``OPENAI_API_KEY``, or ``ANTHROPIC_API_KEY`` for ``anthropic_messages``."""
    api_base_url: Annotated[str, Free("a server may move; the run notes it")] = VENDOR
    """``"vendor"`` is the vendor's own: OpenAI's, or Anthropic's for ``anthropic_messages``."""
    timeout: Annotated[float, ABOVE_0, Free("only how long an attempt may take")] = 3600.0
    """Time limit of an attempt, in seconds."""
    connect_timeout: Annotated[float, ABOVE_0, Free("only how long an attempt may take")] = 5.0
    """Time limit of opening a connection, in seconds."""
    idle_timeout: Annotated[float, ABOVE_0, Free("only how long an attempt may take")] = 600.0
    """Longest silence of a stream, in seconds; a longer silence fails the attempt, which is
    repeated.

    ``openai_responses`` and ``anthropic_messages`` stream; completions are read as a whole, within
    ``timeout``."""
    max_connections: Annotated[int, Range(ge=1), Free("only how fast")] = 28000
    """Requests in flight to the endpoint; capped by the open-file limit of the process."""
    max_response_bytes: Annotated[int, Range(ge=1), Free("only how long a reply may be")] = (
        64 * 2**20
    )
    """Longest decoded body of a reply; a longer body is a ``MalformedResponse``, and the connection
    is closed."""
    max_retries: Annotated[int, Range(ge=0), Free("only how often a failure is repeated")] = 10
    """Retries of a request after its first attempt."""
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of every request."""
    extra_headers_from_state: Mapping[str, str] = field(default_factory=dict)
    """Header name -> key of the rollout's state; the environment sets ``ModelRequest.headers`` from
    it."""
    endpoint_configs: Sequence[EndpointConfig | ClientConfig] = ()
    """Several endpoints, used in turn."""
    usd_per_million_input_tokens: Annotated[float | None, Free("only what it costs")] = None
    """With the output price, enables the cost of a run."""
    usd_per_million_output_tokens: Annotated[float | None, Free("only what it costs")] = None
    """Price of sampled tokens."""
    requests_per_minute: Annotated[Limit | None, Free("only how fast")] = None
    """Requests that the endpoint serves in a minute; they start evenly, over all rollouts of the
    process."""
    tokens_per_minute: Annotated[Limit | None, Free("only how fast")] = None
    """Tokens of requests and answers that the endpoint serves in a minute."""
    max_keepalive_connections: Annotated[int | None, Free("accepted for older callers")] = None
    """This field and those below are accepted without effect."""
    renderer: Annotated[str | None, Free("accepted for older callers")] = None
    renderer_model_name: Annotated[str | None, Free("accepted for older callers")] = None
    renderer_pool_size: Annotated[int | None, Free("accepted for older callers")] = None
    tool_parser: Annotated[str | None, Free("accepted for older callers")] = None
    reasoning_parser: Annotated[str | None, Free("accepted for older callers")] = None
    preserve_all_thinking: Annotated[bool | None, Free("accepted for older callers")] = None
    preserve_thinking_between_tool_calls: Annotated[
        bool | None, Free("accepted for older callers")
    ] = None

    def __post_init__(self) -> None:
        self.check()
        self.endpoint_configs = [
            ClientConfig.model_validate(member) if isinstance(member, dict) else member
            for member in self.endpoint_configs
        ]
        if any(
            isinstance(member, ClientConfig) and member.endpoint_configs
            for member in self.endpoint_configs
        ):
            raise ConfigError(
                "endpoint_configs has a group of its own; list its endpoints here",
                key="endpoint_configs",
            )
        for name in WITHOUT_EFFECT:
            if getattr(self, name) is not None:
                compat.note(f"ClientConfig.{name}", "nothing: it has no effect")

    @classmethod
    def model_validate(cls, fields: Mapping[str, object] | ClientConfig) -> Self:
        """The settings with these fields. *Raises* ConfigError for an unknown field or a wrong
        value."""
        if isinstance(fields, ClientConfig):
            fields = fields.model_dump()
        check_keywords(fields, tuple(cls.__dataclass_fields__), cls.__name__)
        return cls(**fields)

    def model_dump(self, *, exclude_none: bool = False, **_: object) -> dict[str, Any]:
        """The fields as plain data."""
        values = asdict(self)
        if exclude_none:
            return {name: value for name, value in values.items() if value is not None}
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the fields of ``update``."""
        return replace(self, **(update or {}))

    def check(self) -> None:
        """*Raises* ConfigError for a value out of bounds; also called when a client
        is made of it."""
        remember_headers(self.extra_headers)
        check_client_type(self.client_type)
        _fill_in_vendor(self)
        for name, hint in _bounded_fields().items():
            try:
                convert(getattr(self, name), hint, in_python=True)
            except ValueError as error:
                raise ConfigError(f"ClientConfig.{name} {error}", key=name) from None


@functools.cache
def _bounded_fields() -> dict[str, object]:
    """Field of ``ClientConfig`` -> its annotation, of those with bounds."""
    hints = get_type_hints(ClientConfig, include_extras=True)
    return {
        name: hint
        for name, hint in hints.items()
        if any(isinstance(part, Range) for part in parts(hint))
    }


WITHOUT_EFFECT = tuple(ClientConfig.__dataclass_fields__)[-8:]
"""Fields that are accepted for older callers."""


def _fill_in_vendor(config: EndpointConfig | ClientConfig) -> None:
    vendor = vendor_of(config.client_type)
    if config.api_base_url == VENDOR:
        object.__setattr__(config, "api_base_url", vendor.base_url)
    if config.api_key_var == VENDOR:
        object.__setattr__(config, "api_key_var", vendor.api_key_var)


class ClientOptions(TypedDict, total=False):
    """The fields of ``ClientConfig``, for constructors that accept them as keywords."""

    client_idx: int
    client_type: str
    api_key_var: str
    api_base_url: str
    timeout: float
    connect_timeout: float
    idle_timeout: float
    max_connections: int
    max_response_bytes: int
    max_retries: int
    extra_headers: Mapping[str, str]
    extra_headers_from_state: Mapping[str, str]
    endpoint_configs: Sequence[EndpointConfig | ClientConfig]
    usd_per_million_input_tokens: float | None
    usd_per_million_output_tokens: float | None
    requests_per_minute: float | None
    tokens_per_minute: float | None
    max_keepalive_connections: int | None
    renderer: str | None
    renderer_model_name: str | None
    renderer_pool_size: int | None
    tool_parser: str | None
    reasoning_parser: str | None
    preserve_all_thinking: bool | None
    preserve_thinking_between_tool_calls: bool | None


ClientLike: TypeAlias = (
    Client
    | ChatSDK
    | ResponseSDK
    | ClientConfig
    | EndpointConfig
    | Sequence[ClientConfig | EndpointConfig]
    | str
)
"""Types that ``as_client`` converts to a ``Client``."""
ModelLike: TypeAlias = str | Path | NamedModel
"""The name of a model, the folder of a saved one, or a model object of transformers."""


def headers_from_state(client: object) -> Mapping[str, str]:
    """Return header -> key of the state whose value a client sends, from its settings or those of
    its members."""
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


def check_client_type(client_type: str, is_chosen: bool = True) -> None:
    """Raises: ``ConfigError`` unless this release supports the type; a later type is refused when
    it is chosen."""
    if client_type in CLIENT_TYPES or (client_type in LATER_CLIENT_TYPES and not is_chosen):
        return
    if client_type in LATER_CLIENT_TYPES:
        raise ConfigError(
            f"client_type {client_type!r} comes later; use one of {', '.join(CLIENT_TYPES)}"
        )
    hint = closest(client_type, CLIENT_TYPES) or f"; known: {', '.join(CLIENT_TYPES)}"
    raise ConfigError(f"there is no client_type {client_type!r}{hint}")


PRICE_FIELDS = ("usd_per_million_input_tokens", "usd_per_million_output_tokens")
RATE_FIELDS = ("requests_per_minute", "tokens_per_minute")


def prices_of(client: object) -> dict[str, float] | None:
    """Return the prices of a client by ``PRICE_FIELDS``; None if any is missing or its endpoints
    differ.

    >>> from verifiers.clients import ClientConfig, as_client
    >>> config = ClientConfig(usd_per_million_input_tokens=0.4, usd_per_million_output_tokens=1.6)
    >>> prices_of(as_client(config))
    {'usd_per_million_input_tokens': 0.4, 'usd_per_million_output_tokens': 1.6}
    """
    members = getattr(client, "members", None)
    if members is not None:
        first, *member_prices = [prices_of(member) for member, _ in members]
        return first if all(price == first for price in member_prices) else None
    config = getattr(client, "config", None)
    prices = {name: getattr(config, name, None) for name in PRICE_FIELDS}
    prices_set = {name: float(price) for name, price in prices.items() if price is not None}
    return prices_set if len(prices_set) == len(PRICE_FIELDS) else None
