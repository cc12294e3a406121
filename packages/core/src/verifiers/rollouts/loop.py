"""Run one rollout: the model completes and the environment responds until a stop condition holds.

Guarantee: when a hook, a tool or the model endpoint fails, ``generate`` still returns the state
with every finished turn; the failure is recorded on that state. Only cancellation and errors that
concern the whole run are raised. Clean-up handlers run exactly once and to completion, even when
the rollout is cancelled.

A rollout stops when a ``@stop`` method of the environment holds, checked by priority, then by name.
``is_completed`` asks all of them; an override of it is one more condition of that name.

``rubrics`` scores rollouts; ``runs`` retries, limits and stores them; ``author_code`` calls author
code.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from verifiers.data.messages import normalize_messages
from verifiers.data.row_format import copy_row
from verifiers.errors import OverlongPromptError, RolloutError, RolloutTimeout
from verifiers.rollouts.author_code import (
    Hook,
    call_handler,
    decorated,
    defaults,
    ends_the_run,
    extra_arguments,
    extra_parameters,
    fault,
    maybe_await,
    passes,
)
from verifiers.rollouts.contract import RolloutEnvironment
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.state import State
from verifiers.runtime.deadlines import Deadline
from verifiers.runtime.decoding import decode_json
from verifiers.types import StopReason, Tool

if TYPE_CHECKING:
    from types import TracebackType

TURN_GUARD = 1000
"""Turn limit of an environment that sets no ``max_turns``."""
CLEANUP_S = 60.0
"""Time limit of each clean-up handler, in seconds."""

current_run: ContextVar[tuple[Any, str] | None] = ContextVar("verifiers_run", default=None)
"""(run, seed key) for states that an author's ``rollout()`` creates inside a run."""

