"""Export the rows of an environment as data of SkyRL, and read them back.

The column ``verifiers`` has all fields except the prompt, nested values as JSON text, so rows of
different environments have one schema. ``skyrl.VerifiersGenerator`` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import decode_json
from verifiers_integrations.parquet import write_splits

KEY = "verifiers"
"""Column of a dataset row with all fields except the prompt."""


def export_dataset(
    env: Environment,
    out_dir: str | Path,
    max_samples: int | None = None,
    *,
    env_id: str | None = None,
    env_args: Mapping[str, object] | None = None,
) -> Path:
    """Write ``train.parquet`` and, if there are evaluation rows, ``eval.parquet``; return the
    folder.

    The generator loads the environment by ``env_id`` and ``env_args``, which default to those of
    ``env``. *Raises* ConfigError without an id, and for prompts that are not messages of text.
    """
    return write_splits(env, out_dir, max_samples, env_id, env_args, _row)


def _row(task: Mapping[str, object], env_id: str, env_args: str, split: str) -> dict[str, Any]:
    prompt = task["prompt"]
    if not isinstance(prompt, list) or any(
        not isinstance(message.get("content"), str) for message in prompt
    ):
        raise ConfigError(
            "SkyRL takes prompts of text messages only; the prompts of this environment have others"
        )
    fields = {
        "answer": str(task["answer"]),
        "task": task["task"],
        "info": json.dumps(task["info"], default=str),
    }
    columns = {
        name: value for name, value in task.items() if name not in (*fields, "prompt", "example_id")
    }
    return {
        "prompt": [{"role": message["role"], "content": message["content"]} for message in prompt],
        "env_class": KEY,
        KEY: {
            **fields,
            "example_id": task["example_id"],
            "environment": env_id,
            "env_args": env_args,
            "columns": json.dumps(columns, default=str),
        },
    }


def task_of(prompt: Iterable[Mapping[str, object]], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task of a prompt and its extras. *Raises* ConfigError for rows not written by
    ``export_dataset``."""
    column = (extras or {}).get(KEY)
    if not column:
        raise ConfigError(f"a row has no column {KEY!r}; write the dataset with export_dataset")
    info = column.get("info")
    return {
        **decode_json(column.get("columns") or "{}"),
        "prompt": [dict(message) for message in prompt],
        "answer": column.get("answer", ""),
        "task": column.get("task", "default"),
        "info": decode_json(info) if isinstance(info, str) and info else dict(info or {}),
        "example_id": column.get("example_id", 0),
    }
