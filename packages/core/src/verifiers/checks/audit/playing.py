"""Play a scripted policy in an environment and score it: the rollouts of an audit.

A policy is a function of a ``Turn``; its replies are those of ``testing.replies``. Requests that do
not belong to the rollout come from a judge that asks the evaluated model: the client answers them
with a quotation of the question, which no rubric may take for a verdict.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.clients.resolve import client_for
from verifiers.data.examples import Example
from verifiers.data.messages import message_text
from verifiers.environments.base import Environment
from verifiers.errors import OverlongPromptError
from verifiers.rollouts.state import State
from verifiers.rubrics.scoring import SUCCESS
from verifiers.runs.plan import Job
from verifiers.runs.rollout import RunContext, generate_and_score, score_together
from verifiers.testing.replies import last_user_text, to_message
from verifiers.types import ModelRequest, Response, Usage

CONCURRENT = 8
"""Rollouts in flight."""
MAX_TURNS = 32
"""Turns after which the client ends a rollout, as a full context would: what was done so far is
scored."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy sees of a model call."""

    example: Example
    request: ModelRequest
    number: int
    """0 in the first turn of the rollout."""

    @property
    def heard(self) -> str:
        """The last user message; in completion mode the prompt."""
        return last_user_text(self.request)

    @property
    def all_heard(self) -> list[str]:
        """Every user message so far."""
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [message_text(m) for m in prompt if m.get("role") == "user"]

    @property
    def tool_texts(self) -> list[str]:
        """The results of the tool calls so far."""
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return []
        return [message_text(m) for m in prompt if m.get("role") == "tool"]


Policy = Callable[[Turn], Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """A scored rollout of a policy."""

    example: Example
    state: State
    replies: tuple[str, ...]
    """The text of each reply; of tool calls their names and arguments."""
    threshold: float | None = None
    """``env.pass_threshold``: the reward that solves the task if no success metric is named."""

    @property
    def reward(self) -> float:
        """NaN if it is unknown."""
        reward = self.state["reward"]
        return math.nan if reward is None else float(reward)

    @property
    def success(self) -> float:
        """The metric ``success``, else whether the reward reaches the threshold, else NaN."""
        by_threshold = math.nan
        if self.threshold is not None and not math.isnan(self.reward):
            by_threshold = float(self.reward >= self.threshold)
        return float(self.state["metrics"].get(SUCCESS, by_threshold))


class PolicyClient:
    """A ``Client`` that replies with a policy."""

    model = "scripted"

    def __init__(self, policy: Policy, example: Example):
        self._policy, self._example = policy, example
        self.replies: list[str] = []

    async def complete(self, request: ModelRequest) -> Response:
        """The policy's reply, or a judge's question quoted. *Raises* OverlongPromptError."""
        await asyncio.sleep(0)  # lets a time limit cancel a conversation without end
        if not request.rollout_id:
            quoted = last_user_text(request)
            quotation = to_message(f"I was asked:\n{quoted}\nI give no verdict.")[0]
            return Response(quotation, usage=Usage(1, 1), model=self.model)
        if len(self.replies) >= MAX_TURNS:
            raise OverlongPromptError(f"the audit ends a rollout after {MAX_TURNS} turns")
        reply = self._policy(Turn(self._example, request, len(self.replies)))
        message, reason = to_message(reply)
        calls = json.dumps(
            [[call.name, call.arguments] for call in message.get("tool_calls") or ()]
        )
        self.replies.append(message_text(message) + (calls if calls != "[]" else ""))
        return Response(message, reason, Usage(1, 1), model=self.model)


@dataclass(slots=True)
class Player:
    """Plays policies in one environment and counts the rollouts."""

    env: Environment
    timeout_s: float
    seed: int
    num_rollouts: int = 0

    async def play(self, policy: Policy, examples: Sequence[Example]) -> list[Trial]:
        """One scored rollout of each example, in order, ``CONCURRENT`` at a time."""
        trials: list[Trial] = []
        for start in range(0, len(examples), CONCURRENT):
            part = examples[start : start + CONCURRENT]
            trials += await asyncio.gather(*(self.play_one(policy, example) for example in part))
        return trials

    async def play_one(self, policy: Policy, example: Example) -> Trial:
        """A scored rollout. *Raises* as a run does, for errors that would stop it."""
        client = PolicyClient(policy, example)
        async with client_for(client, None) as (resolved, name):
            context = RunContext(resolved, name, seed=self.seed, rollout_timeout_s=self.timeout_s)
            state = await generate_and_score(
                self.env, Job(example, 0, 1, self.num_rollouts), context
            )
            if self.env.rubric.has_group_rewards:
                await score_together(self.env, [state], context)
        self.num_rollouts += 1
        return Trial(example, state, tuple(client.replies), self.env.pass_threshold)
