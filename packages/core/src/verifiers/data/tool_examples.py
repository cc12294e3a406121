"""Generate arguments that fit a tool's JSON schema, for the scripted tool calls of ``checks``.

Deterministic and minimal: required parameters only, the first alternative, the shortest text. This
module calls no tool and validates nothing (``data.tool_schema``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 8
"""Depth of nested objects below which an empty object is generated; a schema may be recursive."""

_PLAIN: Mapping[str, Any] = {
    "string": "x",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "null": None,
}


def example_arguments(schema: Mapping[str, Any]) -> dict[str, object]:
    """Generate values for the required parameters of the schema of a function.

    >>> example_arguments({"properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "b"]}}, "required": ["n", "s"]})
    {'n': 1, 's': 'a'}
    """
    properties = schema.get("properties") or {}
    return {
        name: _value(properties.get(name) or {}, schema.get("$defs") or {}, 0)
        for name in schema.get("required") or ()
    }


def _value(schema: object, definitions: Mapping[str, object], depth: int) -> object:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return {}
    if "$ref" in schema:
        return _value(
            definitions.get(str(schema["$ref"]).rpartition("/")[2]), definitions, depth + 1
        )
    for fixed in ("const", "default"):
        if fixed in schema:
            return schema[fixed]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return _value(schema[keyword][0], definitions, depth + 1)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        return {name: _value(properties.get(name), definitions, depth + 1) for name in required}
    if kind == "array":
        count = schema.get("minItems") or 0
        return [_value(schema.get("items"), definitions, depth + 1) for _ in range(count)]
    if kind in ("integer", "number") and "minimum" in schema:
        return schema["minimum"]
    return _PLAIN.get(kind, "x")
