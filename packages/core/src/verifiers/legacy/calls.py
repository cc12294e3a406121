"""Older arguments of ``rollout``, ``run_rollout`` and ``run_group``, which return states instead of
rows.

``older_rollout`` and ``older_run`` wrap the methods of ``Environment`` when its class is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from verifiers.runtime.suggest import check_keywords

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike, ModelLike
    from verifiers.environments.base import Environment
    from verifiers.rollouts.state import State

OLDER_KEYWORDS = ("gen_sampling_args", "gen_sem", "score_sem", "score")
LEADING = {"input": "rows", "group_inputs": "rows", "client": "client", "model": "model"}
PRESENT_KEYWORDS = ("sampling_args", "max_retries", "state_columns", "env_client")


def older_rollout(native: Callable[..., object]) -> Callable[..., object]:
    """``rollout``, also as ``rollout(client=…, model=…, prompt=…, **sampling) -> (completion,
    state)``."""

    @functools.wraps(native)
    def rollout(env: Environment, *args: Any, **keywords: Any) -> Any:
        from verifiers.runtime.calls import dual

        if (args and isinstance(args[0], Mapping)) or "input" in keywords:
            return native(env, *args, **keywords)
        return dual(lambda: _rollout_of_prompt(env, *args, **keywords))

    return rollout


async def _rollout_of_prompt(
    env: Environment,
    client: ClientLike | None = None,
    model: ModelLike | None = None,
    prompt: object = None,
    answer: object = "",
    task: str | None = None,
    info: Mapping[str, object] | None = None,
    sampling_args: Mapping[str, object] | None = None,
    **sampling: object,
) -> tuple[object, State]:
    from verifiers.data.messages import normalize_messages
    from verifiers.errors import ConfigError
    from verifiers.legacy.awaited import FinishedTuple
    from verifiers.runs.rollout import single_rollout

    if prompt is None:
        raise ConfigError("rollout() needs a row (input=…) or a prompt (prompt=…)")
    row = {
        "prompt": normalize_messages(prompt, env.message_type),
        "answer": answer,
        "info": dict(info or {}),
    }
    row["task"] = task or env.env_id or "default"
    state = await single_rollout(env, row, client, model, {**(sampling_args or {}), **sampling})
    return FinishedTuple((state["completion"], state))


def older_run(native: Callable[..., Any]) -> Callable[..., object]:
    """``run_rollout`` or ``run_group``, which return states for older keywords and for several
    further arguments.

    A fourth positional argument is the sampling arguments, of either form. The oldest form of
    ``run_rollout`` has a semaphore before the row.
    """

    @functools.wraps(native)
    async def run(env: Environment, *args: Any, **keywords: object) -> Any:
        if args and hasattr(args[0], "__aenter__"):
            keywords = {"gen_sem": args[0], **keywords}
            args = args[1:]
        further = dict(zip(OLDER_KEYWORDS, args[3:], strict=False)) | {
            name: value for name, value in keywords.items() if name not in LEADING
        }
        check_keywords(further, (*OLDER_KEYWORDS, *PRESENT_KEYWORDS), native.__name__)
        if len(args) > 4 or not keywords.keys().isdisjoint(OLDER_KEYWORDS):
            leading = dict(zip(("rows", "client", "model"), args, strict=False)) | {
                LEADING[name]: value for name, value in keywords.items() if name in LEADING
            }
            return await _states(env, native.__name__, further, **leading)
        keywords.pop("env_client", None)
        return await native(env, *args, **keywords)

    return run


async def _states(
    env: Environment,
    method: str,
    further: Mapping[str, object],
    rows: object,
    client: ClientLike | None = None,
    model: ModelLike | None = None,
) -> object:
    """States of a rollout or of a group. ``gen_sem`` limits model calls,
    ``score_sem`` scoring."""
    from verifiers.runs.rollout import scored_group, scored_rollout

    run: Callable[..., Any] = scored_group if method == "run_group" else scored_rollout
    return await run(
        env,
        rows,
        client,
        model,
        further.get("gen_sampling_args") or further.get("sampling_args"),
        score=further.get("score", True),
        max_retries=further.get("max_retries", 0),
        generation_slot=further.get("gen_sem") or nullcontext(),
        scoring_slot=further.get("score_sem") or nullcontext(),
    )