_ids = random.Random()
"""Source of rollout ids; cheaper than a system call for each."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.seed)


Condition = tuple[str, Callable[[RolloutEnvironment, State], Any]]


async def generate(env: RolloutEnvironment, state: State, timeout_s: float | None = None) -> State:
    """Run the rollout of ``state``; ``timeout_s`` is the run's time limit, recorded as
    ``RolloutTimeout``."""
    env, started = env.for_row(state), time.perf_counter()
    conditions = stop_conditions(type(env))
    state.record.timing["start_time"] = time.time()
    try:
        with _Limits(env, state, timeout_s) as limits:
            # 1. set up
            if not state.is_branch:
                await set_up(env, state)
            # 2. take turns until a stop condition holds
            while (reason := await first_stop(env, state, conditions)) is None:
                if await _take_turn(env, state, limits):
                    reason = StopReason.FINAL_RESPONSE.value
                    break
            state.record.status = state.record.status.stopped(reason)
    # 3. record a failure; the turns before it are kept
    except OverlongPromptError:
        state["prompt_too_long"] = True
        state.record.status = state.record.status.stopped(StopReason.PROMPT_TOO_LONG.value)
    except BaseException as error:
        if ends_the_run(error):
            raise
        failure = error if isinstance(error, RolloutError) else fault("the rollout", error)
        state.record.status = state.record.status.failed(failure)
    finally:
        # 4. clean up, also when the rollout is cancelled
        await clean_up(env, state)
    conclude(state, started)
    return state


async def _take_turn(env: RolloutEnvironment, state: State, limits: _Limits) -> bool:
    """Call the model once and record its response; True when the environment gave the final
    response instead."""
    prompt, state.next_prompt = state.next_prompt, None
    if prompt is None:
        with Hook(state, "get_prompt_messages"):
            prompt = env.as_prompt(await maybe_await(env.get_prompt_messages(state)))
    if state["final_env_response"] is not None:
        return True
    limits.check()
    if state.before_call is not None:
        state.next_prompt = prompt
        await state.before_call(state)
        state.next_prompt = None
    with Hook(state, "get_model_response", timing="model_ms", awaited="the model", stops_run=True):
        response = await env.get_model_response(state, prompt)
    with Hook(state, "add_model_response"):
        await maybe_await(env.add_model_response(state, prompt, response))
    return False


# --- stop conditions ------------------------------------------------------------------------------


@defaults
async def is_completed(env: RolloutEnvironment, state: State) -> bool:
    """Whether a stop condition holds.

    An override of this method is a condition; ``await super().is_completed(state)`` asks all
    others.
    """
    conditions = [
        condition for condition in stop_conditions(type(env)) if condition[0] != "is_completed"
    ]
    return await first_stop(env, state, conditions) is not None


async def first_stop(
    env: RolloutEnvironment, state: State, conditions: Iterable[Condition]
) -> str | None:
    """The name of the first of these stop conditions that holds; None to continue."""
    name = ""
    if state.next_prompt is not None:  # a branch: its parent had passed this check
        return None
    try:
        for name, condition in conditions:
            holds = condition(env, state)
            if holds is not False and await maybe_await(holds):  # nearly all are False
                return name
    except BaseException as error:
        if passes(error):
            raise
        raise fault(name, error) from error
    if env.max_turns <= 0 and len(state.record.transcript) >= TURN_GUARD:
        return StopReason.MAX_TURNS.value
    return None


@functools.lru_cache(maxsize=1024)
def stop_conditions(cls: type) -> list[Condition]:
    """(name, function of environment and state) of the ``@stop`` methods, and of an overridden
    ``is_completed``."""
    conditions = [
        (options.priority, name, _of_state(method))
        for name, method, options in decorated(cls, "stop")
    ]
    override = getattr(cls, "is_completed", is_completed)
    if override not in defaults and not any(name == "is_completed" for _, name, _ in conditions):
        conditions.append((0, "is_completed", override))
    return [
        (name, function) for _, name, function in sorted(conditions, key=lambda e: (-e[0], e[1]))
    ]


def _of_state(method: Callable[..., object]) -> Callable[[RolloutEnvironment, State], object]:
    """The method, called with the ``EXTRA_PARAMETERS`` that it declares."""
    if not (extras := extra_parameters(method)):
        return method
    return lambda env, state: method(env, state, **extra_arguments(env, state, extras))


# --- the two time limits --------------------------------------------------------------------------


class _Limits(Deadline):
    """The two time limits of a rollout: the environment's (a stop condition) and the run's (an
    error).

    A ``TimeoutError`` of author code is neither: it is an ``EnvironmentFault`` by the time it gets
    here.
    """

    __slots__ = ("is_run_limit", "state")

    def __init__(self, env: RolloutEnvironment, state: State, run_limit_s: float | None):
        env_limit_s = env.timeout_seconds
        self.state = state
        self.is_run_limit = env_limit_s is None or (
            run_limit_s is not None and run_limit_s < env_limit_s
        )
        super().__init__(run_limit_s if self.is_run_limit else env_limit_s)

    def check(self) -> None:
        """*Raises* the cancellation or the time-out that a hook swallowed."""
        if self.expired:
            raise TimeoutError
        if self.task is not None and self.task.cancelling():
            raise asyncio.CancelledError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            super().__exit__(kind, error, trace)
        except TimeoutError as expired:
            self._record(expired)
            return True
        # raised by a hook after the time-out
        if self.expired and error is not None and not ends_the_run(error):
            self._record(error)
            return True
        return None

    def _record(self, expired: BaseException) -> None:
        record, timeout = self.state.record, StopReason.TIMEOUT.value
        if not self.is_run_limit:
            record.status = record.status.stopped(timeout)
            return
        awaited = self.state.waiting_for or "the environment"
        error = RolloutTimeout(
            f"the rollout was stopped after {self.limit_s:g} s while waiting for {awaited};"
            " raise rollout_timeout_s (vf-eval: --timeout) if it needs longer",
            waiting_for=awaited,
            elapsed_s=self.limit_s,
        )
        error.__cause__ = expired
        record.status = record.status.failed(error, timeout)


async def set_up(env: RolloutEnvironment, state: State) -> None:
    """Run the ``@setup`` handlers and ``setup_state``; a mapping that the latter returns updates
    the state.

    A ``UsageError`` that a handler raises here ends the run: an invalid setting fails every
    rollout.
    """
    for name, handler, _ in decorated(env, "setup"):
        with Hook(state, name, "setup_ms", stops_run=True):
            await call_handler(env, handler, state)
    if env.setup_state not in defaults:
        with Hook(state, "setup_state", "setup_ms", stops_run=True):
            updates = await maybe_await(env.setup_state(state))
            if isinstance(updates, Mapping) and updates is not state:
                state.update(updates)
            elif updates is not None and updates is not state:
                raise TypeError(
                    f"it returned {type(updates).__name__}; return the state, or nothing"
                )
    try:
        row = state.record.row
        row["prompt"] = env.as_prompt(row["prompt"])
    except BaseException as error:
        if passes(error):
            raise
        raise fault("setup_state", error) from error


async def clean_up(env: RolloutEnvironment, state: State) -> None:
    """Render the completion, then run the ``@cleanup`` handlers; their failures are recorded as the
    rollout's error."""
    state.waiting_for, started = "render_completion", time.perf_counter()
    try:
        await maybe_await(env.render_completion(state))
    except BaseException as error:
        if passes(error) and not isinstance(error, RolloutError):
            raise
        failure = error if isinstance(error, RolloutError) else fault("render_completion", error)
        _record_failure(env, state, "render_completion", failure)
    finally:
        state.record.timing["env_ms"] += 1000 * (time.perf_counter() - started)
        handlers = [
            (n, handler)
            for n, handler, options in decorated(env, "cleanup")
            if options.stage != "group"
        ]
        if handlers:
            await _uncancelled(_run_handlers(env, state, handlers))


