"""The pipeline's part of a checkpoint: its counters, the configuration, and finished rollouts not
yet trained on.

Rollouts of an older policy cannot be sampled again, so they are saved with tokens,
log-probabilities and versions. The format is JSON, so loading executes nothing. Files are written
by ``policy.checkpoint_files``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from verifiers.results.branches import whole_rows, without_copies
from verifiers.rollouts.error_info import ErrorInfo
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers.rollouts.values import number
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_file
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import encode_row
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.pipeline.schedule import Measured, PipelineState, Pool, Signal, Solved
from verifiers_trainer.policy.checkpoint_files import SCHEMA, read_json, reading, write_json

STATE, PENDING = "rl_state.json", "pending.jsonl"


def save_pipeline(
    folder: Path,
    state: PipelineState,
    version: int,
    configuration: Mapping[str, object],
    model: str = "",
) -> None:
    """Write the pipeline: its counters and configuration, and the finished groups not yet trained
    on.

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
            "in_training": state.in_training,
            "requeue": state.requeue,
            "discarded": len(state.discarded),
            "skipped": state.skipped,
            "solved": {
                "best_reward": state.solved.best_reward,
                "streaks": list(state.solved.streaks.items()),
            },
            "pool": {
                "range": None
                if math.isinf(state.pool.best)
                else [state.pool.lowest, state.pool.best],
                "measured": [[key, *astuple(m)] for key, m in state.pool.measured.items()],
            },
            "signal": {
                name: v if math.isfinite(v) else None for name, v in asdict(state.signal).items()
            },
            "configuration": dict(configuration),
        },
    )
    groups = [*state.discarded, *state.ready]
    (folder / PENDING).write_bytes(
        b"".join(encode_row(_group_to_json(group)) + b"\n" for group in groups)
    )


def load_pipeline(folder: Path) -> tuple[PipelineState, int, dict[str, Any]]:
    """(pipeline, policy version, configuration) as ``save_pipeline`` wrote them. Raises
    ``CheckpointError``."""
    with reading(folder):
        saved = read_json(folder / STATE)
        if saved["schema"] != SCHEMA:
            raise ValueError(
                f"its format is number {saved['schema']}, this version reads number {SCHEMA}"
            )
        lines = read_file(folder / PENDING, MAX_ROW_BYTES).split(b"\n")
        groups = [_group_from_json(decode_json(line)) for line in lines if line]
        state = PipelineState(
            next_index=saved["next_index"],
            delivered=saved["delivered"],
            base=saved["base"],
            ready=groups[saved["discarded"] :],
            in_training=saved.get("in_training", 0),
            discarded=groups[: saved["discarded"]],
            requeue=saved["requeue"],
            skipped=saved["skipped"],
            solved=Solved(
                saved["solved"]["best_reward"], {key: n for key, n in saved["solved"]["streaks"]}
            ),
            pool=_pool_of(saved),
            signal=_signal_of(saved),
        )
        return state, saved["policy_version"], saved["configuration"]


def _pool_of(saved: Mapping[str, Any]) -> Pool:
    """What was measured of the examples; older checkpoints have none."""
    values = saved.get("pool", {"range": None, "measured": []})
    measured = {key: Measured(*facts) for key, *facts in values["measured"]}
    lowest, best = values["range"] or (math.inf, -math.inf)
    return Pool(lowest, best, measured)


def _signal_of(saved: Mapping[str, Any]) -> Signal:
    """The counts of ``Signal``; a checkpoint of version 0.2.0 has none, and its batches all had a
    signal."""
    values = saved.get("signal", {"was_live": saved["delivered"] > 0})
    return Signal(**{name: value for name, value in values.items() if value is not None})


def _group_to_json(group: Group) -> dict[str, object]:
    return {
        "index": group.index,
        "example_id": group.example_id,
        "env": group.env,
        "weights": dict(group.weights),
        "component": group.component,
        "rollouts": without_copies(
            [_reproducible(rollout.to_json()) for rollout in group.rollouts]
        ),
    }


def _reproducible(saved: Mapping[str, Any]) -> dict[str, object]:
    """A saved rollout without times and random ids: equal trainings write equal checkpoints."""
    left_out = ("timing", "trajectory_id")
    steps = [{k: v for k, v in step.items() if k not in left_out} for step in saved["trajectory"]]
    return {k: v for k, v in saved.items() if k not in left_out} | {"trajectory": steps}


def _group_from_json(saved: Mapping[str, Any]) -> Group:
    rows = whole_rows(saved.get("rollouts", ()), f"group {saved['index']} of the checkpoint")
    rollouts = [Rollout.from_json(rollout) for rollout in rows]
    rollouts += [_older_rollout(record) for record in saved.get("records", ())]
    component = saved.get("component", "")  # absent in version 0.2.0
    facts = saved["index"], saved["example_id"], tuple(rollouts), saved["env"], saved["weights"]
    return Group(*facts, component)


def _older_rollout(saved: Mapping[str, Any]) -> Rollout:
    """A rollout of version 0.2.0, whose turns are whole and have no messages."""
    turns = Transcript()
    for turn in saved["turns"]:
        arrays = turn["prompt_ids"], turn["completion_ids"], turn["logprobs"]
        facts = turn["version"], turn["is_truncated"], turn.get("role", "")
        turns.append(Turn(*arrays, *facts, previous=turns[-1] if turns else None))
    for turn, reward in zip(turns, saved["turn_rewards"], strict=bool(saved["turn_rewards"])):
        turn.env_reward = reward
    error = None if saved["error"] is None else ErrorInfo.of(saved["error"])
    if error is not None and saved.get("cause"):
        innermost, _, where = saved["cause"].partition(" in ")
        error.update(error_chain_str=f"{error.error} -> {innermost}", where=where or None)
    return Rollout(
        turns,
        number(saved["reward"]),
        {name: number(value) for name, value in saved["metrics"].items()},
        Status(saved["stop"], error, saved["is_truncated"]),
        {name: text for name, text in saved["text"].items() if name != "completion"},
        saved["text"].get("completion"),
        advantage=saved.get("advantage"),
        role_rewards={k: number(v) for k, v in saved.get("role_rewards", {}).items()},
    )
