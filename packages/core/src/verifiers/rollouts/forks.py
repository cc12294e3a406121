"""Forks: states that share the turns of a rollout so far and go on apart from it.

Promise: a branch has turns of its own, which share messages and tokens with those of its parent; a
deep copy of the author's keys; what the environment's ``@fork`` methods put into it, such as a
copied sandbox; and seeds that follow from its parent's and from its number. Its usage and its times
count from the fork on, so that sums over rollouts are what was spent. It is not set up again, and
is cleaned up as every rollout.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verifiers.data.row_format import copy_row
from verifiers.errors import UsageError
from verifiers.rollouts.author_code import Hook, decorated, maybe_await
from verifiers.rollouts.contract import RolloutEnvironment
from verifiers.rollouts.loop import clean_up, new_id
from verifiers.rollouts.state import OF_THE_RUN, State
from verifiers.rollouts.values import Timing

OF_A_CONVERSATION = "final_"
"""Prefix of counts of usage that describe the conversation, which a branch continues."""


async def forked(state: State, n: int) -> list[State]:
    """``State.fork``."""
    env = state.env
    if env is None:
        raise UsageError("state.fork needs a state that a run made: this one has no environment")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"state.fork makes at least one branch, not {n!r}")
    branches: list[State] = []
    try:
        for _ in range(n):
            state.num_branches += 1
            branches.append(branch := _without_keys(state))
            with Hook(state, "fork", stops_run=True):
                for _, handler, _ in decorated(env, "fork"):
                    await maybe_await(handler(state, branch))
                _copy_keys(env, state, branch)
    except BaseException:  # a cancellation, too: what the branches opened is closed; raised again
        await cleaned_up(branches)
        raise
    return branches


async def cleaned_up(branches: Sequence[State]) -> None:
    """Close what branches hold that will not go on."""
    await asyncio.gather(*(clean_up(branch.env, branch) for branch in branches))


def _without_keys(state: State) -> State:
    """A branch of a state, still without the author's keys."""
    rollout = state.record
    branch = State.of(
        replace(
            rollout,
            transcript=rollout.transcript.forked(),
            row=copy_row(rollout.row),
            metrics=dict(rollout.metrics),
            tool_defs=copy_row(rollout.tool_defs),
            timing=Timing(start_time=rollout.timing["start_time"]),
            usage=dict(rollout.usage),
            failed_requests={},
            id=new_id(),
        )
    )
    branch.usage_before = {
        name: count
        for name, count in rollout.usage.items()
        if not name.startswith(OF_A_CONVERSATION)
    }
    branch.env, branch.run, branch.is_branch = state.env, state.run, True
    branch.seed_key = f"{state.seed_key}.{state.num_branches}"
    branch.saved_columns, branch.next_prompt = state.saved_columns, state.next_prompt
    branch.counted = list(state.counted)
    return branch


def _copy_keys(env: RolloutEnvironment, state: State, branch: State) -> None:
    """Copy the author's keys that no ``@fork`` method set; what they share is shared in the copy.

    *Raises* UsageError that names a key that cannot be copied: no branch of the environment can.
    """
    shared = (env, state["client"], state.run)
    memo: dict[int, Any] = {id(value): value for value in shared}
    memo |= {id(state): branch, id(state.record): branch.record}
    set_by_handlers = set(dict.keys(branch)) - OF_THE_RUN.keys()
    for key, value in dict.items(state):
        if key in set_by_handlers:
            continue
        try:
            dict.__setitem__(branch, key, copy.deepcopy(value, memo))
        except Exception as error:
            raise UsageError(
                f"state[{key!r}] (a {type(value).__name__}) cannot be copied for a branch"
                f" ({type(error).__name__}: {error}); give {type(env).__name__} a method"
                f" @vf.fork(self, state, branch) that sets branch[{key!r}]"
            ) from error


State.FORKED = staticmethod(forked)
