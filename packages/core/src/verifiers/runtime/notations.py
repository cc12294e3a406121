"""Values with a notation of their own, for flags, files and calls: ``0,1``, ``name=value``, ``none``.

A type here is an annotation of a setting: ``Seconds`` reads ``30`` and ``none``, and says in
``--help`` and in a JSON schema what it reads. The readers *raise* ``ValueError`` whose text ends
the sentence "SETTING …".
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, Literal

from verifiers.runtime.values import FINITE, Form, Range

SHORT_CLIENT_TYPES = {
    "chat": "openai_chat_completions",
    "completions": "openai_completions",
    "responses": "openai_responses",
    "messages": "anthropic_messages",
}
"""Short names of the APIs of models -> their names in ``ClientConfig``."""


def _seconds(value: object) -> float | None:
    if value is None or value in ("none", math.inf):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(
            f"must be a number of seconds above 0, or none for no bound, not {value!r}"
        )
    return float(value)


def _workers(value: object) -> int:
    if value == "auto":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            'must be a number of processes, 0 for this one, or "auto": a whole number of at least'
            f" 0, not {value!r}"
        )
    return value


def _client_type(value: object) -> str:
    name = str(value)
    if name in SHORT_CLIENT_TYPES.values():
        return name
    if name not in SHORT_CLIENT_TYPES:
        raise ValueError(
            f"must be {', '.join(SHORT_CLIENT_TYPES)} or a full name ({', '.join(SHORT_CLIENT_TYPES.values())})"
        )
    return SHORT_CLIENT_TYPES[name]


def json_table(value: object) -> dict[str, object]:
    """A table, a JSON object as text (JSON can express null, TOML cannot), ``name=value,…``, or
    several of them.

    >>> json_table("unit=word,max_chars=4,seed=null")
    {'unit': 'word', 'max_chars': 4, 'seed': None}
    """
    if isinstance(value, list | tuple):
        return {name: v for text in value for name, v in json_table(text).items()}
    if isinstance(value, str) and re.match(r"\w+=", value):
        _, *words = re.split(r"(?:^|,)(\w+)=", value)
        return dict(zip(words[::2], map(_json_or_text, words[1::2]), strict=True))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(
                f"is not JSON ({error}); write an object, '{{\"key\": 1}}', or key=1"
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a JSON object like '{{\"key\": 1}}', not {value!r}")
    return dict(value)


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _by_header(value: object, separator: str, format_: str) -> dict[str, str]:
    """Texts in ``format_``, or a table, as header name -> the text after the separator."""
    excerpt = _begin if separator == ":" else str  # the other has names alone
    pairs: Iterable[Iterable[object]] = value.items() if isinstance(value, Mapping) else ()
    if not isinstance(value, Mapping):
        lines = value if isinstance(value, list | tuple) else [value]
        for line in lines:
            if separator not in str(line):
                raise ValueError(f"must be {format_}, not {excerpt(line)!r}")
        pairs = [str(line).split(separator, 1) for line in lines]
    headers = {str(name).strip(): str(content).strip() for name, content in pairs}
    for name in headers:
        if not name or not name.isascii() or not name.isprintable() or " " in name:
            raise ValueError(f"has a header name that cannot be sent: {excerpt(name)!r}")
    return headers


def _begin(line: object) -> str:
    """The first word of a header that cannot be read: what follows may be a key."""
    name, *content = re.split(r"[\s=:]+", str(line).strip(), maxsplit=1)
    return f"{name} …" if content else name


def _headers(value: object) -> dict[str, str]:
    headers = _by_header(value, ":", '"Name: value"')
    if bad := [name for name, content in headers.items() if not content.isprintable()]:
        raise ValueError(f"has a value for {bad[0]} with characters that cannot be sent")
    return headers


def _headers_from_state(value: object) -> dict[str, str]:
    headers = _by_header(value, "=", "NAME=key")
    if bad := [name for name, key in headers.items() if not key]:
        raise ValueError(f"names no key of the state for {bad[0]}; write {bad[0]}=key")
    return headers


def _two_numbers(meaning: str, rises: bool = False) -> Callable[[object], tuple[float, float]]:
    """The reader of ``0,1``, or of a list of two numbers. ``rises``: the second is the greater."""

    def read(value: object) -> tuple[float, float]:
        parts = value.split(",") if isinstance(value, str) else value
        try:
            first, second = map(float, parts if isinstance(parts, list | tuple) else ())
            if rises and not -FINITE <= first < second <= FINITE:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"must be two numbers, {meaning}; not {value!r}") from None
        return first, second

    return read


def _folder(value: object) -> Any:
    if (isinstance(value, str) and value) or isinstance(value, os.PathLike):
        return value
    raise ValueError(f"must be a text that is not empty, not {value!r}")


def read_names(value: object) -> tuple[str, ...]:
    """A list of names, or names in one text."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list | tuple | AbstractSet) and all(
        isinstance(n, str) and n for n in names
    ):
        return tuple(names)
    raise ValueError(f"must be names separated by commas, not {names!r}")


