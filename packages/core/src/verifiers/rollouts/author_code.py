"""Author code: decorators that mark methods, and calls whose exceptions become the rollout's
``EnvironmentFault``.

``@stop @setup @fork @cleanup @teardown`` mark methods of environments, ``@reward @metric @advantage``
those of rubrics. A decorator only sets an attribute on the method; environments and rubrics collect
marked methods with ``decorated``. Every decorator works bare (``@stop``) and called
(``@stop(priority=10)``). Marks are inherited with the method; an override without the decorator
removes the method from the hooks.

A ``Hook`` block records the time and the name of what it calls. Guarantee: only errors of the
library's own tree, ``KeyboardInterrupt`` and a requested cancellation leave it unchanged.
``SystemExit``, ``RecursionError``, ``MemoryError``, a ``TimeoutError`` of the author's code and a
``CancelledError`` that leaks out of a task of the author fail the rollout like any other exception.

``loop`` decides which hook runs when, and uses its result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from verifiers.errors import (
    ConfigError,
    EnvironmentFault,
    RolloutError,
    RunError,
    UsageError,
    message_of,
)
from verifiers.types import AttributeDict

if TYPE_CHECKING:
    from types import TracebackType

    from verifiers.rollouts.state import State  # imports numpy, which a decorator does not need

F = TypeVar("F", bound=Callable[..., Any])
STAGES = ("rollout", "group")

NEVER_FAULTS = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that stop the process or its event loop; never recorded as a failure of a rollout."""
EXTRA_PARAMETERS = ("task", "env")
"""Parameters that a marked method may declare beside ``state``."""


# --- marks on methods


@overload
def stop(function: F) -> F: ...
@overload
def stop(*, priority: int = 0) -> Callable[[F], F]: ...
def stop(function: F | None = None, *, priority: int = 0) -> object:
    """``f(self, state) -> bool``: a stop condition of a rollout, named after the method.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.

    >>> class Quiz(vf.MultiTurnEnv):
    ...     @vf.stop(priority=5)
    ...     def enough(self, state):
    ...         return len(state["trajectory"]) >= 2
    ...     def env_response(self, messages, state):
    ...         return "Next question."
    """
    return _mark("stop", function, Options(priority))


@overload
def setup(function: F) -> F: ...
@overload
def setup(*, priority: int = 0) -> Callable[[F], F]: ...
def setup(function: F | None = None, *, priority: int = 0) -> object:
    """``f(self, state)``: runs before the first turn of every rollout.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.

    >>> class Quiz(vf.SingleTurnEnv):
    ...     @vf.setup
    ...     async def open_book(self, state):
    ...         state["page"] = 1
    """
    return _mark("setup", function, Options(priority))


@overload
def fork(function: F) -> F: ...
@overload
def fork(*, priority: int = 0) -> Callable[[F], F]: ...
def fork(function: F | None = None, *, priority: int = 0) -> Any:
    """``f(self, state, branch)``: sets in ``branch`` the keys of ``state`` that a deep copy cannot
    copy, for each branch of a rollout; it runs before the other keys are copied.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.

    >>> class Quiz(vf.MultiTurnEnv):
    ...     @vf.fork
    ...     async def open_book_again(self, state, branch):
    ...         branch["book"] = open(state["book"].name)
    ...     def env_response(self, messages, state):
    ...         return state["book"].readline()
    """
    return _mark("fork", function, Options(priority))


@overload
def cleanup(function: F) -> F: ...
@overload
def cleanup(*, priority: int = 0, stage: str = "rollout") -> Callable[[F], F]: ...
def cleanup(function: F | None = None, *, priority: int = 0, stage: str = "rollout") -> object:
    """``f(self, state)``, or ``f(self, states)`` with ``stage="group"``: always runs once, at the
    end.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.
        stage: "rollout" runs it for each rollout, "group" once for all rollouts of an example.

    >>> class Quiz(vf.SingleTurnEnv):
    ...     @vf.cleanup
    ...     async def close_book(self, state):
    ...         state.pop("book", None)
    """
    return _mark("cleanup", function, Options(priority, stage))


