"""The endpoint registry: short names of models and their endpoints, from a TOML or a Python file.

The promise: a misspelt or duplicate key, or a key with a secret as its value, raises an error that
names it; the file is never executed. Commands and users call `load_endpoints`; the library loads no
file on its own.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from verifiers import compat
from verifiers.clients.protocol import (
    PRICE_FIELDS,
    EndpointConfig,
    check_client_type,
)
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import TooLong, read_text
from verifiers.runtime.decoding import decode_toml
from verifiers.runtime.notations import SHORT_CLIENT_TYPES
from verifiers.runtime.suggest import closest
from verifiers.runtime.syntax import parse_python
from verifiers.runtime.values import convert

HINTS = typing.get_type_hints(EndpointConfig, include_extras=True)
FIELD_OF = {name: name for name in HINTS if name != "source"} | compat.ENDPOINT_KEYS
"""Key of an entry -> the field of ``EndpointConfig``, which declares its values."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MARKED_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w{0,99})|\{([A-Za-z_]\w{0,99})\})")
_SECRET = re.compile(
    r"(sk|pk|hf|gsk|xai|pit|key|api)[-_](?=.*\d).{12,}|(?=.*\d)(?=.*[a-z])(?=.*[A-Z]).{24,}"
)


class EndpointGroup(list[EndpointConfig]):
    """The variants of an alias; ``group["model"]``, ``["url"]`` and ``["key"]`` return those of
    the first."""

    def __getitem__(self, key: str | SupportsIndex | slice) -> Any:
        return super().__getitem__(0)[key] if isinstance(key, str) else super().__getitem__(key)


_LOADED: dict[str, EndpointGroup] = {}


def loaded_endpoint(alias: str) -> EndpointGroup | None:
    """Return the group of an alias in the registries loaded by this process; later files take
    precedence."""
    return _LOADED.get(alias)


def load_endpoints(path: str | Path) -> dict[str, EndpointGroup]:
    """Load the registry of a ``.toml`` or ``.py`` file, by alias; `as_client` then accepts its
    aliases.

    Args:
        path: A ``.toml`` or ``.py`` file.

    Raises: ``ConfigError`` for an absent or unreadable file, and for unknown, duplicate or secret
    keys.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "endpoints.toml")
    ...     _ = file.write_text('[[endpoint]]\\nendpoint_id = "small"\\nmodel = "qwen3-4b"\\nurl = "http://127.0.0.1:8000/v1"')
    ...     vf.load_endpoints(file)["small"]["model"]
    'qwen3-4b'
    """
    path = Path(path)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError, TooLong) as error:
        raise ConfigError(
            f"cannot read the endpoint registry {path}: {error}", path=str(path)
        ) from error
    entries = _from_python(text, path) if path.suffix == ".py" else _from_toml(text, path)
    groups: dict[str, EndpointGroup] = {}
    for entry in entries:
        endpoint = _endpoint(entry, path)
        groups.setdefault(endpoint.endpoint_id, EndpointGroup()).append(endpoint)
    _LOADED.update(groups)
    return groups


def _from_toml(text: str, path: Path) -> list[dict[str, object]]:
    try:
        document = decode_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", path=str(path)) from error
    if unknown := document.keys() - {"endpoint"}:
        name = sorted(unknown)[0]
        raise ConfigError(
            f"{path}: unknown table {name!r}; a registry consists of [[endpoint]] tables", key=name
        )
    entries = document.get("endpoint", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"{path}: write [[endpoint]], with two brackets, once per endpoint", path=str(path)
        )
    return entries


def _from_python(text: str, path: Path) -> list[dict[str, object]]:
    try:
        module = parse_python(text, filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python: {error}", path=str(path)) from error
    value = next(
        (value for node in module.body if (value := _endpoints_value(node)) is not None), None
    )
    if value is None:
        raise ConfigError(f"{path} has no ENDPOINTS = {{…}} at module level", path=str(path))
    _refuse_repeated_aliases(value, path)
    try:
        table = ast.literal_eval(value)
    except ValueError as error:
        raise ConfigError(
            f"{path}: ENDPOINTS is not a literal, and the file is not executed: write the values"
            " out, or use TOML",
            path=str(path),
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: ENDPOINTS must be a dict of alias -> settings", path=str(path))
    entries = []
    for alias, settings in table.items():
        for variant in settings if isinstance(settings, list | tuple) else [settings]:
            if not isinstance(variant, Mapping):
                raise ConfigError(
                    f"{path}: the settings of {alias!r} must be a dict",
                    path=str(path),
                    key=str(alias),
                )
            entries.append({"endpoint_id": alias, **variant})
    return entries


def _endpoints_value(node: ast.stmt) -> ast.expr | None:
    """Return the value of the statement ``ENDPOINTS = …``; None for another statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return node.value if "ENDPOINTS" in names else None


def _refuse_repeated_aliases(value: ast.expr, path: Path) -> None:
    """*Raises* ConfigError for a duplicate key, of which a dict literal silently keeps the last."""
    for table in [node for node in ast.walk(value) if isinstance(node, ast.Dict)]:
        keys = [key.value for key in table.keys if isinstance(key, ast.Constant)]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(
                    f"{path}:{table.lineno}: {key!r} is given twice", path=str(path), key=str(key)
                )


def _endpoint(entry: Mapping[str, object], path: Path) -> EndpointConfig:
    alias = entry.get("endpoint_id")
    location = f"{path}: endpoint {alias!r}"
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        name = FIELD_OF.get(key)
        if name is None:
            hint = closest(str(key), FIELD_OF) or f"; known: {', '.join(FIELD_OF)}"
            raise ConfigError(
                f"{location}: unknown key {key!r}{hint}", path=str(path), key=str(key)
            )
        if name in fields and fields[name] != value:
            raise ConfigError(f"{location}: {key!r} repeats a setting", path=str(path), key=key)
        try:
            fields[name] = convert(value, HINTS[name])
        except ValueError as error:
            raise ConfigError(f"{location}: {key!r} {error}", path=str(path), key=key) from None
    if missing := {"endpoint_id", "model"} - fields.keys():
        raise ConfigError(
            f"{location} has no {sorted(missing)[0]!r}", path=str(path), key=sorted(missing)[0]
        )
    if len(prices := [name for name in PRICE_FIELDS if name in fields]) == 1:
        raise ConfigError(
            f"{location} has {prices[0]!r} alone; a cost needs both prices",
            path=str(path),
            key=prices[0],
        )
    kind = fields.get("client_type", "openai_chat_completions")
    fields["client_type"] = kind = SHORT_CLIENT_TYPES.get(kind, kind)
    check_client_type(kind, is_chosen=False)
    variable = fields.get("api_key_var", "OPENAI_API_KEY")
    if match := _MARKED_VARIABLE.fullmatch(variable):
        fields["api_key_var"] = variable = match[1] or match[2]
    if _SECRET.fullmatch(variable) or not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            f"{location}: 'key' must name an environment variable, but its value looks like a key"
            " itself: put the key into a variable and write its name here",
            path=str(path),
            key="key",
        )
    return EndpointConfig(**fields, source=str(path))
