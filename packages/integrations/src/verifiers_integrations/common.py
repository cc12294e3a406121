"""Shared code of the adapters: token samples of a rollout, replacement of unknown rewards, rows,
offline groups.

All adapters merge turns as the trainer does (``transcript.branches``) and treat unknown rewards
alike: with siblings available an unknown reward becomes the mean of the known rewards, otherwise
0.0; in both cases all its tokens are masked and ``vf_unscored`` is 1. This module depends on no
peer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verifiers.clients.protocol import ClientLike
from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError
from verifiers.results.rows import output_to_state
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.rollouts.transcript import Branch, branches
from verifiers.runs.rollout import scored_rollout
from verifiers.runtime.decoding import decode_json
from verifiers.types import Message, Messages, ModelRequest, Response
from verifiers_integrations.offline import offline_groups
from verifiers_integrations.token_client import TokenClient
from verifiers_integrations.trajectories import read_trajectories

__all__ = [
    "ExportSample",
    "TokenClient",
    "Worth",
    "environment",
    "export_samples",
    "generate_group",
    "group_worth",
    "known_metrics",
    "limit",
    "offline_groups",
    "peer_task",
    "read_trajectories",
    "record_of",
    "row_of",
    "score_completion",
    "worth",
]


WITH_TOKENS = {"logprobs": True, "return_tokens_as_token_ids": True}
"""Sampling arguments that request token ids and log-probabilities from a server."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportSample:
    """A token sample for a peer, split before the first sampled token: P ids of the prompt, then T.

    Example: ``ExportSample([1, 15], [7, 2, 9, 8], [1, 1, 0, 1], [-.1, -.7, 0, -.2], [4, 4, -2, 5],
    1.0, True)``
    """

    prompt_ids: list[int]  # [P]
    response_ids: list[int]  # [T]
    response_mask: list[int]  # [T]
    """1 = sampled by the policy, 0 = written by the environment."""
    logprobs: list[float]  # [T], nats
    """Log-probabilities under the processed distribution that was sampled; 0.0 if
    the mask is 0."""
    versions: list[int]  # [T], the policy version; below 0 if nothing was sampled
    temperature: float
    is_last: bool
    """Whether the conversation ends in this sample; a rollout that forked has earlier samples."""

    def masked(self) -> ExportSample:
        """Return the same tokens with all of them masked."""
        length = len(self.response_ids)
        return replace(self, response_mask=[0] * length, logprobs=[0.0] * length)


def export_samples(
    rollout: Mapping[str, Any], temperature: float | None = None
) -> list[ExportSample]:
    """Return the token samples of a finished rollout (a ``State``, or an output with its
    trajectory), in order.

    ``temperature`` defaults to that of the rollout's sampling arguments, else 1.0. Empty when no
    token was sampled. *Raises* ConfigError when a turn has no token ids: tokenising its text again
    may give other ids.
    """
    for number, step in enumerate(rollout.get("trajectory") or ()):
        if step["tokens"] is None:
            raise ConfigError(
                f"turn {number} of a rollout of example {rollout['example_id']} has no token ids"
                " and no log-probabilities; sample from a server that returns them"
                " (return_token_ids, logprobs)"
            )
    if temperature is None:
        sampling = rollout.get("sampling_args") or {}
        temperature = float(sampling.get("temperature") or 1.0)
    merged = [branch for branch in branches(record_of(rollout).turns) if branch.sampled.any()]
    return [_export_sample(branch, temperature, branch is merged[-1]) for branch in merged]


def record_of(rollout: Mapping[str, object]) -> Rollout:
    """Return the ``Rollout`` of a finished ``State`` or of an output with its trajectory."""
    state = rollout if isinstance(rollout, State) else output_to_state(rollout)
    return state.rollout()


def _export_sample(branch: Branch, temperature: float, is_last: bool) -> ExportSample:
    start = int(np.argmax(branch.sampled))
    assert branch.sampler_logprobs is not None  # a server that returns ids returns them too
    return ExportSample(
        branch.token_ids[:start].tolist(),
        branch.token_ids[start:].tolist(),
        branch.sampled[start:].astype(int).tolist(),
        branch.sampler_logprobs[start:].tolist(),
        branch.versions[start:].tolist(),
        temperature,
        is_last,
    )