def _variable(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError(
            "must be the NAME of an environment variable; put the key into a variable, never here"
        )
    return value


Text = Annotated[str, Range(min_length=1)]
_NUMBER = r"\s*[-+]?\d+(\.\d*)?\s*"
_PAIR = {
    "anyOf": [
        {"type": "string", "pattern": f"^{_NUMBER},{_NUMBER}$"},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    ]
}


def _several(*forms: Mapping[str, object]) -> dict[str, object]:
    """The JSON schema of a value that may be listed."""
    return {"anyOf": [*forms, {"type": "array", "items": {"anyOf": list(forms)}}]}


def listed(name: str) -> dict[str, object]:
    """The JSON schema of names of a pattern, in a list or in one text with commas."""
    text = rf"^\s*{name}\s*(,\s*{name}\s*)*$"
    allowed = {"type": "string", "pattern": f"^{name}$"}
    return {"anyOf": [{"type": "string", "pattern": text}, {"type": "array", "items": allowed}]}


ClientType = Annotated[
    str,
    Form(
        "|".join(SHORT_CLIENT_TYPES),
        _client_type,
        {"enum": [*SHORT_CLIENT_TYPES, *SHORT_CLIENT_TYPES.values()]},
    ),
]
Variable = Annotated[
    str, Form("NAME", _variable, {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"})
]
Seconds = Annotated[
    float,
    Form(
        "SECONDS",
        _seconds,
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "none"}]},
    ),
]
Workers = Annotated[
    int,
    Form("N|auto", _workers, {"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]
Table = Annotated[
    Mapping[str, Any],
    Form(
        "JSON|name=value",
        json_table,
        _several({"type": "object"}, {"type": "string", "pattern": r"^(\w+=|\s*\{)"}),
        repeats=True,
    ),
]
Headers = Annotated[
    Mapping[str, str],
    Form(
        '"Name: value"',
        _headers,
        {"anyOf": [{"type": "object"}, _several({"type": "string", "pattern": ":"})]},
        repeats=True,
    ),
]
HeadersFromState = Annotated[
    Mapping[str, str],
    Form(
        "NAME=key",
        _headers_from_state,
        {"anyOf": [{"type": "object"}, _several({"type": "string", "pattern": "=."})]},
        repeats=True,
    ),
]
RewardRange = Annotated[
    Sequence[float],
    Form("LOW,HIGH", _two_numbers("the lowest and the highest reward: 0,1", True), _PAIR),
]
Price = Annotated[Sequence[float], Form("READ,SAMPLED", _two_numbers("the prices: 0.4,1.6"), _PAIR)]
Names = Annotated[Sequence[str], Form("A,B", read_names, listed(r"[^,\s][^,]*"))]
FilePath = Annotated[str | Path, Form("TEXT", _folder, {"type": "string", "minLength": 1})]
NotNegative = Annotated[float, Range(ge=0.0, le=FINITE, noun="a number of at least 0")]
Backend = Literal["process", "ray"]
