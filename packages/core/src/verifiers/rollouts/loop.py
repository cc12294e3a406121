"""Run ONE rollout: the model completes and the environment responds until a stop condition holds.

Promise: whatever a hook, a tool or the model endpoint does, ``generate`` returns the state with every finished turn; a
failure is recorded on that state and never raised. Only errors that concern the whole run and cancellation pass
through. Clean-up handlers run exactly once, and to their end even when the rollout is cancelled.

A rollout stops when a ``@stop`` method of the environment holds: by priority, then by name. ``is_completed`` stands for
all of them, so an author may call it, or override it: an override is one more condition of that name.

This module does not score (``rubrics``), repeat, limit or store rollouts (``runs``). ``author_code`` calls what an
author wrote.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from verifiers.data.examples import copy_row
from verifiers.data.messages import normalize_messages
from verifiers.errors import OverlongPromptError, RolloutError, RolloutTimeout
from verifiers.rollouts.author_code import Hook, call_handler, ends_the_run, extra_parameters, fault, named, passes
from verifiers.rollouts.contract import RolloutEnvironment
from verifiers.rollouts.decorators import decorated
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.runtime.deadlines import Deadline
from verifiers.runtime.sync_async import Done, maybe_await
from verifiers.types import StopReason

TURN_GUARD = 1000
"""Turns after which a rollout of an environment without a ``max_turns`` of its own is stopped."""
CLEANUP_S = 60.0
"""What each clean-up handler may take."""

current_run: ContextVar[tuple[Any, str] | None] = ContextVar("verifiers_run", default=None)
"""(run, seed key) for states that an author's own ``rollout()`` makes inside a run."""

_ids = random.Random()
"""Where rollouts get their ids from: a generator of its own, because asking the system for each costs more."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


Condition = tuple[str, Callable[..., Any], tuple[str, ...]]


async def generate(env: RolloutEnvironment, state: State, timeout_s: float | None = None) -> State:
    """Play the rollout of ``state`` to its end; ``timeout_s`` is the run's guard, recorded as ``RolloutTimeout``."""
    env, started = env.for_row(state), time.perf_counter()
    state["timing"]["start_time"] = time.time()
    try:
        with _Limits(env, state, timeout_s) as limits:
            await set_up(env, state)
            while (reason := await first_stop(env, state)) is None:
                with Hook(state, "get_prompt_messages"):
                    prompt = env.as_prompt(await maybe_await(env.get_prompt_messages(state)))
                if state["final_env_response"] is not None:
                    reason = StopReason.FINAL_RESPONSE.value
                    break
                limits.check()
                with Hook(state, "get_model_response", "model_ms", awaited="the model", stops_run=True):
                    response = await env.get_model_response(state, prompt)
                with Hook(state, "add_model_response"):
                    await maybe_await(env.add_model_response(state, prompt, response))
            state["stop_condition"] = reason
    except OverlongPromptError:
        state["prompt_too_long"], state["stop_condition"] = True, StopReason.PROMPT_TOO_LONG.value
    except BaseException as error:
        if ends_the_run(error):
            raise
        state["error"] = error if isinstance(error, RolloutError) else fault("the rollout", error)
        state["stop_condition"] = StopReason.ERROR.value
    finally:
        await clean_up(env, state)
    conclude(state, started)
    return state


# --- when it stops --------------------------------------------------------------------------------------------------


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
        return StopReason.MAX_TURNS.value
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


# --- the two time limits --------------------------------------------------------------------------------------------


class _Limits(Deadline):
    """The two time limits of a rollout: the environment's (a stop condition) and the run's (an error).

    A ``TimeoutError`` of the author's own is neither: it arrives here as an ``EnvironmentFault`` already.
    """

    __slots__ = ("is_guard", "state")

    def __init__(self, env: RolloutEnvironment, state: State, guard_s: float | None):
        own_s = env.timeout_seconds
        self.state = state
        self.is_guard = own_s is None or (guard_s is not None and guard_s < own_s)
        super().__init__(guard_s if self.is_guard else own_s)

    def check(self) -> None:
        """Stop where a hook swallowed the cancellation or the time-out that was meant to stop it."""
        if self.expired:
            raise TimeoutError
        if self.is_cancelled:
            raise asyncio.CancelledError

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        try:
            super().__exit__(kind, error, trace)
        except TimeoutError as expired:
            self._record(expired)
            return True
        if self.expired and error is not None and not ends_the_run(error):  # what a stopped hook made of it
            self._record(error)
            return True
        return None

    def _record(self, expired: BaseException) -> None:
        self.state["stop_condition"] = StopReason.TIMEOUT.value
        if self.is_guard:
            awaited = self.state.waiting_for or "the environment"
            self.state["error"] = RolloutTimeout(
                f"the rollout was stopped after {self.limit_s:g} s while waiting for {awaited}; raise "
                "rollout_timeout_s (vf-eval: --timeout) if it needs longer",
                waiting_for=awaited,
                elapsed_s=self.limit_s,
            )
            self.state["error"].__cause__ = expired


