"""``vf-train --schema``: the JSON schema of a training file, in either layout.

It allows what ``settings`` reads, key by key; rules over several settings are those of the command.
JSON knows no difference between 2 and 2.0, so a whole number may be written with a point here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.cli.common.reader import Fields
from verifiers.cli.common.schema import array_schema, facts_of, file_schema, table_schema
from verifiers.runtime.values import Number, adapter
from verifiers_trainer.cli.server_flags import SETTINGS as SERVER_FLAGS
from verifiers_trainer.cli.settings import (
    EVAL,
    HOSTED,
    HOSTED_IGNORED,
    Algorithm,
    EnvTable,
    fields_of_args,
)
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.fields import DECLARED, Settings, Unsupported, mark

TEXT = {"type": "string", "minLength": 1}


def train_schema() -> str:
    """The schema as JSON text."""
    args = _args()
    gpus = adapter(Number).json_schema()
    env = table_schema(Fields.of(EnvTable).schema(facts_of(EnvTable)))
    properties: dict[str, object] = {
        "model": TEXT | {"description": "Name or folder of the model."},
        "env": {"anyOf": [env, array_schema(env | {"required": ["id"]})]},
        "inference": table_schema(
            {"gpus": gpus, "args": table_schema({flag: {} for flag in sorted(SERVER_FLAGS)})}
        ),
        "trainer": table_schema(
            {
                "gpus": gpus,
                "algorithm": adapter(Algorithm).json_schema(),
                "args": table_schema(args),
            }
        ),
        "eval": table_schema(
            {name.removeprefix(EVAL): args[name] for name in args if name.startswith(EVAL)}
        ),
        "wandb": {
            "anyOf": [
                table_schema({"project": {"type": "string"}, "name": {"type": "string"}}),
                {"type": "boolean"},
            ]
        },
        "ablation": array_schema({"type": "object", "required": ["sweep"]}),
    }
    of_hosted = _add_hosted(properties, args)
    # one layout: beside [trainer] or [inference] there are no keys of the other
    refused = {"properties": dict.fromkeys(sorted(of_hosted), False)}
    rule = {"trainer": refused, "inference": refused}
    return file_schema("vf-train", properties, dependentSchemas=rule)


def _args() -> dict[str, Any]:
    """The keys of ``[trainer.args]``, with those that only one value of a trainer's has here."""
    facts = facts_of(Settings)
    for name in DECLARED.keys() - compat.GRPO_NAMES:
        if unsupported := mark(name, Unsupported):
            facts[name] = {"enum": list(unsupported.off), "description": unsupported.instead}
    facts |= {name: {"description": why} for name, why in compat.WITHOUT_EFFECT.items()}
    args = fields_of_args().schema(facts)
    for name, value in compat.UNCHANGING.items():
        if name not in args:
            args[name] = {"const": value, "description": compat.INSTEAD[name]}
    return args


def _add_hosted(properties: dict[str, object], args: Mapping[str, object]) -> set[str]:
    """Add the keys of the layout with top-level keys; returns those at its top."""
    tops = set()
    for path in (*HOSTED, *HOSTED_IGNORED):
        *above, key = path
        if above:
            properties.setdefault(above[0], table_schema({}))
        target = HOSTED.get(path)
        value: Any = {} if target is None else args.get(target[-1], args.get(EVAL + target[-1]))
        table: Any = properties[above[0]] if above else {"properties": properties}
        (table if "properties" in table else table["anyOf"][0])["properties"].setdefault(key, value)
        if path[0] not in ("env", "eval", "wandb"):
            tops.add(path[0])
    return tops
