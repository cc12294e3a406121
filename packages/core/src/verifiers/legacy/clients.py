"""Older ``verifiers.utils.client_utils``: SDK objects and HTTP clients made of a
``ClientConfig``."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.clients.protocol import ClientConfig
from verifiers.clients.resolve import endpoint_settings
from verifiers.runtime.decoding import read_json

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

NO_KEY = "EMPTY"
"""What servers that check no key are sent."""


def resolve_client_configs(config: ClientConfig) -> list[ClientConfig]:
    """The settings of every endpoint of a group, what each leaves at its default taken from the
    group; else the config.

    >>> group = ClientConfig(timeout=9, endpoint_configs=[{"api_base_url": f"http://127.0.0.1:{n}/v1"} for n in (1, 2)])
    >>> [(one.api_base_url, one.timeout) for one in resolve_client_configs(group)]
    [('http://127.0.0.1:1/v1', 9), ('http://127.0.0.1:2/v1', 9)]
    """
    return [
        _completed(endpoint_settings(config, member)[0], config)
        for member in config.endpoint_configs
    ] or [config]


def resolve_client_config(config: ClientConfig) -> ClientConfig:
    """The settings of the endpoint number ``client_idx`` of a group, counted round and round; else
    the config."""
    configs = resolve_client_configs(config)
    return configs[config.client_idx % len(configs)]


def setup_http_client(config: ClientConfig) -> Any:
    """The HTTP client of the ``openai`` SDK with the headers, time limits and connection limits of
    a config."""
    from openai import DEFAULT_CONNECTION_LIMITS, DefaultAsyncHttpxClient, Timeout

    limits = type(DEFAULT_CONNECTION_LIMITS)(
        max_connections=config.max_connections,
        max_keepalive_connections=config.max_keepalive_connections,
    )
    timeout = Timeout(config.timeout, connect=config.connect_timeout)
    return DefaultAsyncHttpxClient(
        headers=dict(config.extra_headers), timeout=timeout, limits=limits
    )


def setup_openai_client(config: ClientConfig) -> AsyncOpenAI:
    """An ``AsyncOpenAI`` with the key, base URL, headers and limits of a config."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(**_sdk_arguments(resolve_client_config(config)))


def setup_anthropic_client(config: ClientConfig) -> AsyncAnthropic:
    """An ``AsyncAnthropic`` of a configuration. *Raises* ModuleNotFoundError if ``anthropic`` is
    not installed."""
    from anthropic import AsyncAnthropic

    arguments = _sdk_arguments(resolve_client_config(config))
    return AsyncAnthropic(**arguments | {"base_url": arguments["base_url"].removesuffix("/v1")})


def setup_client(
    config: ClientConfig | str | None = None, api_key_var: str | None = None, **settings: object
) -> AsyncOpenAI:
    """``setup_openai_client`` of a config, or of its fields: ``setup_client(api_base_url,
    api_key_var, timeout=…)``."""
    if not isinstance(config, ClientConfig):
        settings_of_client = {"api_base_url": config, "api_key_var": api_key_var} | settings
        config = ClientConfig.model_validate(
            {name: value for name, value in settings_of_client.items() if value is not None}
        )
    return setup_openai_client(config)


def load_prime_config() -> dict[str, object]:
    """The settings in ``~/.prime/config.json``; none where the file is absent or broken."""
    try:
        config = read_json(Path.home() / ".prime" / "config.json")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _sdk_arguments(config: ClientConfig) -> dict[str, Any]:
    return {
        "base_url": config.api_base_url,
        "api_key": os.environ.get(config.api_key_var) or NO_KEY,
        "max_retries": config.max_retries,
        "http_client": setup_http_client(config),
    }


def _completed(member: ClientConfig, group: ClientConfig) -> ClientConfig:
    """The settings of a member, those at their defaults taken from its group."""
    names = [field.name for field in fields(ClientConfig) if field.name != "endpoint_configs"]
    default = ClientConfig()
    inherited = {
        name: getattr(group, name)
        for name in names
        if getattr(member, name) == getattr(default, name)
    }
    return replace(member, **inherited)
