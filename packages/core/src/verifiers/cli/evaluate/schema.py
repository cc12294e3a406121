"""``vf-eval --schema``: the JSON schema of an eval file, key by key as ``toml_args`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.cli.common.reader import Fields
from verifiers.cli.common.schema import array_schema, facts_of, file_schema, table_schema
from verifiers.cli.evaluate.options import MERGED, EvalSettings
from verifiers.cli.evaluate.toml_args import ENTRY_KEYS

ID = {"type": "string", "minLength": 1, "description": "The environment."}
ENTRY_IDS = {**dict.fromkeys(ENTRY_KEYS, ID), "env_ids": array_schema(ID)}


def eval_schema() -> str:
    """The schema as JSON text."""
    fields = Fields.of(EvalSettings)
    settings = fields.schema(facts_of(EvalSettings))
    tables = {*MERGED, *(alias for alias, name in fields.aliases.items() if name in MERGED)}
    swept = {
        name: _swept_table(value) if name in tables else array_schema(value)
        for name, value in settings.items()
    }
    one_id: Any = {"oneOf": [{"required": [key]} for key in ENTRY_KEYS]}
    entry = table_schema(settings | ENTRY_IDS, **one_id)
    ablation = table_schema(
        {**settings, **ENTRY_IDS, "sweep": table_schema(swept, minProperties=1)},
        required=["sweep"],
        **one_id,
    )
    entries = {
        name: {"type": "array", "items": item}
        for name, item in (("eval", entry), ("ablation", ablation))
    }
    return file_schema("vf-eval", settings | entries)


def _swept_table(value: Mapping[str, object]) -> dict[str, object]:
    """Tables to try, or a list of values for each of their keys."""
    by_key = {"type": "object", "additionalProperties": array_schema({}), "minProperties": 1}
    return {"anyOf": [array_schema(value), by_key]}
