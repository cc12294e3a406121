"""What the adapters share: token samples of a rollout, what an unknown reward becomes, rows, offline groups.

Promise: every adapter's tokens come from the trainer's own merge of turns (``samples``), and every adapter treats an
unknown reward alike: with its siblings in sight it gets the mean of the known ones, alone it gets 0.0, and in both
cases no token of it is trained and ``vf_unscored`` says so. Nothing here knows a peer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.integrations.trajectories import read_trajectories
from verifiers.results.rows import output_to_state
from verifiers.rollouts.state import State
from verifiers.types import Message, ModelRequest, Response, Rollout
from verifiers_trainer.algorithm.samples import Sample, merge_turns
from verifiers_trainer.integrations.offline import offline_groups
from verifiers_trainer.integrations.token_client import TokenClient

__all__ = [
    "ExportSample",
    "TokenClient",
    "Worth",
    "export_samples",
    "generate_group",
    "group_worth",
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
"""Sampling arguments that ask a server for token ids and log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportSample:
    """One token row for a peer: what came before the first sampled token, and everything from there on.

    Example: ``ExportSample([1, 15], [7, 2, 9, 8], [1, 1, 0, 1], [-.1, -.7, 0, -.2], [4, 4, -2, 5], 1.0, True)``
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 = sampled by the policy, 0 = written by the environment."""
    logprobs: list[float]
    """Of the processed distribution that was sampled; 0.0 where the mask is 0."""
    versions: list[int]
    temperature: float
    is_last: bool
    """Whether the conversation ended in this row; a rollout that forked has earlier ones."""

    def masked(self) -> ExportSample:
        """The same tokens, none of which is to be trained."""
        zeros = [0] * len(self.response_ids)
        return ExportSample(
            self.prompt_ids, self.response_ids, zeros, [0.0] * len(zeros), self.versions, self.temperature, self.is_last
        )


def export_samples(rollout: Mapping[str, Any], temperature: float | None = None) -> list[ExportSample]:
    """The token rows of a finished rollout (a ``State``, or an output with its trajectory), in order.

    ``temperature`` defaults to what the rollout was sampled with, else 1.0. Empty when nothing was sampled. *Raises*
    ConfigError when a turn has no token ids: text that is tokenised again need not be what was sampled.
    """
    for number, step in enumerate(rollout.get("trajectory") or ()):
        if step["tokens"] is None:
            raise ConfigError(
                f"turn {number} of a rollout of example {rollout['example_id']} has no token ids and no "
                "log-probabilities; sample from a server that returns them (return_token_ids, logprobs)"
            )
    if temperature is None:
        sampling = rollout.get("sampling_args") or {}
        temperature = float(sampling.get("temperature") or 1.0)
    made = merge_turns(record_of(rollout).turns)
    return [_exported(sample, temperature, sample is made[-1]) for sample in made]


def record_of(rollout: Mapping[str, Any]) -> Rollout:
    """The finished rollout of a ``State`` or of an output with its trajectory."""
    state = rollout if isinstance(rollout, State) else output_to_state(rollout)
    return state.rollout()


def _exported(sample: Sample, temperature: float, is_last: bool) -> ExportSample:
    start = int(np.argmax(sample.loss_mask))
    return ExportSample(
        sample.token_ids[:start].tolist(),
        sample.token_ids[start:].tolist(),
        sample.loss_mask[start:].astype(int).tolist(),
        sample.sampler_logprobs[start:].tolist(),
        sample.versions[start:].tolist(),
        temperature,
        is_last,
    )


@dataclass(frozen=True, slots=True)
class Worth:
    """The number a peer gets for a rollout, and whether its tokens may be trained."""

    reward: float
    is_masked: bool
    is_unscored: bool

    @property
    def metrics(self) -> dict[str, float]:
        """``{"vf_unscored": 1.0}`` for an unknown reward, else 0.0."""
        return {"vf_unscored": float(self.is_unscored)}


def worth(rollout: Mapping[str, Any]) -> Worth:
    """Of a rollout seen alone: 0.0 when its reward is unknown, which the peer's own baseline counts (a bias)."""
    return group_worth([rollout], stand_in=0.0)[0]


def group_worth(rollouts: Sequence[Mapping[str, Any]], stand_in: float | None = None) -> list[Worth]:
    """Of siblings: an unknown reward becomes the mean of the known ones (0.0 when there are none)."""
    rewards = [math.nan if one["reward"] is None else float(one["reward"]) for one in rollouts]
    known = [reward for reward in rewards if not math.isnan(reward)]
    if stand_in is None:
        stand_in = sum(known) / len(known) if known else 0.0
    made = []
    for reward, one in zip(rewards, rollouts, strict=True):
        unknown = math.isnan(reward)
        made.append(Worth(stand_in if unknown else reward, unknown or one["error"] is not None, unknown))
    return made


# --- rows -------------------------------------------------------------------------------------------------------------


def peer_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset row as peers carry it: ``prompt answer info task example_id`` always, plain JSON types."""
    info = row.get("info")
    task = {
        "prompt": [dict(message) for message in row["prompt"]] if isinstance(row["prompt"], list) else row["prompt"],
        "answer": row.get("answer", ""),
        "info": json.loads(info) if isinstance(info, str) and info else dict(info or {}),
        "task": row.get("task", "default"),
        "example_id": int(row["example_id"]),
    }
    return task | {name: value for name, value in row.items() if name not in task}


def row_of(task: Mapping[str, Any], message_type: str = "chat") -> dict[str, Any]:
    """The row that a rollout starts from, of a peer's task; absent columns get their defaults.

    *Raises* ConfigError without ``prompt`` or ``example_id``.
    """
    for name in ("prompt", "example_id"):
        if task.get(name) is None:
            raise ConfigError(f"a task needs {name!r}; it has {', '.join(task)}", key=name)
    row = peer_task(task)
    return row | {"prompt": normalize_messages(row["prompt"], message_type)}


def limit(env: Environment, max_samples: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, eval) tasks of an environment, the first ``max_samples`` of each; None takes all."""
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"max_samples is {max_samples}; it must be at least 1, or None for all", key="max_samples")
    return _head(env.get_dataset, max_samples), _head(env.get_eval_dataset, max_samples)


def _head(get: Any, count: int | None) -> list[dict[str, Any]]:
    rows = get()
    return [peer_task(rows[index]) for index in range(min(len(rows), len(rows) if count is None else count))]


async def generate_group(
    env: Environment,
    rows: Sequence[Mapping[str, Any]],
    client: Any,
    model: str,
    sampling_args: Mapping[str, Any],
    max_retries: int = 0,
) -> list[Any]:
    """Siblings played and scored together, with their tokens; a failure is its rollout's, never raised."""
    return await env.run_group(
        group_inputs=list(rows),
        client=client,
        model=model,
        sampling_args={**sampling_args, **WITH_TOKENS},
        max_retries=max_retries,
        state_columns=["trajectory"],
    )


async def score_completion(env: Environment, task: Mapping[str, Any], completion: Any) -> float:
    """What one given completion of a task is worth to a single-turn environment; NaN when unknown."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    state = await env.run_rollout(row_of(task, env.message_type), _Said(text), "said", gen_sampling_args={})
    return float(state["reward"])


class _Said:
    """A client that says what was said already."""

    def __init__(self, text: str):
        self._message = Message(role="assistant", content=text)

    async def complete(self, request: ModelRequest) -> Response:
        return Response(self._message)
