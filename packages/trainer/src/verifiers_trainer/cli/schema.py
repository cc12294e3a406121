"""``vf-train --schema``: the JSON schema of a training file, in either layout.

It allows what ``settings`` reads, key by key; rules over several settings are those of the command.
JSON knows no difference between 2 and 2.0, so a whole number may be written with a point here.
"""

from __future__ import annotations

from typing import Any

from verifiers.cli.common.schema import array_schema, facts_of, file_schema, table_schema
from verifiers_trainer.cli.settings import (
    ARGS,
    EVAL,
    GPUS,
    HOSTED,
    HOSTED_IGNORED,
    TOP,
    EnvTable,
    tables,
)
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.fields import DECLARED, Settings, Unsupported, mark


def train_schema() -> str:
    """The schema as JSON text."""
    keys = {path: fields.schema({}) for path, fields in tables().items()}
    keys[()]["model"]["description"] = "Name or folder of the model."
    keys["env",] = tables()["env",].schema(facts_of(EnvTable))
    args = keys[ARGS] = tables()[ARGS].schema(_facts_of_args())
    for name, value in compat.UNCHANGING.items():  # has one value of another trainer's here
        args.setdefault(name, {"const": value, "description": compat.INSTEAD.get(name)})
    keys["eval",] = {name: args[EVAL + name] for name in keys["eval",]}
    for *table, key in (*HOSTED, *HOSTED_IGNORED):
        setting = HOSTED.get((*table, key))
        keys[tuple(table)][key] = {} if setting is None else args[setting]
    for path in sorted(tables().keys() - {(), ("env", "args")}, key=len, reverse=True):
        keys[path[:-1]][path[-1]] = table_schema(keys[path])
    file = keys[()]
    file["env"] = {"anyOf": [file["env"], array_schema(file["env"] | {"required": ["id"]})]}
    file["wandb"] = {"anyOf": [file["wandb"], {"type": "boolean"}]}
    file["ablation"] = array_schema({"type": "object", "required": ["sweep"]})
    # one layout: beside [trainer] or [inference] there are no keys of the other
    refused = sorted({path[0] for path in (*HOSTED, *HOSTED_IGNORED)} - set(TOP))
    rule = {table: {"properties": dict.fromkeys(refused, False)} for table in GPUS}
    return file_schema("vf-train", file, dependentSchemas=rule)


def _facts_of_args() -> dict[str, dict[str, Any]]:
    """What is said of the keys of ``[trainer.args]``, and of those that have one value here."""
    facts = facts_of(Settings)
    for name in DECLARED.keys() - compat.GRPO_NAMES:
        if unsupported := mark(name, Unsupported):
            facts[name] = {"enum": list(unsupported.off), "description": unsupported.instead}
    return facts | {name: {"description": why} for name, why in compat.WITHOUT_EFFECT.items()}
