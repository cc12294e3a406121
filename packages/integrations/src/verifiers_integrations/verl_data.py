"""Export the rows of an environment as data of verl, with the configuration of the agent loop.

``extra_info`` has all fields except the prompt (answer, info, id and arguments of the environment)
as JSON text, so rows of different environments have one schema. ``verl.VerifiersAgentLoop`` is the
loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers_integrations.parquet import export_command, write_splits

MODULE = "verifiers_integrations.verl"
NAME = "verifiers"
"""Name of the agent loop."""


def export_dataset(
    env: Environment,
    out_dir: str | Path,
    max_samples: int | None = None,
    *,
    env_id: str | None = None,
    env_args: Mapping[str, object] | None = None,
) -> Path:
    """Write ``train.parquet``, ``eval.parquet`` and ``agent_loop.yaml``; return the folder.

    Workers load the environment by ``env_id`` and ``env_args``, which default to those of ``env``.
    Without evaluation rows no ``eval.parquet`` is written. *Raises* ConfigError without an id.
    """
    folder = write_splits(env, out_dir, max_samples, env_id, env_args, _row)
    names = json.dumps(
        [function.name for function in env.rubric.plan().functions if not function.is_group]
    )
    loop = f"- name: {NAME}\n  _target_: {MODULE}.VerifiersAgentLoop\n  metrics: {names}\n"
    (folder / "agent_loop.yaml").write_text(loop, encoding="utf-8")
    return folder


def _row(task: Mapping[str, object], env_id: str, env_args: str, split: str) -> dict[str, Any]:
    prompt = task["prompt"]
    if not isinstance(prompt, list):
        raise ConfigError(
            "verl takes prompts of messages: an environment with plain text prompts cannot be"
            " exported"
        )
    messages = [{"role": message["role"], "content": _text(message)} for message in prompt]
    return {
        "prompt": messages,
        "data_source": env_id,
        "agent_name": NAME,
        "reward_model": {"style": "rule", "ground_truth": str(task["answer"])},
        "extra_info": {
            "index": task["example_id"],
            "split": split,
            "env_id": env_id,
            "env_args": env_args,
            "task": json.dumps(task, default=str),
        },
    }


def _text(message: Mapping[str, object]) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ConfigError(
            "verl takes prompts of text: images and audio in a prompt cannot be exported",
            key="prompt",
        )
    return content or ""


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m verifiers_integrations.verl ENV OUT_DIR``: export the rows of an environment."""
    export_command(f"python -m {MODULE}", "verl", export_dataset, argv)
