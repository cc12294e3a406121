"""JSON schemas of the files of the commands (draft 2020-12), by which editors complete and check
them: ``#:schema FILE`` in the first line of a TOML file.

What a setting may be is its annotation, as for the reader: pydantic makes the schema of it
(``Fields.schema``).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Mapping

from verifiers.runtime.syntax import parse_python

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def file_schema(title: str, properties: Mapping[str, object], **rules: object) -> str:
    """The JSON text of the schema of a file with these top-level keys."""
    schema = {"$schema": DIALECT, "title": title, **table_schema(properties), **rules}
    return json.dumps(schema, indent=2, ensure_ascii=False)


def table_schema(properties: Mapping[str, object], **rules: object) -> dict[str, object]:
    """The schema of a table with these keys and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False, **rules}


def array_schema(items: Mapping[str, object]) -> dict[str, object]:
    """The schema of a list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


def facts_of(owner: type) -> dict[str, dict[str, object]]:
    """Key of a setting -> its description and default, of a dataclass whose fields have a docstring
    below them, or the help text of an `option`."""
    texts = docstrings(owner)
    facts: dict[str, dict[str, object]] = {}
    for field in dataclasses.fields(owner):
        line = field.metadata.get("option")
        text = line.help if line else texts.get(field.name, "")
        key = (line.key if line else "") or field.name
        facts[key] = {"description": " ".join(text.split())} if text else {}
        if field.default not in (None, dataclasses.MISSING):
            facts[key]["default"] = field.default
    return facts


def docstrings(owner: type) -> dict[str, str]:
    """Field -> the text below it in the source of its class."""
    (body,) = parse_python(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: str(below.value.value)
        for line, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
