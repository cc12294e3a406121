"""Single rollouts and single groups, without plan or disk, in the present and the older forms of the call.

``rollout`` runs one rollout without scoring it. ``run_rollout`` and ``run_group`` run and score, and record the failure
of a rollout on its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifiers.clients.resolve import client_for
from verifiers.data.examples import copy_row, examples_from
from verifiers.data.messages import normalize_messages
from verifiers.errors import ConfigError
from verifiers.results.rows import state_to_output
from verifiers.rollouts.loop import generate
from verifiers.rollouts.state import State
from verifiers.runs.options import RunOptions
from verifiers.runs.runner import Job, RunContext, RunEnvironment, generate_and_score, generate_group, score_together
from verifiers.runtime.calls import FinishedTuple
from verifiers.runtime.suggest import check_keywords

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike, ModelLike

TIMEOUT_S: float | None = RunOptions().rollout_timeout_s


async def rollout(env: RunEnvironment, *args: Any, **keywords: Any) -> Any:
    """Both forms of ``Environment.rollout``: by row -> State, by prompt -> (completion, state)."""
    if (args and isinstance(args[0], Mapping)) or "input" in keywords:
        return await _rollout_of_row(env, *args, **keywords)
    return await _rollout_of_prompt(env, *args, **keywords)


async def _rollout_of_row(
    env: RunEnvironment,
    input: Mapping[str, Any],
    client: ClientLike | None = None,
    model: ModelLike | None = None,
    sampling_args: Mapping[str, Any] | None = None,
) -> State:
    row = copy_row(examples_from([input], env.row_format)[0].row)
    async with client_for(client, model) as (resolved, name):
        state = await env.init_state(row, resolved if client is None else client, name, sampling_args)
        if state.run is not None:  # called by an author's rollout() inside a run, which has its time limit
            return await generate(env, state)
        state.run = RunContext(resolved, name, given_client=client, rollout_timeout_s=TIMEOUT_S)
        return await generate(env, state, TIMEOUT_S)


async def _rollout_of_prompt(
    env: RunEnvironment,
    client: ClientLike | None = None,
    model: ModelLike | None = None,
    prompt: object = None,
    answer: object = "",
    task: str | None = None,
    info: Mapping[str, Any] | None = None,
    sampling_args: Mapping[str, Any] | None = None,
    **sampling: object,
) -> tuple[Any, State]:
    if prompt is None:
        raise ConfigError("rollout() needs a row (input=…) or a prompt (prompt=…)")
    row = {"prompt": normalize_messages(prompt, env.message_type), "answer": answer, "info": dict(info or {})}
    row["task"] = task or env.env_id or "default"
    state = await _rollout_of_row(env, row, client, model, {**(sampling_args or {}), **sampling})
    return FinishedTuple((state["completion"], state))


async def run_rollout(env: RunEnvironment, input: Any, client: Any, model: Any, *args: Any, **keywords: Any) -> Any:
    """Run and score one rollout: returns a ``State`` for older keywords, a ``RolloutOutput`` for present ones.

    A fourth positional argument is the sampling arguments, of either form.

    The oldest form, with a semaphore before the row, also returns a ``State``.
    """
    if not isinstance(input, Mapping) and hasattr(input, "__aenter__"):
        keywords = {"gen_sem": input, **keywords}
        input, client, model, args = client, model, args[0] if args else None, args[1:]
    arguments = _CallArguments.of(args, keywords, "run_rollout")
    async with client_for(client, model) as (resolved, name):
        context, jobs = arguments.context(env, resolved, name, client), _jobs(env, [input])
        state = await generate_and_score(env, jobs[0], context)
        if env.rubric.has_group_rewards:
            await score_together(env, [state], context)
            state["advantage"] = None
        else:
            await env.rubric.run_cleanup([state])
    return arguments.shape([state])[0]


async def run_group(
    env: RunEnvironment,
    group_inputs: Sequence[Mapping[str, Any]],
    client: ClientLike | None,
    model: ModelLike | None,
    *args: object,
    **keywords: object,
) -> list[Any]:
    """Run and score siblings of one example, with advantages; result types as in ``run_rollout``."""
    arguments = _CallArguments.of(args, keywords, "run_group")
    async with client_for(client, model) as (resolved, name):
        states = await generate_group(env, _jobs(env, group_inputs), arguments.context(env, resolved, name, client))
    return arguments.shape(states)


def _jobs(env: RunEnvironment, rows: Sequence[Mapping[str, Any]]) -> list[Job]:
    examples = examples_from(list(rows), env.row_format)
    return [Job(example, n, len(examples), n) for n, example in enumerate(examples)]


_OLDER_KEYWORDS = ("gen_sampling_args", "gen_sem", "score_sem", "score")
_PRESENT_KEYWORDS = ("sampling_args", "max_retries", "state_columns", "env_client")


@dataclass(frozen=True, slots=True)
class _CallArguments:
    """The arguments of ``run_rollout`` and ``run_group``, from present or older keywords."""

    sampling_args: Mapping[str, Any]
    gen_sem: AbstractAsyncContextManager[Any]
    score_sem: AbstractAsyncContextManager[Any]
    score: bool
    max_retries: int
    as_states: bool
    state_columns: Sequence[str]

    @classmethod
    def of(cls, args: Sequence[Any], keywords: Mapping[str, Any], where: str) -> _CallArguments:
        named = {**dict(zip(_OLDER_KEYWORDS, args, strict=False)), **keywords}
        check_keywords(named, (*_OLDER_KEYWORDS, *_PRESENT_KEYWORDS), where)
        return cls(
            sampling_args=named.get("gen_sampling_args") or named.get("sampling_args") or {},
            gen_sem=named.get("gen_sem") or nullcontext(),
            score_sem=named.get("score_sem") or nullcontext(),
            score=named.get("score", True),
            max_retries=named.get("max_retries", 0),
            as_states=len(args) > 1 or not keywords.keys().isdisjoint(_OLDER_KEYWORDS),
            state_columns=named.get("state_columns") or (),
        )

    def context(self, env: RunEnvironment, client: object, model: str, given_client: object) -> RunContext:
        """The context of one call; ``gen_sem`` limits model calls, ``score_sem`` scoring."""
        return RunContext(
            client=client,
            model=model,
            sampling_args=self.sampling_args,
            score=self.score and env.score_rollouts,
            max_retries=self.max_retries,
            generation_slot=self.gen_sem,
            scoring_slot=self.score_sem,
            given_client=given_client,
        )

    def shape(self, states: list[State]) -> list[Any]:
        return states if self.as_states else [state_to_output(state, self.state_columns) for state in states]