@overload
def teardown(function: F) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(function: F | None = None, *, priority: int = 0) -> object:
    """``f(self)``: runs once when the environment closes.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.

    >>> class Quiz(vf.SingleTurnEnv):
    ...     @vf.teardown
    ...     async def leave(self):
    ...         print("bye")
    >>> Quiz(dataset=[{"question": "?"}]).close()
    bye
    """
    return _mark("teardown", function, Options(priority))


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    *, weight: float = 1.0, priority: int = 0, stage: str | None = None
) -> Callable[[F], F]: ...
def reward(
    function: F | None = None, *, weight: float = 1.0, priority: int = 0, stage: str | None = None
) -> object:
    """A reward function of a ``Rubric`` subclass.

    Args:
        function: The method, where the decorator is used without parentheses.
        weight: Weight of the function in the reward.
        priority: Higher runs first; ties run in alphabetical order.
        stage: "rollout" or "group": what the function scores; None = as its parameters say (plural
            names score a group).

    >>> class Polite(vf.Rubric):
    ...     @vf.reward(weight=0.5)
    ...     def says_please(self, completion):
    ...         return float("please" in completion[-1].content)
    >>> Polite().get_reward_weights()
    [0.5]
    """
    return _mark("reward", function, Options(priority, stage, weight))


@overload
def metric(function: F) -> F: ...
@overload
def metric(*, priority: int = 0, stage: str | None = None) -> Callable[[F], F]: ...
def metric(function: F | None = None, *, priority: int = 0, stage: str | None = None) -> object:
    """A function of a ``Rubric`` subclass that is recorded without weight in the reward.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.
        stage: "rollout" or "group": what the function scores; None = as its parameters say (plural
            names score a group).

    >>> class Measured(vf.Rubric):
    ...     @vf.metric
    ...     def num_chars(self, completion):
    ...         return len(completion[-1].content)
    >>> Measured().get_reward_func_names(), Measured().get_reward_weights()
    (['num_chars'], [0.0])
    """
    return _mark("metric", function, Options(priority, stage, 0.0))


@overload
def advantage(function: F) -> F: ...
@overload
def advantage(*, priority: int = 0) -> Callable[[F], F]: ...
def advantage(function: F | None = None, *, priority: int = 0) -> object:
    """``f(self, states) -> list[float]``: computes the advantages of a group instead of the default
    formula.

    Args:
        function: The method, where the decorator is used without parentheses.
        priority: Higher runs first; ties run in alphabetical order.

    >>> class Ranked(vf.Rubric):
    ...     @vf.advantage
    ...     def best_only(self, states):
    ...         best = max(state["reward"] for state in states)
    ...         return [float(state["reward"] == best) for state in states]
    >>> Ranked().has_advantages
    True
    """
    return _mark("advantage", function, Options(priority, "group"))


class Options(AttributeDict):
    """The arguments of a decorator.

    ``priority``: higher runs first, ties run in alphabetical order. ``stage``: "rollout", "group",
    or None if the parameters decide (rewards and metrics). ``weight``: of a reward.
    """

    def __init__(self, priority: int = 0, stage: str | None = None, weight: float = 1.0):
        super().__init__(priority=priority, stage=stage, weight=weight)


def decorated(owner: object, kind: str) -> list[tuple[str, Callable[..., object], Options]]:
    """The methods of a class, or of an object's class, that carry the mark ``kind``: (name,
    function, options).

    Bound when ``owner`` is an object. Sorted by priority, highest first, then by name.

    >>> class Game:
    ...     @stop(priority=5)
    ...     def won(self, state): return state["score"] > 2
    ...     @stop
    ...     def lost(self, state): return False
    >>> [name for name, function, options in decorated(Game, "stop")]
    ['won', 'lost']
    """
    cls = owner if isinstance(owner, type) else type(owner)
    marked = _marked(cls, kind)
    return [(name, getattr(owner, name), options) for name, options in marked] if marked else []


@functools.lru_cache(maxsize=1024)
def _marked(cls: type, kind: str) -> tuple[tuple[str, Options], ...]:
    """(name, options) of a class's marked methods, sorted; cached per class."""
    options_by_name: dict[str, Options | None] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if name not in options_by_name:
                function = (
                    value.__func__ if isinstance(value, staticmethod | classmethod) else value
                )
                options_by_name[name] = (
                    getattr(function, f"__vf_{kind}__", None) if callable(function) else None
                )
    marked = [(name, options) for name, options in options_by_name.items() if options is not None]
    return tuple(sorted(marked, key=lambda pair: (-pair[1].priority, pair[0])))


def _mark(kind: str, function: Callable[..., object] | None, options: Options) -> object:
    if options.stage is not None and options.stage not in STAGES:
        raise ConfigError(
            f'@{kind}(stage={options.stage!r}): write stage="rollout" or stage="group"'
        )

    def mark(target: Callable[..., object]) -> Callable[..., object]:
        if not callable(target):
            raise ConfigError(
                f"@{kind} marks a method, not {type(target).__name__}; options go by keyword"
            )
        setattr(target, f"__vf_{kind}__", options)
        setattr(target, f"{kind}_priority", options.priority)  # read by older tools
        return target

    return mark if function is None else mark(function)


