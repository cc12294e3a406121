"""When a rollout stops: the ``@stop`` methods of an environment, by priority, then by name.

``is_completed`` stands for all of them, so that an author may ask for it, or override it: an override is one more
condition of that name. What a condition raises is the rollout's ``EnvironmentFault``.

This module does not know what the conditions mean; those of ``MultiTurnEnv`` are in ``multi_turn``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from verifiers.rollouts.author_code import extra_parameters, fault, named, passes
from verifiers.rollouts.decorators import decorated
from verifiers.rollouts.state import State

TURN_GUARD = 1000
"""Turns after which a rollout of an environment without a ``max_turns`` of its own is stopped."""
TRUNCATING = frozenset(
    ("prompt_too_long", "max_seq_len_reached", "max_total_completion_tokens_reached", "timeout_reached")
)
"""Stop conditions that cut a rollout short: they set ``is_truncated``."""

Condition = tuple[str, Callable[..., Any], tuple[str, ...]]


async def first_stop(env: Any, state: State) -> str | None:
    """The name of the first stop condition that holds; None to go on."""
    cls: Any = type(env)
    return await _first(env, state, stop_conditions(cls))


async def is_completed(env: Any, *args: Any, **named_arguments: Any) -> bool:
    """Whether a stop condition holds: ``is_completed(state)``, or in the older form ``is_completed(messages, state)``.

    An override of this method is a condition itself; ``await super().is_completed(…)`` asks all the others.
    """
    state = named_arguments["state"] if "state" in named_arguments else args[-1]
    cls: Any = type(env)
    others = [condition for condition in stop_conditions(cls) if condition[0] != "is_completed"]
    return await _first(env, state, others) is not None


async def _first(env: Any, state: State, conditions: list[Condition]) -> str | None:
    name = ""
    try:
        for name, condition, extras in conditions:
            holds = condition(env, state, **named(env, state, extras)) if extras else condition(env, state)
            if holds is not False and holds is not True and inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return name
    except BaseException as error:
        if passes(error):
            raise
        raise fault(name, error) from error
    if env.max_turns <= 0 and len(state["trajectory"]) >= TURN_GUARD:
        return "max_turns_reached"
    return None


@functools.lru_cache(maxsize=1024)
def stop_conditions(cls: Any) -> list[Condition]:
    """(name, function, names of further parameters) of the ``@stop`` methods, and of an overridden ``is_completed``."""
    found = [
        (options.priority, name, function, extra_parameters(function))
        for name, function, options in decorated(cls, "stop")
    ]
    override = getattr(cls, "is_completed", is_completed)
    if override is not is_completed and not any(name == "is_completed" for _, name, _, _ in found):
        function = functools.partial(_with_messages, override) if _wants_messages(override) else override
        found.append((0, "is_completed", function, ()))
    return [(name, function, extras) for _, name, function, extras in sorted(found, key=lambda e: (-e[0], e[1]))]


def _wants_messages(override: Callable[..., Any]) -> bool:
    """Whether an ``is_completed`` is of the form ``(self, messages, state)``, whatever its parameters are called."""
    positional = [p for p in inspect.signature(override).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD,)]
    return len([p for p in positional[1:] if p.default is p.empty]) >= 2


def _with_messages(override: Callable[..., Any], env: Any, state: State) -> Any:
    messages = state["trajectory"][-1].conversation() if state["trajectory"] else state["prompt"][:]
    return override(env, messages, state)
