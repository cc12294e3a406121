"""Convert rollouts for the training loop of tinker-cookbook.

Every transition is one model call with its sampled tokens, so the cookbook merges turns by their
ids. A rollout with an error or an unknown reward gets the mean of its siblings' known rewards: its
advantage to the mean of the group is zero, so its tokens are not trained. ``vf_unscored`` marks
unknown rewards.

Tested with tinker-cookbook 0.5.7: its types, advantages and data assembly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers_integrations.common import (
    environment,
    generate_group,
    group_worth,
    known_metrics,
    record_of,
    row_of,
)
from verifiers_integrations.peers import Peer, beside_trainer
from verifiers_integrations.tinker.client import TINKER, TinkerClient

COOKBOOK = Peer(
    "tinker_cookbook",
    "tinker-cookbook",
    ("0.5.7",),
    lambda: beside_trainer("tinker-cookbook==0.5.7"),
)


def to_trajectory_group(rollouts: Sequence[Mapping[str, object]]) -> Any:
    """Convert siblings (states, or outputs with their trajectories) to a ``TrajectoryGroup``."""
    types = COOKBOOK.load("rl.types")
    values = group_worth(rollouts)
    rewards = [value.reward for value in values if not value.is_masked]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return types.TrajectoryGroup(
        trajectories_G=[_trajectory(rollout) for rollout in rollouts],
        final_rewards_G=[mean if value.is_masked else value.reward for value in values],
        metrics_G=[
            known_metrics(rollout) | value.metrics
            for rollout, value in zip(rollouts, values, strict=True)
        ],
    )


def _trajectory(rollout: Mapping[str, object]) -> object:
    types, sdk = COOKBOOK.load("rl.types"), TINKER.load()
    completers = COOKBOOK.load("completers")
    turns = record_of(rollout).turns
    transitions = [
        types.Transition(
            ob=sdk.ModelInput.from_ints(turn.prompt_ids.tolist()),
            ac=completers.TokensWithLogprobs(
                tokens=turn.completion_ids.tolist(), maybe_logprobs=turn.sampler_logprobs.tolist()
            ),
            reward=0.0,
            episode_done=turn is turns[-1],
        )
        for turn in turns
    ]
    last = turns[-1].full_ids().tolist() if turns else []
    return types.Trajectory(transitions=transitions, final_ob=sdk.ModelInput.from_ints(last))


@dataclass(frozen=True, slots=True)
class VerifiersGroupBuilder:
    """A group to generate: environment id, row and number of siblings. Plain values, so it can be
    pickled."""

    env_id: str
    row: dict[str, Any]
    group_size: int
    env_args: dict[str, Any] = field(default_factory=dict)
    max_retries: int = 0

    async def play(
        self, client: TinkerClient, sampling_args: Mapping[str, object] | None = None
    ) -> Any:
        """Generate the group with the policy of ``client``; return its ``TrajectoryGroup``."""
        env = environment(self.env_id, json.dumps(self.env_args, sort_keys=True))
        rows = [row_of(self.row, env.message_type)] * self.group_size
        return to_trajectory_group(
            await generate_group(
                env, rows, client, client.model, dict(sampling_args or {}), self.max_retries
            )
        )
