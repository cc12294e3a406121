"""Back to TOML: evaluations as an eval file that gives the same runs, for ``--dump-config``.

Of headers that hold secrets only the names are printed. Reading is `toml_args`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verifiers.cli.evaluate.options import MERGED, SETTINGS, EvalSettings


def dump(entries: Sequence[tuple[str, EvalSettings]]) -> str:
    """Entries as an eval file that gives the same runs."""
    return "\n".join(line for env_id, settings in entries for line in _entry_lines(env_id, settings)) + "\n"


def _entry_lines(env_id: str, settings: EvalSettings) -> Iterator[str]:
    from verifiers.runtime.redaction import HIDDEN, redacted

    yield "[[eval]]"
    yield f"env_id = {_toml(env_id)}"
    for name in SETTINGS:
        value = getattr(settings, name)
        if name == "timeout" and value is None:
            value = "none"
        if name == "header":
            safe = redacted(value)
            hidden = [key for key in value if safe[key] == HIDDEN]
            yield from (f"# header {json.dumps(key)}: its value is a secret and is not printed" for key in hidden)
            value = {key: value[key] for key in value if key not in hidden}
        if value is None or (name in MERGED and not value) or value == ():
            continue
        yield f"{name} = {_toml(value)}"
    yield ""


def _toml(value: Any) -> str:
    """A value in TOML. A table with null in it, which TOML lacks, becomes the text of a JSON object."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case Mapping():
            if "null" in (text := json.dumps(value, ensure_ascii=False)) and _has_null(value):
                return _toml(text)
            return "{ " + ", ".join(f"{_key(str(key))} = {_toml(member)}" for key, member in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))
