"""The pipeline's part of a checkpoint: its counters, the configuration, and finished rollouts not yet trained on.

Rollouts of an older policy cannot be sampled again, so they are saved with tokens, log-probabilities and versions. The
format is JSON, so loading executes nothing. Files are written by ``policy.checkpoint_files``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from verifiers.runtime.json import encode_row
from verifiers.types import Rollout, Turn
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.pipeline.schedule import PipelineState, Signal, Solved
from verifiers_trainer.policy.checkpoint_files import SCHEMA, read_json, reading, write_json

STATE, PENDING = "rl_state.json", "pending.jsonl"


def save_pipeline(
    folder: Path, state: PipelineState, version: int, configuration: Mapping[str, Any], model: str = ""
) -> None:
    """Write the pipeline: its counters and configuration, and the finished groups not yet trained on.

    model: The name of the trained model, for readers; the same run may resume from a moved folder.
    """
    write_json(
        folder / STATE,
        {
            "schema": SCHEMA,
            "policy_version": version,
            "model": model,
            "next_index": state.next_index,
            "delivered": state.delivered,
            "base": state.base,
            "requeue": state.requeue,
            "discarded": len(state.discarded),
            "skipped": state.skipped,
            "solved": {"best_reward": state.solved.best_reward, "streaks": list(state.solved.streaks.items())},
            "signal": {name: v if math.isfinite(v) else None for name, v in asdict(state.signal).items()},
            "configuration": dict(configuration),
        },
    )
    groups = [*state.discarded, *state.ready]
    (folder / PENDING).write_bytes(b"".join(encode_row(_group_to_json(group)) + b"\n" for group in groups))


def load_pipeline(folder: Path) -> tuple[PipelineState, int, dict[str, Any]]:
    """(pipeline, policy version, configuration) as ``save_pipeline`` wrote them. Raises ``CheckpointError``."""
    with reading(folder):
        saved = read_json(folder / STATE)
        if saved["schema"] != SCHEMA:
            raise ValueError(f"its format is number {saved['schema']}, this version reads number {SCHEMA}")
        lines = (folder / PENDING).read_text(encoding="ascii").split("\n")
        groups = [_group_from_json(json.loads(line)) for line in lines if line]
        state = PipelineState(
            next_index=saved["next_index"],
            delivered=saved["delivered"],
            base=saved["base"],
            ready=groups[saved["discarded"] :],
            discarded=groups[: saved["discarded"]],
            requeue=saved["requeue"],
            skipped=saved["skipped"],
            solved=Solved(saved["solved"]["best_reward"], {key: n for key, n in saved["solved"]["streaks"]}),
            signal=_signal_of(saved),
        )
        return state, saved["policy_version"], saved["configuration"]


def _signal_of(saved: Mapping[str, Any]) -> Signal:
    """The counts of ``Signal``; a checkpoint of version 0.2.0 has none, and its batches all had a signal."""
    known = saved.get("signal", {"was_live": saved["delivered"] > 0})
    return Signal(**{name: value for name, value in known.items() if value is not None})


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "example_id": group.example_id,
        "env": group.env,
        "weights": dict(group.weights),
        "component": group.component,
        "records": [
            {
                "turns": [_turn_to_json(turn) for turn in record.turns],
                "reward": _number(record.reward),
                "metrics": {name: _number(value) for name, value in record.metrics.items()},
                "error": record.error,
                "cause": record.cause,
                "stop": record.stop,
                "is_truncated": record.is_truncated,
                "text": record.text,
                "turn_rewards": list(record.turn_rewards),
                "advantage": None if record.advantage is None else _number(record.advantage),
                "role_rewards": {role: _number(value) for role, value in record.role_rewards.items()},
            }
            for record in group.rollouts
        ],
    }


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    ids = {"prompt_ids": turn.prompt_ids.tolist(), "completion_ids": turn.completion_ids.tolist()}
    version = turn.version if isinstance(turn.version, int) else np.asarray(turn.version).tolist()
    rest = {"version": version, "is_truncated": turn.is_truncated, "shared": turn.num_shared, "role": turn.role}
    return ids | {"logprobs": turn.sampler_logprobs.tolist()} | rest  # names of version 0.2.0, in its order


def _group_from_json(saved: Mapping[str, Any]) -> Group:
    rollouts = tuple(
        Rollout(
            turns=tuple(_turn_from_json(turn) for turn in record["turns"]),
            reward=_from_number(record["reward"]),
            metrics={name: _from_number(value) for name, value in record["metrics"].items()},
            error=record["error"],
            cause=record.get("cause"),  # version 0.2.0 saved none
            stop=record["stop"],
            is_truncated=record["is_truncated"],
            text=record["text"],
            turn_rewards=tuple(record["turn_rewards"]),
            advantage=record.get("advantage"),  # absent in version 0.2.0, as are role_rewards and a turn's role
            role_rewards={role: _from_number(value) for role, value in record.get("role_rewards", {}).items()},
        )
        for record in saved["records"]
    )
    component = saved.get("component", "")  # absent in version 0.2.0
    return Group(saved["index"], saved["example_id"], rollouts, saved["env"], saved["weights"], component)


def _turn_from_json(saved: Mapping[str, Any]) -> Turn:
    version = saved["version"] if isinstance(saved["version"], int) else np.array(saved["version"], np.int32)
    return Turn(
        prompt_ids=np.array(saved["prompt_ids"], np.int32),
        completion_ids=np.array(saved["completion_ids"], np.int32),
        sampler_logprobs=np.array(saved["logprobs"], np.float32),
        version=version,
        is_truncated=saved["is_truncated"],
        num_shared=saved["shared"],
        role=saved.get("role", ""),
    )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _from_number(value: float | None) -> float:
    return math.nan if value is None else value