# --- what the library says of functions


class FunctionSet:
    """Functions that the library knows something about; declared by decorating them.

    >>> from verifiers.rollouts.author_code import FunctionSet
    >>> greets = FunctionSet()
    >>> @greets
    ... def hello(): ...
    >>> hello in greets, print in greets
    (True, False)
    """

    def __init__(self) -> None:
        self._functions: dict[int, Callable[..., Any]] = {}

    def __call__(self, function: F) -> F:
        self._functions[id(function)] = function
        return function

    def __contains__(self, function: object) -> bool:
        function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
        return self._functions.get(id(function)) is function


defaults = FunctionSet()
"""Methods as the library defines them: another one is the author's."""
calls_env_response = FunctionSet()
"""``get_prompt_messages`` that ask ``env_response`` from the second turn on."""
sums_turns = FunctionSet()
"""Reward functions that add up the rewards of the turns, which credit per turn counts once."""


# --- calls


class Hook:
    """``with Hook(state, "env_response"): …`` runs author code.

    ``timing``: key of ``state["timing"]`` to which the elapsed milliseconds are added.
    ``stops_run``: a ``UsageError`` (an invalid setting) ends the run instead of this rollout.
    """

    __slots__ = ("name", "outer_wait", "started", "state", "stops_run", "timing")

    def __init__(
        self,
        state: State,
        name: str,
        timing: str | None = "env_ms",
        awaited: str | None = None,
        stops_run: bool = False,
    ):
        self.state, self.name, self.timing, self.stops_run = state, name, timing, stops_run
        self.outer_wait, state.waiting_for = state.waiting_for, awaited or name
        self.started = perf_counter()

    def __enter__(self) -> None:
        """Nothing: the clock runs since the construction, which every hook of a turn pays."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state, timing = self.state, self.timing
        if timing is not None:
            times = state.record.timing
            times[timing] = times.get(timing, 0.0) + 1000 * (perf_counter() - self.started)
        if error is None:
            state.waiting_for = self.outer_wait
        elif not passes(error, self.stops_run):
            state.waiting_for = self.outer_wait
            raise fault(self.name, error) from error
        elif not isinstance(error, asyncio.CancelledError):
            # keep the name, for the message of the time-out
            state.waiting_for = self.outer_wait


async def maybe_await(value: Any) -> Any:
    """The value, awaited when it is awaitable: author-supplied callables may be sync or async."""
    return await value if is_awaitable(value) else value


def is_awaitable(value: object) -> bool:
    """As ``inspect.isawaitable``, but fast for coroutines, and for plain values of synchronous
    callables."""
    kind = type(value)
    return kind is CoroutineType or (kind not in _PLAIN and inspect.isawaitable(value))


_PLAIN = frozenset((type(None), bool, int, float, str, list, dict, tuple))


def passes(error: BaseException, stops_run: bool = False) -> bool:
    """Whether an exception of author code is raised unchanged, not as an ``EnvironmentFault``."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RolloutError, RunError, *NEVER_FAULTS)) or (
        stops_run and isinstance(error, UsageError)
    )


def ends_the_run(error: BaseException) -> bool:
    """Whether an exception concerns the whole run and must not be recorded as the failure of a
    rollout."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, (RunError, UsageError, *NEVER_FAULTS))


def is_cancelled() -> bool:
    """Whether cancellation of the current task was requested; a ``CancelledError`` of an inner task
    does not count."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fault(name: str, error: BaseException) -> EnvironmentFault:
    """The failure of the hook ``name``, chained to the exception that it raised."""
    message = message_of(error) or "no message"
    environment_fault = EnvironmentFault(
        f"{name} raised {type(error).__name__}: {message}", hook=name
    )
    environment_fault.__cause__ = error
    return environment_fault


async def call_handler(env: object, handler: Callable[..., object], state: State) -> object:
    """Call a sync or async marked method with ``state`` and the ``EXTRA_PARAMETERS`` that it
    declares."""
    extras = extra_parameters(getattr(handler, "__func__", handler))
    return await maybe_await(
        handler(state, **extra_arguments(env, state, extras)) if extras else handler(state)
    )


@functools.lru_cache(maxsize=1024)
def extra_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Which of ``EXTRA_PARAMETERS`` a function declares."""
    parameters = inspect.signature(function).parameters
    return tuple(name for name in EXTRA_PARAMETERS if name in parameters)


def extra_arguments(env: object, state: State, names: tuple[str, ...]) -> dict[str, object]:
    """The values of the ``EXTRA_PARAMETERS`` in ``names``."""
    return {name: env if name == "env" else state[name] for name in names}
