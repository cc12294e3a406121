"""Run ONE rollout: the model completes and the environment responds until a stop condition holds.

Promise: whatever a hook, a tool or the model endpoint does, ``play`` returns with the state that holds every finished
turn; a failure is recorded on that state and never raised. Only errors that concern the whole run (``RunError``) and
cancellation pass through. Clean-up handlers run exactly once, shielded from cancellation.

This module does not score (``rubrics``), repeat, limit or store rollouts (``runner``).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from verifiers.decorators import decorated
from verifiers.dual import maybe_await
from verifiers.environments.base import Environment
from verifiers.environments.multi_turn import TRUNCATING
from verifiers.errors import (
    ConfigError,
    EnvironmentFault,
    OverlongPromptError,
    RolloutError,
    RolloutTimeout,
    RunError,
)
from verifiers.messages import normalize_messages
from verifiers.state import State

CLEANUP_S = 60.0
PASS_THROUGH = (RolloutError, RunError, ConfigError, asyncio.CancelledError, KeyboardInterrupt)
"""What is never turned into an ``EnvironmentFault``."""
TURN_GUARD = 1000
"""Turns after which a rollout of an environment without a bound of its own is stopped."""


async def play(env: Environment, state: State, timeout_s: float | None = None) -> State:
    """Play the rollout of ``state`` to its end; ``timeout_s`` is the run's guard, recorded as ``RolloutTimeout``."""
    started = time.perf_counter()
    state["timing"]["start_time"] = time.time()
    try:
        async with _bounded(env, state, timeout_s):
            state = await set_up(env, state)
            while (reason := await first_stop(env, state)) is None:
                with hook(state, "env_response"):
                    prompt = await maybe_await(env.get_prompt_messages(state))
                if state["final_env_response"] is not None:
                    reason = "has_final_env_response"
                    break
                with waiting(state, "the model", "model_ms"):
                    response = await env.get_model_response(state, prompt)
                with hook(state, "add_model_response"):
                    await maybe_await(env.add_model_response(state, prompt, response))
            state["stop_condition"] = reason
    except OverlongPromptError:
        state["prompt_too_long"], state["stop_condition"] = True, "prompt_too_long"
    except RolloutError as error:
        state["error"], state["stop_condition"] = error, "has_error"
    finally:
        await asyncio.shield(clean_up(env, state))
    state["timing"]["generation_ms"] = 1000 * (time.perf_counter() - started)
    state["is_completed"] = True
    state["is_truncated"] = state["is_truncated"] or state["stop_condition"] in TRUNCATING
    return state


@asynccontextmanager
async def _bounded(env: Environment, state: State, guard_s: float | None) -> AsyncIterator[None]:
    """The two time limits of a rollout: the environment's (a stop condition) and the run's (an error).

    A ``TimeoutError`` of the author's own is neither: it arrives here as an ``EnvironmentFault`` already.
    """
    limits = [limit for limit in (env.timeout_seconds, guard_s) if limit is not None]
    if not limits:
        yield
        return
    limit = min(limits)
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        state["stop_condition"] = "timeout_reached"
        if limit != env.timeout_seconds:
            awaited = state.waiting_for or "the environment"
            state["error"] = RolloutTimeout(
                f"the rollout was stopped after {limit:g} s while waiting for {awaited}; raise rollout_timeout_s "
                "(vf-eval: --timeout) if it needs longer",
                waiting_for=awaited,
                elapsed_s=limit,
            )
            state["error"].__cause__ = error


async def set_up(env: Environment, state: State) -> State:
    """Run the ``@setup`` handlers and ``setup_state``; a mapping that the latter returns becomes the state."""
    started = time.perf_counter()
    for name, handler, _ in decorated(env, "setup"):
        with hook(state, name):
            await maybe_await(handler(state))
    with hook(state, "setup_state"):
        replaced = await maybe_await(env.setup_state(state)) if hasattr(env, "setup_state") else None
        if replaced is not None and replaced is not state:
            state.update(replaced)
    state["timing"]["setup_ms"] = 1000 * (time.perf_counter() - started)
    return state