async def _run_handlers(
    env: RolloutEnvironment, state: State, handlers: list[tuple[str, Callable[..., object]]]
) -> None:
    for name, handler in handlers:
        try:
            with Hook(state, name):
                async with asyncio.timeout(CLEANUP_S):
                    await call_handler(env, handler, state)
        except RolloutError as error:
            _record_failure(env, state, name, error)


async def _uncancelled(work: Awaitable[None]) -> None:
    """Await ``work`` to completion even when this task is cancelled; raise the cancellation
    afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():  # the event loop is closing
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _record_failure(env: RolloutEnvironment, state: State, name: str, error: RolloutError) -> None:
    env.logger.warning("clean-up %s failed: %s", name, error)
    if state.record.error is None:
        state.record.error = error


def conclude(state: State, started: float) -> None:
    """Set the final fields of a finished rollout; ``started`` is of ``time.perf_counter``."""
    state.waiting_for = None
    rollout = state.record
    for turn in rollout.transcript.turns:
        turn.settle()
    for name, count in state.usage_before.items():
        rollout.usage[name] -= count
    rollout.timing["generation_ms"] = 1000 * (time.perf_counter() - started)
    rollout.status = rollout.status.finished()
    error = rollout.error
    # author code may assign any value
    if error is not None and not isinstance(error, RolloutError):
        raised = error if isinstance(error, BaseException) else RuntimeError(str(error))
        rollout.error = fault("the environment", raised)


def new_id() -> str:
    """A random id of a rollout."""
    return f"{_ids.getrandbits(128):032x}"


def new_state(
    env: RolloutEnvironment,
    row: Mapping[str, object],
    client: object,
    model: str,
    sampling_args: Mapping[str, object] | None,
) -> State:
    """The initial state of a rollout of ``row``."""
    rollout = Rollout(
        row=dict(row),
        model=model,
        sampling_args=copy_row(dict(sampling_args)) if sampling_args else {},
        tool_defs=copy_row(env.tool_defs),
        id=new_id(),
        completion=[] if env.message_type == "chat" else "",
    )
    state = State.of(rollout)
    state["client"], state.env = client, env
    columns = rollout.row
    columns["prompt"] = normalize_messages(columns["prompt"], env.message_type)
    info = columns["info"]
    if isinstance(info, str):
        info = columns["info"] = decode_json(info)
    if isinstance(info, Mapping) and (row_tools := info.get("tool_defs") or info.get("oai_tools")):
        # the row's tools, before those of the environment
        rollout.tool_defs = [Tool.from_wire(tool) for tool in row_tools]
    if (run := current_run.get()) is not None:
        state.run, state.seed_key = run
    env.close_at_exit()
    return state