async def set_up(env: RolloutEnvironment, state: State) -> None:
    """Run the ``@setup`` handlers and ``setup_state``; a mapping that the latter returns becomes the state.

    A ``UsageError`` that a handler raises here ends the run: it is a setting that no rollout can work with.
    """
    for name, handler, _ in decorated(env, "setup"):
        with Hook(state, name, "setup_ms", stops_run=True):
            await call_handler(env, handler, state)
    with Hook(state, "setup_state", "setup_ms", stops_run=True):
        replaced = await maybe_await(env.setup_state(state))
        if replaced is not None and replaced is not state and type(replaced) is not Done:
            if not isinstance(replaced, Mapping):
                raise TypeError(f"it returned {type(replaced).__name__}; return the state, or nothing")
            state.update(replaced)
    with Hook(state, "setup_state", None):
        state["prompt"] = env.as_prompt(state["prompt"])


async def clean_up(env: RolloutEnvironment, state: State) -> None:
    """Render the completion, then run the ``@cleanup`` handlers; their failures are the rollout's error."""
    try:
        with Hook(state, "render_completion"):
            await maybe_await(env.render_completion(state))
    except RolloutError as error:
        _note_failure(env, state, "render_completion", error)
    finally:
        handlers = [(n, handler) for n, handler, options in decorated(env, "cleanup") if options.stage != "group"]
        if handlers:
            await _to_its_end(_run_handlers(env, state, handlers))


async def _run_handlers(env: RolloutEnvironment, state: State, handlers: list[tuple[str, Callable[..., Any]]]) -> None:
    for name, handler in handlers:
        try:
            with Hook(state, name):
                async with asyncio.timeout(CLEANUP_S):
                    await call_handler(env, handler, state)
        except RolloutError as error:
            _note_failure(env, state, name, error)


async def _to_its_end(work: Awaitable[None]) -> None:
    """Await ``work`` to its end however often this task is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():  # the loop itself is being closed
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _note_failure(env: RolloutEnvironment, state: State, name: str, error: RolloutError) -> None:
    env.logger.warning("clean-up %s failed: %s", name, error)
    if state["error"] is None:
        state["error"] = error


def conclude(state: State, started: float) -> None:
    """Write down the facts of a finished rollout; ``started`` is of ``time.perf_counter``."""
    state.waiting_for = None
    if state["trajectory"] and isinstance(state["trajectory"][-1], TrajectoryStep):
        state["trajectory"][-1].settle()
    state["timing"]["generation_ms"] = 1000 * (time.perf_counter() - started)
    state["is_completed"] = True
    state["is_truncated"] = state["is_truncated"] or StopReason.truncates(state["stop_condition"])
    error = state["error"]
    if error is not None and not isinstance(error, RolloutError):  # an author wrote something else there
        raised = error if isinstance(error, BaseException) else RuntimeError(str(error))
        state["error"] = fault("the environment", raised)


def new_state(
    env: RolloutEnvironment, row: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None
) -> State:
    """The state a rollout of ``row`` starts from."""
    state = State(
        input=row,
        client=client,
        model=model,
        sampling_args=copy_row(dict(sampling_args)) if sampling_args else {},
        tool_defs=copy_row(env.tool_defs),
        trajectory_id=f"{_ids.getrandbits(128):032x}",
        completion=[] if env.message_type == "chat" else "",
    )
    state["prompt"] = normalize_messages(state["prompt"], env.message_type)
    if isinstance(state["info"], str):
        state["info"] = json.loads(state["info"])
    if (run := current_run.get()) is not None:
        state.run, state.seed_key = run
    env.close_at_exit()
    return state
