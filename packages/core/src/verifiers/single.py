"""Single rollouts and single groups, by every historical form of the call: no plan, no disk, no limits.

``rollout`` plays one and does not score it. ``run_rollout`` and ``run_group`` play and score, and never raise for a
rollout's own failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from verifiers import clients
from verifiers.dataset import copy_row, examples_from
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError
from verifiers.messages import normalize_messages
from verifiers.rollout import play
from verifiers.rows import state_to_output
from verifiers.runner import Job, RunContext, play_and_score, play_group
from verifiers.state import State


async def rollout(env: Environment, *args: Any, **keywords: Any) -> Any:
    """Both historical forms of ``Environment.rollout``: by row -> State, by prompt -> (completion, state)."""
    if (args and isinstance(args[0], Mapping)) or "input" in keywords:
        return await _rollout_of_row(env, *args, **keywords)
    return await _rollout_of_prompt(env, *args, **keywords)


async def _rollout_of_row(
    env: Environment,
    input: Mapping[str, Any],
    client: Any = None,
    model: Any = None,
    sampling_args: Mapping[str, Any] | None = None,
) -> State:
    resolved, name = clients.resolve_client(client, model)
    try:
        row = examples_from([input], env.row_format)[0].row
        state = await env.init_state(copy_row(row), resolved, name, sampling_args)
        return await play(env, state)
    finally:
        if resolved is not client:
            await clients.close(resolved)


async def _rollout_of_prompt(
    env: Environment,
    client: Any = None,
    model: Any = None,
    prompt: Any = None,
    answer: Any = "",
    task: str | None = None,
    info: Mapping[str, Any] | None = None,
    sampling_args: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> tuple[Any, State]:
    if prompt is None:
        raise ConfigError("rollout() needs a row (input=…) or a prompt (prompt=…)")
    row = {"prompt": normalize_messages(prompt, env.message_type), "answer": answer, "info": dict(info or {})}
    row["task"] = task or env.env_id or "default"
    state = await _rollout_of_row(env, row, client, model, {**(sampling_args or {}), **sampling})
    return state["completion"], state


async def run_rollout(
    env: Environment, input: Mapping[str, Any], client: Any, model: Any, *args: Any, **keywords: Any
) -> Any:
    """One scored rollout: a ``State`` for the keywords of one age, a ``RolloutOutput`` for those of the other."""
    wanted = _Wanted.of(args, keywords)
    async with wanted.gen_sem:
        context, job = _single(env, [input], client, model, wanted)
        state = await play_and_score(env, job[0], context)
    return wanted.shape([state])[0]


async def run_group(
    env: Environment, group_inputs: Sequence[Mapping[str, Any]], client: Any, model: Any, *args: Any, **keywords: Any
) -> list:
    """Scored siblings of one example with advantages, in either of the two historical shapes."""
    wanted = _Wanted.of(args, keywords)
    async with wanted.gen_sem:
        context, jobs = _single(env, group_inputs, client, model, wanted)
        states = await play_group(env, jobs, context)
    return wanted.shape(states)


def _single(env: Environment, rows: Any, client: Any, model: Any, wanted: _Wanted) -> tuple[RunContext, list[Job]]:
    resolved, name = clients.resolve_client(client, model)
    context = RunContext(
        client=resolved,
        model=name,
        sampling_args=wanted.sampling_args,
        score=wanted.score and env.score_rollouts,
        max_retries=wanted.max_retries,
    )
    examples = examples_from(list(rows), env.row_format)
    return context, [Job(example, n, len(examples), n) for n, example in enumerate(examples)]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the keywords of ``run_rollout`` and ``run_group`` ask for, whichever age they are of."""

    sampling_args: Mapping[str, Any]
    gen_sem: AbstractAsyncContextManager[Any]
    score: bool
    max_retries: int
    as_states: bool
    state_columns: Sequence[str]

    @classmethod
    def of(cls, args: Sequence[Any], keywords: dict[str, Any]) -> _Wanted:
        positional = dict(zip(("gen_sampling_args", "gen_sem", "score_sem"), args, strict=False))
        given = {**positional, **keywords}
        allowed = {
            "gen_sampling_args",
            "gen_sem",
            "score_sem",
            "score",
            "sampling_args",
            "max_retries",
            "state_columns",
        }
        if unknown := given.keys() - allowed - {"env_client"}:
            raise ConfigError(f"run_rollout/run_group does not know {', '.join(sorted(unknown))}")
        older = given.keys() & {"gen_sampling_args", "gen_sem", "score_sem", "score"}
        return cls(
            sampling_args=given.get("gen_sampling_args") or given.get("sampling_args") or {},
            gen_sem=given.get("gen_sem") or nullcontext(),
            score=given.get("score", True),
            max_retries=given.get("max_retries", 0),
            as_states=bool(older),
            state_columns=given.get("state_columns") or (),
        )

    def shape(self, states: list[State]) -> list:
        return states if self.as_states else [state_to_output(state, self.state_columns) for state in states]