@dataclass(frozen=True, slots=True)
class Worth:
    """Reward of a rollout for a peer, and whether its tokens are masked."""

    reward: float
    is_masked: bool
    is_unscored: bool

    @property
    def metrics(self) -> dict[str, float]:
        """``{"vf_unscored": 1.0}`` for an unknown reward, else 0.0."""
        return {"vf_unscored": float(self.is_unscored)}


def worth(rollout: Mapping[str, object]) -> Worth:
    """Return the worth of a rollout without siblings: an unknown reward becomes 0.0, which biases
    baselines."""
    return group_worth([rollout], default=0.0)[0]


def group_worth(rollouts: Sequence[Mapping[str, Any]], default: float | None = None) -> list[Worth]:
    """Return the worth of siblings: an unknown reward becomes the mean of the known rewards (0.0
    without any)."""
    rewards = [
        math.nan if saved["reward"] is None else float(saved["reward"]) for saved in rollouts
    ]
    finite = [reward for reward in rewards if not math.isnan(reward)]
    if default is None:
        default = sum(finite) / len(finite) if finite else 0.0
    result = []
    for reward, rollout in zip(rewards, rollouts, strict=True):
        is_unknown = math.isnan(reward)
        is_masked = is_unknown or rollout["error"] is not None
        result.append(Worth(default if is_unknown else reward, is_masked, is_unknown))
    return result


def known_metrics(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a rollout without those that are unknown."""
    return {
        name: float(value) for name, value in rollout["metrics"].items() if not math.isnan(value)
    }


# --- environments and their rows ------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def environment(env_id: str, env_args: str) -> Environment:
    """Load an environment, once per id and arguments, which are JSON; a batch may have several."""
    return load_environment(env_id, **json.loads(env_args))


def peer_task(row: Mapping[str, Any]) -> dict[str, object]:
    """Convert a dataset row to a task of plain JSON types; always with ``prompt answer info task
    example_id``."""
    info = row.get("info")
    task = {
        "prompt": (
            [dict(message) for message in row["prompt"]]
            if isinstance(row["prompt"], list)
            else row["prompt"]
        ),
        "answer": row.get("answer", ""),
        "info": decode_json(info) if isinstance(info, str) and info else dict(info or {}),
        "task": row.get("task", "default"),
        "example_id": int(row["example_id"]),
    }
    return task | {name: value for name, value in row.items() if name not in task}


def row_of(task: Mapping[str, object], message_type: str = "chat") -> dict[str, Any]:
    """Convert a peer's task to the row of a rollout; absent columns get their defaults.

    *Raises* ConfigError without ``prompt`` or ``example_id``.
    """
    for name in ("prompt", "example_id"):
        if task.get(name) is None:
            raise ConfigError(f"a task needs {name!r}; it has {', '.join(task)}", key=name)
    row = peer_task(task)
    return row | {"prompt": normalize_messages(row["prompt"], message_type)}


def limit(
    env: Environment, max_samples: int | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first ``max_samples`` (train, eval) tasks of an environment; None returns all."""
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"max_samples is {max_samples}; it must be at least 1, or None for all",
            key="max_samples",
        )
    return _head(env.get_dataset, max_samples), _head(env.get_eval_dataset, max_samples)


def _head(
    get: Callable[[], Sequence[Mapping[str, object]]], count: int | None
) -> list[dict[str, object]]:
    rows = get()
    return [
        peer_task(rows[index])
        for index in range(min(len(rows), len(rows) if count is None else count))
    ]


async def generate_group(
    env: Environment,
    rows: Sequence[Mapping[str, object]],
    client: ClientLike,
    model: str,
    sampling_args: Mapping[str, object],
    max_retries: int = 0,
) -> list[Any]:
    """Run and score siblings together, with their tokens; failures are recorded in their rollouts,
    not raised."""
    return await env.run_group(
        group_inputs=list(rows),
        client=client,
        model=model,
        sampling_args={**sampling_args, **WITH_TOKENS},
        max_retries=max_retries,
        state_columns=["trajectory"],
    )


async def score_completion(
    env: Environment, task: Mapping[str, object], completion: Messages
) -> float:
    """Return the reward of a completion of a task in a single-turn environment; NaN
    when unknown."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    state = await scored_rollout(
        env, row_of(task, env.message_type), _FixedCompletion(text), "fixed"
    )
    return float(state["reward"])


class _FixedCompletion:
    """A client that returns a given completion."""

    def __init__(self, text: str):
        self._message = Message(role="assistant", content=text)

    async def complete(self, request: ModelRequest) -> Response:
        return Response(self._message)