async def first_stop(env: Environment, state: State) -> str | None:
    """The name of the first stop condition that holds, by priority, then by name; None to go on."""
    name = ""
    try:
        for name, condition, extras in stop_conditions(type(env)):
            holds = condition(env, state, **_named(env, state, extras)) if extras else condition(env, state)
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return name
    except PASS_THROUGH:
        raise
    except BaseException as error:
        raise fault(name, error) from error
    if len(state["trajectory"]) >= TURN_GUARD:
        return "max_turns_reached"
    return None


@functools.cache
def stop_conditions(cls: type[Environment]) -> list[tuple[str, Callable[..., Any], tuple[str, ...]]]:
    """(name, function, names of further parameters) of the ``@stop`` methods, and of an overridden ``is_completed``."""
    found = []
    for name, function, options in decorated(cls, "stop"):
        parameters = list(inspect.signature(function).parameters)[2:]
        found.append((options.priority, name, function, tuple(p for p in parameters if p in ("task", "env"))))
    override = getattr(cls, "is_completed", None)
    if override is not None and not any(name == "is_completed" for _, name, _, _ in found):
        takes_messages = "messages" in inspect.signature(override).parameters
        function = (lambda env, state: override(env, _messages(state), state)) if takes_messages else override
        found.append((0, "is_completed", function, ()))
    return [(name, function, extras) for _, name, function, extras in sorted(found, key=lambda e: (-e[0], e[1]))]


def _messages(state: State) -> Any:
    return state["trajectory"][-1].conversation() if state["trajectory"] else state["prompt"]


def _named(env: Environment, state: State, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: env if name == "env" else state[name] for name in names}


async def clean_up(env: Environment, state: State) -> None:
    """Render the completion and run the ``@cleanup`` handlers, each bounded; their failures are the rollout's error."""
    for name, handler in [("render_completion", getattr(env, "render_completion", None)), *_cleanups(env)]:
        if handler is None:
            continue
        try:
            async with asyncio.timeout(CLEANUP_S):
                with hook(state, name):
                    await maybe_await(handler(state))
        except (RolloutError, TimeoutError) as error:
            env.logger.warning("clean-up %s failed: %s", name, error)
            if state["error"] is None:
                state["error"] = error if isinstance(error, RolloutError) else fault(name, error)


def _cleanups(env: Environment) -> list[tuple[str, Callable[..., Any]]]:
    return [(n, h) for n, h, options in decorated(env, "cleanup") if options.stage != "group"]


def fault(name: str, error: BaseException) -> EnvironmentFault:
    said = str(error) or "no message"
    fault = EnvironmentFault(f"{name} raised {type(error).__name__}: {said}", hook=name)
    fault.__cause__ = error
    return fault


@contextmanager
def hook(state: State, name: str):
    """Run author code: whatever it raises becomes an ``EnvironmentFault`` that names ``name``."""
    before, state.waiting_for = state.waiting_for, name
    started = time.perf_counter()
    try:
        yield
    except PASS_THROUGH:
        raise
    except BaseException as error:
        raise fault(name, error) from error
    finally:
        state.waiting_for = before
        state["timing"]["env_ms"] += 1000 * (time.perf_counter() - started)


@contextmanager
def waiting(state: State, awaited: str, timing: str):
    """Note what the rollout waits for, and for how long."""
    state.waiting_for = awaited
    started = time.perf_counter()
    try:
        yield
    except PASS_THROUGH:
        raise
    except BaseException as error:
        raise fault("get_model_response", error) from error
    finally:
        state.waiting_for = None
        state["timing"][timing] += 1000 * (time.perf_counter() - started)


def new_state(
    env: Environment, row: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None
) -> State:
    """The state a rollout of ``row`` starts from."""
    state = State(
        row,
        client=client,
        model=model,
        sampling_args=dict(sampling_args or {}),
        tool_defs=env.tool_defs,
        trajectory_id=uuid.uuid4().hex,
    )
    state["prompt"] = normalize_messages(state["prompt"], env.message_type)
    state["completion"] = [] if env.message_type == "chat" else ""
    return state
