"""Hooks of environments in their older forms, chosen when the class of an environment
is created."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from verifiers.legacy.awaited import AwaitableToo, started
from verifiers.rollouts.state import State

HOOKS = frozenset("add_trajectory_step post_rollout sandbox_opened after_turn".split())
"""Hooks of environments that were coroutines, which the code of a subclass may await."""
PRODUCT = "verifiers"
"""First characters of the modules whose synchronous hooks may be awaited."""


def adapt(cls: Any) -> None:
    """Give one class of environments, and the hooks of the product that its code names, their older
    forms."""
    if cls.__module__.startswith(PRODUCT):
        for name, method in list(vars(cls).items()):
            if name == "render_completion" or hasattr(method, "__vf_stop__"):
                _make_awaitable(cls, name)
        if "is_completed" in vars(cls):
            cls.is_completed = _of_last_argument(cls.is_completed)
        return
    if "is_completed" in vars(cls) and _takes_messages(cls.is_completed):
        cls.is_completed = _with_messages(cls.is_completed)
    names = set().union(
        *(_names_in(base) for base in cls.__mro__ if not base.__module__.startswith(PRODUCT))
    )
    for name in HOOKS & names:
        for base in cls.__mro__:
            if base.__module__.startswith(PRODUCT):
                _make_awaitable(base, name)


def _make_awaitable(cls: type, name: str) -> None:
    method = vars(cls).get(name)
    if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
        setattr(cls, name, AwaitableToo(method))


def _names_in(cls: type) -> set[str]:
    """The names that a class defines, and those that the code of its methods reads."""
    names = set(vars(cls))
    codes = [
        inspect.unwrap(method).__code__
        for method in vars(cls).values()
        if inspect.isfunction(method)
    ]
    for code in codes:
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return names


def _of_last_argument(method: Callable[..., Any]) -> Callable[..., object]:
    """``is_completed(state)``, also as ``is_completed(messages, state)``, and without ``await`` if
    nothing waits."""

    @functools.wraps(method)
    def is_completed(env: object, *args: Any, **kwargs: Any) -> Any:
        state = kwargs["state"] if "state" in kwargs else args[-1]
        return started(method(env, state if isinstance(state, State) else State(state)))

    return is_completed


def _takes_messages(override: Callable[..., object]) -> bool:
    """Whether an ``is_completed`` has the signature ``(self, messages, state)``, by any parameter
    names."""
    positional = [
        p
        for p in inspect.signature(override).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return len([p for p in positional[1:] if p.default is p.empty]) >= 2


def _with_messages(override: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(override)
    def is_completed(env: object, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 or kwargs:
            return override(env, *args, **kwargs)
        (state,) = args
        if state.record.transcript:
            messages = state.record.transcript[-1].conversation()
        else:
            messages = state["prompt"][:]
        return override(env, messages, state)

    return is_completed
